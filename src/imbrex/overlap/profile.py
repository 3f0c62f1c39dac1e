"""How long the tasks of a layer take at any chunk size, and what an order of them takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from imbrex.cost import Curve
from imbrex.overlap.contention import Contention
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

    def even_times(self, degree: int) -> tuple[Times, Times]:
        """Of so many equal chunks, forward and backward."""
        sizes = [self.tokens / degree] * degree
        return self.times(sizes), self.times(sizes, backward=True)

    def makespan(self, order: Order, *, backward: bool = False) -> float:
        """Predicted seconds of an order of equal chunks, planning included in the forward's."""
        times = self.even_times(order.degree)[backward]
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


__all__ = ["Points", "Profile"]
