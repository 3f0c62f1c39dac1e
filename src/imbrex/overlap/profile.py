"""How long the tasks of a layer take: measured one after the other, kept, and read at any chunk size."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import Experts, Routing
from imbrex.cost import Curve
from imbrex.crossings import Crossings
from imbrex.exchange import Exchange
from imbrex.overlap.chunks import Backward, Forward
from imbrex.overlap.contention import Contention, fit
from imbrex.overlap.engine import execute_timed
from imbrex.overlap.tasks import Kind, Times, tasks

Points = Mapping[str, Sequence[tuple[float, float]]]
"""Measured (tokens of a chunk, seconds) by the kind of task, and `plan`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What was measured. Seconds are of the slowest rank; tokens those of the rank that has most.

    contention: how much computing and moving slow each other down.
    """

    tokens: int
    forward: Points
    backward: Points
    contention: Contention = field(default_factory=Contention)

    def times(self, sizes: Sequence[float], *, backward: bool = False) -> Times:
        """Seconds of every task of chunks of `sizes` tokens."""
        points = self.backward if backward else self.forward
        curves = {kind: Curve.through(points[kind.name]) for kind in Kind if kind.name in points}
        every = tasks(len(sizes), weights=Kind.weights in curves)
        return {t: curves[t.kind](sizes[t.chunk]) for t in every}

    def planning(self, degree: int) -> float:
        """Seconds until the first task of a forward with so many chunks."""
        return Curve.through(self.forward["plan"])(degree)

    def save(self, path: Path | str) -> None:
        written = {"tokens": self.tokens, "forward": dict(self.forward), "backward": dict(self.backward)}
        written["contention"] = {"compute": self.contention.compute, "moves": self.contention.moves}
        Path(path).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path | str) -> Profile:
        """Raises ValueError where the file is not a profile."""
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
            made = Profile(
                tokens=read["tokens"],
                forward=read["forward"],
                backward=read["backward"],
                contention=Contention(**read["contention"]),
            )
            made.times([1.0])
            made.times([1.0], backward=True)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"schedule: {path} is not a profile ({error}); measure it again") from error
        return made


def measure(
    exchange: Exchange,
    experts: Experts,
    x_TD: Tensor,
    routing: Routing,
    parameters: Sequence[Tensor],
    *,
    degrees: Sequence[int] = (1, 2, 4, 8),
    repeats: int = 3,
) -> Profile:
    """Time every task at the size it has with each number of chunks, alone, ranks in step, and then some of
    them beside each other. Call it on all ranks. The median of `repeats` after one for warming up; of the
    ranks, the slowest. Gradients are computed and dropped."""
    crossings, transport = exchange._crossings, exchange.transport
    assert isinstance(crossings, Crossings), "kernels that move rows have no steps to time"
    tokens = int(transport.exchange_counts(torch.tensor([x_TD.shape[0]])).max())
    found: dict[bool, dict[str, list[tuple[float, float]]]] = {False: {}, True: {}}
    layer = _Layer(crossings=crossings, experts=experts, x_TD=x_TD, routing=routing, parameters=parameters)
    for degree in degrees:
        runs = [layer.time_tasks(degree) for _ in range(repeats + 1)]
        for key, seconds in _slowest(transport.exchange_counts, runs[1:]).items():
            size, value = (degree, seconds) if key[1] == "plan" else (tokens / degree, seconds / degree)
            found[key[0]].setdefault(key[1], []).append((size, value))
    once = _slowest(transport.exchange_counts, [layer.time_beside() for _ in range(2)])
    often = max(1, min(32, round(once[False, "move"] / max(once[False, "compute"], 1e-6))))
    beside = [layer.time_beside(often) for _ in range(repeats)]
    told = _slowest(transport.exchange_counts, beside)
    contention = fit(*(told[False, name] for name in ("compute", "move", "beside", "together")))
    return Profile(tokens=tokens, forward=found[False], backward=found[True], contention=contention)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """What is measured."""

    crossings: Crossings
    experts: Experts
    x_TD: Tensor
    routing: Routing
    parameters: Sequence[Tensor]

    def clock(self) -> _Clock:
        return _Clock(self.crossings.transport.exchange_counts, self.x_TD.device)

    def begin(self, degree: int) -> Forward:
        tokens = self.x_TD.shape[0]
        even = [tokens // degree + (c < tokens % degree) for c in range(degree)]
        # As a strategy does before it plans.
        self.crossings.handshake(self.x_TD, self.routing)
        return Forward(
            self.crossings, self.experts, self.x_TD, self.routing, None, even, keep=True, defer=True
        )

    @torch.no_grad()
    def time_tasks(self, degree: int) -> dict[tuple[bool, str], float]:
        """Seconds by (backward, kind), summed over chunks, one task after the other."""
        clock = self.clock()
        forward: Any = clock.plan(lambda: self.begin(degree))
        execute_timed(degree, forward, clock)
        clock.backward = True
        work = Backward(forward, torch.ones_like(self.x_TD), self.parameters, [True] * len(self.parameters))
        execute_timed(degree, work, clock, weights=True)
        return clock.seconds

    @torch.no_grad()
    def time_beside(self, repeats: int = 1) -> dict[tuple[bool, str], float]:
        """The experts of one of two chunks, as often as given, and all rows twice; alone and beside each
        other."""
        work, clock = self.begin(2), self.clock()
        encoded = []
        for chunk in work.chunks:
            work.encode_out(work.chunks.index(chunk))
            assert chunk.encoded is not None
            encoded.append((chunk.encoded, chunk.plan.traffic))
        work.decode_out(0, work.move_out(0).finish())

        def begin() -> list[Any]:
            return [self.crossings.begin_out(*one) for one in (*encoded, *encoded)]

        def compute() -> None:
            for _ in range(repeats):
                work.experts(0)

        def both() -> None:
            before = time.perf_counter()
            pending = begin()
            compute()
            clock.settle()
            clock.seconds[False, "beside"] = time.perf_counter() - before
            for one in pending:
                one.finish()

        clock.timed("compute", compute)
        clock.timed("move", lambda: [one.finish() for one in begin()])
        clock.timed("together", both)
        return clock.seconds


def _slowest(gather: Callable[[Tensor], Tensor], runs: list[dict]) -> dict[tuple[bool, str], float]:
    """Medians of this rank's runs, of the slowest rank: the same on every rank."""
    keys = sorted(runs[0])
    medians = [statistics.median(run[key] for run in runs) for key in keys]
    nanoseconds = gather(torch.tensor([int(1e9 * seconds) for seconds in medians])).max(0).values
    # on the host: counts of all ranks are
    return dict(zip(keys, (1e-9 * n for n in nanoseconds.tolist()), strict=True))


class _Clock:
    """Seconds by kind, summed over chunks; all ranks start a task together."""

    def __init__(self, gather: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self.gather, self.device, self.backward = gather, device, False
        self.seconds: dict[tuple[bool, str], float] = {}

    def __call__(self, kind: Kind, step: Callable[[], Any]) -> Any:
        return self.timed(kind.name, step)

    def plan(self, step: Callable[[], Any]) -> Any:
        return self.timed("plan", step)

    def timed(self, name: str, step: Callable[[], Any]) -> Any:
        self._wait()
        begin = time.perf_counter()
        made = step()
        self.settle()
        key = self.backward, name
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - begin
        return made

    def settle(self) -> None:
        if self.device.type == "cuda":
            # host sync: a profile measures what the device does
            torch.cuda.synchronize(self.device)

    def _wait(self) -> None:
        self.settle()
        self.gather(torch.zeros(1, dtype=torch.int64))


__all__ = ["Profile", "measure"]
