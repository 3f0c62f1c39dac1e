"""How long the tasks of a layer take: measured one after the other, kept, and read at any chunk size."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import Experts, Routing
from imbrex.cost import Curve
from imbrex.crossings import Crossings
from imbrex.exchange import Exchange
from imbrex.overlap.chunks import Backward, Forward
from imbrex.overlap.engine import execute_timed
from imbrex.overlap.schedulers import sequential
from imbrex.overlap.tasks import CHAIN, Task, Times, tasks

Points = Mapping[str, Sequence[tuple[float, float]]]
"""Measured (tokens of a chunk, seconds) by the kind of task, and `plan`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What was measured. Seconds are of the slowest rank; tokens those of the rank that has most."""

    tokens: int
    forward: Points
    backward: Points

    def times(self, sizes: Sequence[float], *, backward: bool = False) -> Times:
        """Seconds of every task of chunks of `sizes` tokens."""
        points = self.backward if backward else self.forward
        curves = {kind: Curve.through(points[kind.name]) for kind in CHAIN}
        return {t: curves[t.kind](sizes[t.chunk]) for t in tasks(len(sizes))}

    def planning(self, degree: int) -> float:
        """Seconds until the first task of a forward with so many chunks."""
        return Curve.through(self.forward["plan"])(degree)

    def save(self, path: Path | str) -> None:
        written = {"tokens": self.tokens, "forward": dict(self.forward), "backward": dict(self.backward)}
        Path(path).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path | str) -> Profile:
        """Raises ValueError where the file is not a profile."""
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
            made = Profile(tokens=read["tokens"], forward=read["forward"], backward=read["backward"])
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
    """Time every task at the size it has with each number of chunks, alone, ranks in step. Call it on all
    ranks. The median of `repeats` after one for warming up; of the ranks, the slowest. Gradients are computed
    and dropped."""
    crossings, transport = exchange._crossings, exchange.transport
    assert isinstance(crossings, Crossings), "kernels that move rows have no steps to time"
    tokens = int(transport.exchange_counts(torch.tensor([x_TD.shape[0]])).max())
    found: dict[bool, dict[str, list[tuple[float, float]]]] = {False: {"plan": []}, True: {}}
    for degree in degrees:
        even = [x_TD.shape[0] // degree + (c < x_TD.shape[0] % degree) for c in range(degree)]
        order = sequential(dict.fromkeys(tasks(degree), 1.0))
        runs: list[dict[tuple[bool, str], float]] = []
        for _ in range(repeats + 1):
            clock = _Clock(transport.exchange_counts, x_TD.device)
            with torch.no_grad():
                forward: Any = clock.plan(
                    lambda e=even: Forward(crossings, experts, x_TD, routing, None, e, keep=True)
                )
                execute_timed(order, forward, clock)
                clock.backward = True
                work = Backward(forward, torch.ones_like(x_TD), parameters, [True] * len(parameters))
                execute_timed(order, work, clock)
            runs.append({key: seconds / degree for key, seconds in clock.seconds.items()})
        for key, seconds in _slowest(transport.exchange_counts, runs[1:]).items():
            size = degree if key[1] == "plan" else tokens / degree
            value = seconds * degree if key[1] == "plan" else seconds
            found[key[0]].setdefault(key[1], []).append((size, value))
    return Profile(tokens=tokens, forward=found[False], backward=found[True])


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

    def __call__(self, task: Task, step: Callable[[], Any]) -> Any:
        return self._timed(task.kind.name, step)

    def plan(self, step: Callable[[], Any]) -> Any:
        return self._timed("plan", step)

    def _timed(self, name: str, step: Callable[[], Any]) -> Any:
        self._wait()
        begin = time.perf_counter()
        made = step()
        if self.device.type == "cuda":
            # host sync: a profile measures what the device does
            torch.cuda.synchronize(self.device)
        key = self.backward, name
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - begin
        return made

    def _wait(self) -> None:
        if self.device.type == "cuda":
            # host sync: a profile measures what the device does
            torch.cuda.synchronize(self.device)
        self.gather(torch.zeros(1, dtype=torch.int64))


__all__ = ["Profile", "measure"]
