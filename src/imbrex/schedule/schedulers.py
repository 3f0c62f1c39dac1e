"""The schedulers by name: each is a function from the times of the tasks to an `Order`.

A scheduler of your own is such a function; `imbrex.testing.check_schedule` says whether its orders can run.
"""

from __future__ import annotations

from collections.abc import Callable

from imbrex.schedule.exact import exact
from imbrex.schedule.rules import optsche, sequential, stage_major
from imbrex.schedule.tasks import Order, Times

Scheduler = Callable[[Times], Order]
"""A function from the seconds of the tasks to an order of them, the same on every rank."""
SCHEDULERS: dict[str, Scheduler] = {
    "sequential": sequential,
    "stage-major": stage_major,
    "optsche": optsche,
    "exact": exact,
}
"""The schedulers, by name."""


def register(name: str, scheduler: Scheduler) -> None:
    """Let `schedule=name` stand for `scheduler`. Raises ValueError if the name is taken."""
    if SCHEDULERS.get(name, scheduler) is not scheduler:
        raise ValueError(f"schedule: the name {name!r} is taken; choose another")
    SCHEDULERS[name] = scheduler
