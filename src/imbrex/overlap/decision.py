"""The decision of `auto` for a layer, as values that a JSON file can hold."""

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
"""The most blocks of a role that a file may name; no GPU has so many multiprocessors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gains:
    """How many times as fast `fused` is as the fastest other strategy, forward and backward together.

    device: by the device's clock, with all work queued ahead, as in a CUDA graph or behind other layers.
    host: by the host's clock, from the call until the device is done. baseline: the name of the fastest other
        strategy by the device's clock, `serial` or an order of chunks.
    """

    device: float
    host: float
    baseline: str

    @staticmethod
    def of(device: Mapping[str, Sequence[float]], host: Mapping[str, Sequence[float]], fused: str) -> Gains:
        """The gains of the strategy named `fused`, from the seconds (forward, backward) of every strategy."""
        baseline = min((name for name in device if name != fused), key=lambda name: sum(device[name]))
        ratios = [sum(seconds[baseline]) / sum(seconds[fused]) for seconds in (device, host)]
        return Gains(device=ratios[0], host=ratios[1], baseline=baseline)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The fastest order of chunks, and whether `fused` is faster still.

    choice: the scheduler and the number of chunks. seconds: for the forward and the backward, the seconds of
        a chunk's task of every kind, from which the scheduler made the order. gains: of `fused`; `None` if
        the layer cannot be fused.
    """

    choice: Choice
    seconds: tuple[Mapping[str, float], Mapping[str, float]]
    gains: Gains | None = None

    @staticmethod
    def of(choice: Choice, profile: Profile) -> Decision:
        """The decision for a choice that was made from `profile`."""
        forward, backward = (
            {task.kind.name: seconds for task, seconds in times.items() if task.chunk == 0}
            for times in profile.even_times(choice.degree)
        )
        return Decision(choice=choice, seconds=(forward, backward))

    @property
    def name(self) -> str:
        """The name of the order of chunks, as in `optsche-4`."""
        return f"{self.choice.scheduler}-{self.choice.degree}"

    def without_fused(self) -> Strategy:
        """The fastest strategy without fused kernels."""
        return Serial() if self.gains is not None and self.gains.baseline == SERIAL else self.pipelined()

    def pipelined(self) -> Pipelined:
        """The fastest order of chunks, as a strategy. Equal decisions give equal orders."""
        forward, backward = (_times(seconds, self.choice.degree) for seconds in self.seconds)
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
        """The decision that a file holds. Raises ValueError, TypeError or KeyError if it holds none."""
        scheduler, degree = value["scheduler"], _whole(value["degree"], MOST_CHUNKS)
        find(scheduler)
        choice = Choice(
            scheduler=scheduler,
            degree=degree,
            forward=_positive(value["forward_s"]),
            backward=_positive(value["backward_s"]),
        )
        forward, backward = (
            {Kind[name].name: _positive(seconds) for name, seconds in value["tasks_s"][direction].items()}
            for direction in ("forward", "backward")
        )
        fused = value["fused"]
        gains = None
        if fused is not None:
            ratios = {name: _positive(fused[name]) for name in ("device", "host")}
            gains = Gains(**ratios, baseline=str(fused["baseline"]))
        decision = Decision(choice=choice, seconds=(forward, backward), gains=gains)
        if gains is not None and gains.baseline not in (SERIAL, decision.name):
            raise ValueError(f"{gains.baseline!r} is neither {SERIAL} nor {decision.name}")
        for seconds in (forward, backward):
            _times(seconds, degree)
        return decision


def roles_as_json(roles: Roles, seconds: Mapping[Roles, Sequence[float]]) -> dict[str, Any]:
    """Roles as JSON, with the seconds (forward, backward) of all that were timed, for people to read."""
    tried = [[of.stage, of.sums, of.dy, of.first, *both] for of, both in seconds.items()]
    names = "stage", "sums", "dy", "first"
    return {name: getattr(roles, name) for name in names} | {"tried": tried}


def why_not_roles(roles: object) -> str | None:
    """Why these are no roles of a fused layer, or `None`: numbers of blocks from 1 to `MOST_BLOCKS`, where 0
    is a number only of those that begin with sums (`sums`, `first`), and `dy` 0 or `None`."""
    if not isinstance(roles, Roles):
        return f"{roles!r} are no roles; give imbrex.contracts.Roles(...)"
    for name, number in zip(Roles._fields, roles, strict=True):
        first, last = int(name in ("stage", "rows")), 0 if name == "dy" else MOST_BLOCKS
        if number is not None and (type(number) is not int or not first <= number <= last):
            numbers = "0" if name == "dy" else f"a whole number from {first} to {last}"
            return f"Roles({name}={number!r}); give None or {numbers}"
    return None


def roles_of_json(value: Mapping[str, Any]) -> Roles:
    """The roles that a file holds. Raises ValueError, TypeError or KeyError if it holds none."""
    stage, sums, first = (
        None if value[n] is None else _whole(value[n], MOST_BLOCKS) for n in ("stage", "sums", "first")
    )
    roles = Roles(stage=stage, sums=sums, dy=value.get("dy"), first=first)
    problem = why_not_roles(roles)
    if problem is not None:
        raise ValueError(problem)
    return roles


def _times(seconds: Mapping[str, float], degree: int) -> Times:
    """The time of every task of `degree` equal chunks, from the seconds of a task of every kind."""
    return {task: seconds[task.kind.name] for task in tasks(degree, weights=Kind.weights.name in seconds)}


def _whole(number: Any, largest: int) -> int:
    if type(number) is not int or not 1 <= number <= largest:
        raise ValueError(f"{number!r} is no number from 1 to {largest}")
    return number


def _positive(number: Any) -> float:
    if type(number) not in (int, float) or not 0 <= number < math.inf:
        raise ValueError(f"{number!r} is no time or ratio")
    return float(number)


__all__ = ["FUSED", "SERIAL", "Decision", "Gains", "roles_as_json", "roles_of_json", "why_not_roles"]
