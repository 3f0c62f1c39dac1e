"""The choice of a scheduler and a number of chunks, from a profile of the layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from imbrex.schedule.exact import MOST_CHUNKS
from imbrex.schedule.profile import Profile
from imbrex.schedule.schedulers import SCHEDULERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A scheduler and a number of chunks, with the predicted seconds of the forward, planning included, and
    of the backward."""

    scheduler: str
    degree: int
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def candidates(degree: int, scheduler: str | None = None) -> list[str]:
    """The schedulers worth comparing: `exact`, for as many chunks as it can do, and `optsche`, which is
    better if tasks take other times than the profile says. scheduler: the only candidate, if given."""
    if scheduler is not None:
        return [scheduler]
    return ["optsche", "exact"] if 1 < degree <= MOST_CHUNKS else ["optsche"]


def predict(profile: Profile, scheduler: str, degree: int) -> Choice:
    """The predicted seconds of a scheduler with `degree` equal chunks."""
    forward, backward = (SCHEDULERS[scheduler](times) for times in profile.even_times(degree))
    ratios = profile.correction(scheduler, degree)
    return Choice(
        scheduler=scheduler,
        degree=degree,
        forward=profile.makespan(forward) * ratios[0],
        backward=profile.makespan(backward, backward=True) * ratios[1],
    )


def choose(
    profile: Profile, degrees: Sequence[int] = (1, 2, 3, 4, 6, 8), scheduler: str | None = None
) -> Choice:
    """The candidate with the shortest predicted time. Of equal ones the one with the fewest chunks, then the
    simplest."""
    predictions = [predict(profile, name, r) for r in degrees for name in candidates(r, scheduler)]
    return min(predictions, key=lambda choice: (choice.seconds, choice.degree))


__all__ = ["Choice", "candidates", "choose", "predict"]
