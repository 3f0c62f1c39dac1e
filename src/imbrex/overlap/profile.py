"""How long the tasks of a layer take: measured one after the other, kept, and read at any chunk size."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from imbrex.overlap.engine import execute, execute_timed
from imbrex.overlap.schedulers import optsche
from imbrex.overlap.tasks import Kind, Order, Times, tasks

Points = Mapping[str, Sequence[tuple[float, float]]]
"""Measured (tokens of a chunk, seconds) by the kind of task, and `plan`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What was measured. Seconds are of the slowest rank; tokens those of the rank that has most.

    contention: how much computing and moving slow each other down. whole: by direction, of the layer run
        whole with some numbers of chunks, (chunks, measured / predicted from the tasks).
    """

    tokens: int
    forward: Points
    backward: Points
    contention: Contention = field(default_factory=Contention)
    whole: Points = field(default_factory=dict)

    def times(self, sizes: Sequence[float], *, backward: bool = False) -> Times:
        """Seconds of every task of chunks of `sizes` tokens."""
        points = self.backward if backward else self.forward
        curves = {kind: Curve.through(points[kind.name]) for kind in Kind if kind.name in points}
        every = tasks(len(sizes), weights=Kind.weights in curves)
        return {t: curves[t.kind](sizes[t.chunk]) for t in every}

    def makespan(self, order: Order, *, backward: bool = False) -> float:
        """Predicted seconds of an order of equal chunks, planning included in the forward's."""
        times = self.times([self.tokens / order.degree] * order.degree, backward=backward)
        seconds = self.contention.makespan(order, times) + (0.0 if backward else self.planning(order.degree))
        points = self.whole.get("backward" if backward else "forward")
        return seconds if not points else seconds * self._correction(points, order.degree)

    @staticmethod
    def _correction(points: Sequence[tuple[float, float]], degree: int) -> float:
        """Between the measured numbers of chunks a line, beyond them the last."""
        first, last = min(points)[0], max(points)[0]
        return Curve.through(points)(min(max(degree, first), last))

    def planning(self, degree: int) -> float:
        """Seconds until the first task of a forward with so many chunks."""
        return Curve.through(self.forward["plan"])(degree)

    def save(self, path: Path | str) -> None:
        written = {"tokens": self.tokens, "forward": dict(self.forward), "backward": dict(self.backward)}
        written["contention"] = {"compute": self.contention.compute, "moves": self.contention.moves}
        written["whole"] = dict(self.whole)
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
                whole=read["whole"],
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
    """Time every task at the size it has with each number of chunks, alone, ranks in step; then some of them
    beside each other; then the layer whole with each number of chunks. Call it on all ranks. The median of
    `repeats` after one for warming up; of the ranks, the slowest. Gradients are computed and dropped."""
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
    made = Profile(tokens=tokens, forward=found[False], backward=found[True], contention=contention)
    return replace(made, whole=_compare(layer, made, degrees, repeats))


def _compare(layer: _Layer, made: Profile, degrees: Sequence[int], repeats: int) -> Points:
    """What tasks alone do not show: of which otherwise the degree that is underrated most would be chosen."""
    found: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}
    for degree in degrees:
        forward, backward = (
            optsche(dict.fromkeys(tasks(degree, weights=weights), 1.0)) for weights in (False, True)
        )
        runs = [layer.time_whole(forward, backward) for _ in range(repeats + 1)]
        told = _slowest(layer.crossings.transport.exchange_counts, runs[1:])
        for back, order in ((False, forward), (True, backward)):
            guess = made.makespan(order, backward=back)
            ratio = told[back, "whole"] / guess if guess > 0 else 1.0
            found["backward" if back else "forward"].append((degree, ratio))
    return found


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
    def time_whole(self, forward: Order, backward: Order) -> dict[tuple[bool, str], float]:
        """Seconds of a forward and of a backward, by (backward, "whole")."""
        clock = self.clock()
        made: list[Forward] = []

        def ahead() -> None:
            made.append(self.begin(forward.degree))
            execute(forward, made[0])

        def back() -> None:
            grads = torch.ones_like(self.x_TD)
            execute(backward, Backward(made[0], grads, self.parameters, [True] * len(self.parameters)))

        clock.timed("whole", ahead)
        clock.backward = True
        clock.timed("whole", back)
        return clock.seconds

    @torch.no_grad()
    def time_beside(self, repeats: int = 1) -> dict[tuple[bool, str], float]:
        """The experts of one of two chunks, as often as given, and all rows twice; alone and beside each
        other."""
        work, clock = self.begin(2), self.clock()
        encoded = []
        for number, chunk in enumerate(work.chunks):
            work.encode_out(number)
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
