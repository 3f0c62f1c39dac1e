"""Measured times of a layer's tasks, for chunks of any size, and the time of an order that follows from
them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imbrex.cost import Curve
from imbrex.schedule.contention import Contention
from imbrex.schedule.tasks import Kind, Order, Times, tasks

Points = Mapping[str, Sequence[tuple[float, float]]]
"""Measured pairs (tokens of a chunk, seconds) by kind of task, and of `plan`, (number of chunks, seconds)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Measured times of a layer's tasks: seconds of the slowest rank. tokens: of the rank with the most.

    contention: by how much computing and moving slow each other down. whole: by scheduler and number of
    chunks, the measured over the predicted time of the whole layer, forward and backward.
    """

    tokens: int
    forward: Points
    backward: Points
    contention: Contention = field(default_factory=Contention)
    whole: Mapping[tuple[str, int], tuple[float, float]] = field(default_factory=dict)

    def times(self, sizes: Sequence[float], *, backward: bool = False) -> Times:
        """The seconds of every task, for chunks of `sizes` tokens."""
        points = self.backward if backward else self.forward
        curves = {kind: Curve.through(points[kind.name]) for kind in Kind if kind.name in points}
        every = tasks(len(sizes), weights=Kind.weights in curves)
        return {t: curves[t.kind](sizes[t.chunk]) for t in every}

    def even_times(self, degree: int) -> tuple[Times, Times]:
        """The seconds of every task of `degree` equal chunks, of the forward and of the backward."""
        sizes = [self.tokens / degree] * degree
        return self.times(sizes), self.times(sizes, backward=True)

    def makespan(self, order: Order, *, backward: bool = False) -> float:
        """The seconds of an order of equal chunks, from the times of its tasks; in the forward with
        planning."""
        times = self.even_times(order.degree)[backward]
        return self.contention.makespan(order, times) + (0.0 if backward else self.planning(order.degree))

    def correction(self, scheduler: str, degree: int) -> tuple[float, float]:
        """The measured over the predicted time, forward and backward. If it was not measured for this
        scheduler, that of another one with as many chunks; otherwise interpolated between the measured
        numbers of chunks."""
        if (scheduler, degree) in self.whole:
            return self.whole[scheduler, degree]
        if not self.whole:
            return 1.0, 1.0
        degrees = sorted({number for _, number in self.whole})
        place = min(max(degree, degrees[0]), degrees[-1])
        by_degree = {
            number: [ratios for (_, of), ratios in self.whole.items() if of == number] for number in degrees
        }
        forward, backward = (
            Curve.through((n, statistics.mean(ratios[back] for ratios in of)) for n, of in by_degree.items())
            for back in (0, 1)
        )
        return forward(place), backward(place)

    def planning(self, degree: int) -> float:
        """The seconds before the first task of a forward with `degree` chunks."""
        return Curve.through(self.forward["plan"])(degree)

    def save(self, path: Path | str, layer: Mapping[str, Any] | None = None) -> None:
        """Write the profile to a file. layer: the settings of the layer that was measured, as JSON values."""
        written: dict[str, Any] = {"layer": layer or {}, "tokens": self.tokens}
        written |= {"forward": dict(self.forward), "backward": dict(self.backward)}
        written["contention"] = {"compute": self.contention.compute, "moves": self.contention.moves}
        written["whole"] = {f"{name}-{degree}": ratios for (name, degree), ratios in self.whole.items()}
        Path(path).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path | str, layer: Mapping[str, Any] | None = None) -> Profile:
        """Read a profile. Raises ValueError if the file is no profile, or is of another layer than
        `layer`."""
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
            profile = Profile(
                tokens=read["tokens"],
                forward=read["forward"],
                backward=read["backward"],
                contention=Contention(**read["contention"]),
                whole={_named(name): (ratios[0], ratios[1]) for name, ratios in read["whole"].items()},
            )
            profile.times([1.0])
            profile.times([1.0], backward=True)
            measured = dict(read["layer"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"schedule: {path} is not a profile ({error}); measure it again") from error
        for name, value in (layer or {}).items():
            if measured.get(name) != value:
                raise ValueError(
                    f"schedule: {path} was measured of another layer ({name} {measured.get(name)}, here "
                    f"{value}); give another file"
                )
        return profile


def _named(schedule: str) -> tuple[str, int]:
    """`optsche-4` as scheduler and number of chunks."""
    name, _, degree = schedule.rpartition("-")
    return name, int(degree)


__all__ = ["Points", "Profile"]
