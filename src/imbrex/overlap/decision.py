"""Decisions of `auto` for a layer, in values that a file can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from imbrex.contracts import Roles, Strategy
from imbrex.overlap.pipelined import MOST_CHUNKS, Pipelined, find
from imbrex.overlap.serial import Serial
from imbrex.schedule.choice import Choice
from imbrex.schedule.profile import Profile
from imbrex.schedule.tasks import Kind, Times, tasks

SERIAL, FUSED = "serial", "fused"
MOST_BLOCKS = 1024
"""No GPU has so many multiprocessors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gains:
    """How many times as fast `fused` is as what is the fastest without it, forward and backward together.

    device: by the device's clock, with the work queued ahead, as in a CUDA graph or behind other layers.
    called: by the host's, from the call until the device is done. over: that fastest, `serial` or an order.
    """

    device: float
    called: float
    over: str

    @staticmethod
    def of(device: Mapping[str, Sequence[float]], called: Mapping[str, Sequence[float]], fused: str) -> Gains:
        """The gains of `fused`, from the seconds of each by both clocks; by the device's one is fastest."""
        over = min((name for name in device if name != fused), key=lambda name: sum(device[name]))
        ratios = [sum(seconds[over]) / sum(seconds[fused]) for seconds in (device, called)]
        return Gains(device=ratios[0], called=ratios[1], over=over)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The best order of chunks, the seconds of tasks that it was made for by kind, forward and backward, and
    what `fused` gains over it, where it can run."""

    choice: Choice
    seconds: tuple[Mapping[str, float], Mapping[str, float]]
    gains: Gains | None = None

    @staticmethod
    def of(choice: Choice, profile: Profile) -> Decision:
        forward, backward = (
            {task.kind.name: seconds for task, seconds in times.items() if task.chunk == 0}
            for times in profile.even_times(choice.degree)
        )
        return Decision(choice=choice, seconds=(forward, backward))

    @property
    def name(self) -> str:
        """The order's."""
        return f"{self.choice.scheduler}-{self.choice.degree}"

    def apart(self) -> Strategy:
        """The fastest without fused kernels."""
        return Serial() if self.gains is not None and self.gains.over == SERIAL else self.order()

    def order(self) -> Pipelined:
        """The best order, the same from the same values on every rank."""
        forward, backward = (_times(of, self.choice.degree) for of in self.seconds)
        return Pipelined(self.choice.scheduler, self.choice.degree, times=(forward, backward))

    def as_json(self) -> dict[str, Any]:
        choice, (forward, backward) = self.choice, self.seconds
        value: dict[str, Any] = {"scheduler": choice.scheduler, "degree": choice.degree}
        value |= {"forward_s": choice.forward, "backward_s": choice.backward}
        value["tasks_s"] = {"forward": dict(forward), "backward": dict(backward)}
        gains = self.gains
        value["fused"] = None if gains is None else asdict(gains)
        return value

    @staticmethod
    def of_json(value: Mapping[str, Any]) -> Decision:
        """The decision. Raises ValueError, TypeError or KeyError for what is none."""
        scheduler, degree = value["scheduler"], _whole(value["degree"], MOST_CHUNKS)
        find(scheduler)
        choice = Choice(
            scheduler=scheduler,
            degree=degree,
            forward=_positive(value["forward_s"]),
            backward=_positive(value["backward_s"]),
        )
        forward, backward = (
            {Kind[name].name: _positive(seconds) for name, seconds in value["tasks_s"][side].items()}
            for side in ("forward", "backward")
        )
        fused = value["fused"]
        gains = None
        if fused is not None:
            ratios = {name: _positive(fused[name]) for name in ("device", "called")}
            gains = Gains(**ratios, over=str(fused["over"]))
        decision = Decision(choice=choice, seconds=(forward, backward), gains=gains)
        for seconds in (forward, backward):
            _times(seconds, degree)
        return decision


def roles_as_json(roles: Roles, seconds: Mapping[Roles, Sequence[float]]) -> dict[str, Any]:
    """Roles, with the seconds, forward and backward, of all that were tried."""
    tried = [[of.stage, of.sums, of.dy, of.first, *both] for of, both in seconds.items()]
    names = "stage", "sums", "dy", "first"
    return {name: getattr(roles, name) for name in names} | {"tried": tried}


def roles_of_json(value: Mapping[str, Any]) -> Roles:
    """The roles. Raises ValueError, TypeError or KeyError for what is none."""
    stage, sums, first = (
        None if value[n] is None else _whole(value[n], MOST_BLOCKS) for n in ("stage", "sums", "first")
    )
    return Roles(stage=stage, sums=sums, dy=None if value.get("dy") is None else 0, first=first)


def _times(seconds: Mapping[str, float], degree: int) -> Times:
    return {task: seconds[task.kind.name] for task in tasks(degree, weights=Kind.weights.name in seconds)}


def _whole(number: Any, most: int) -> int:
    if type(number) is not int or not 1 <= number <= most:
        raise ValueError(f"{number!r} is no number from 1 to {most}")
    return number


def _positive(number: Any) -> float:
    if type(number) not in (int, float) or not 0 <= number < math.inf:
        raise ValueError(f"{number!r} is no time or ratio")
    return float(number)


__all__ = ["FUSED", "SERIAL", "Decision", "Gains", "roles_as_json", "roles_of_json"]
