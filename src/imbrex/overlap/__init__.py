"""When the steps of a layer run. A strategy changes no number, only the order in time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

from imbrex.contracts import Strategy
from imbrex.overlap.auto import Auto
from imbrex.overlap.events import Events
from imbrex.overlap.fused import Fused
from imbrex.overlap.pipelined import Pipelined, split_by_source
from imbrex.overlap.serial import Serial
from imbrex.runtime import checks
from imbrex.schedule import schedulers
from imbrex.schedule.schedulers import SCHEDULERS, Scheduler
from imbrex.schedule.tasks import Kind, Order, Task, Times, makespan, tasks

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "serial": Serial,
    "auto": Auto,
    "pipelined": Pipelined,
    "events": Events,
    "fused": Fused,
    "megatron": lambda: Pipelined("sequential", 1, name="megatron"),
    "fastermoe": lambda: Pipelined("optsche", 2, split=split_by_source, name="fastermoe"),
    "tutel": lambda: Auto(scheduler="stage-major", name="tutel", keep=False),
}
"""Makers of the strategies, by name. The last three order our own tasks as other systems do: emulations."""

PRESETS: dict[str, dict[str, str]] = {
    "megatron": {"schedule": "megatron", "transport": "alltoall"},
    "fastermoe": {"schedule": "fastermoe", "transport": "alltoall"},
    "tutel": {"schedule": "tutel", "transport": "2dh"},
}
"""Other systems made of our own parts, as options of `MoELayer`: Megatron overlaps nothing; FasterMoE has two
chunks by source rank; Tutel takes every kind of task for all chunks before the next, 1, 2, 4 or 8 of them,
whichever is predicted to end first, over an all-to-all in two levels."""


def make(strategy: str | Strategy | Scheduler) -> Strategy:
    """A strategy by name, or the object itself. `events(tau=0.05, epsilon=1)` has patience. `optsche-4` is
    the scheduler `optsche` with 4 chunks; without a number, 2, as a scheduler's function has.
    Raises ValueError that lists the names known, or says what an object lacks."""
    if callable(strategy) and not isinstance(strategy, type | Strategy):
        return Pipelined(strategy)
    if not isinstance(strategy, str):
        return checks.piece("schedule", cast("Strategy", strategy))
    if strategy in STRATEGIES:
        return STRATEGIES[strategy]()
    by_events = Events.of(strategy)
    if by_events is not None:
        return by_events
    match = re.fullmatch(r"(.+?)(?:-(\d+))?", strategy)
    if match and match[1] in SCHEDULERS:
        return Pipelined(match[1], int(match[2] or 2))
    known = ", ".join([*STRATEGIES, *SCHEDULERS])
    raise ValueError(
        f"schedule: {strategy!r} is not known; use one of {known}, with a degree as in optsche-4"
    )


def register(name: str, scheduler: Scheduler) -> None:
    """Let `schedule=name` stand for `scheduler`. Raises ValueError where the name is taken or could not be
    told from a scheduler with a number of chunks."""
    if name in STRATEGIES:
        raise ValueError(f"schedule: the name {name!r} is taken; choose another")
    if re.fullmatch(r".*-\d+", name):
        raise ValueError(f"schedule: {name!r} ends like a number of chunks; choose another name")
    schedulers.register(name, scheduler)


__all__ = [
    "PRESETS",
    "SCHEDULERS",
    "STRATEGIES",
    "Auto",
    "Events",
    "Fused",
    "Kind",
    "Order",
    "Pipelined",
    "Scheduler",
    "Serial",
    "Task",
    "Times",
    "make",
    "makespan",
    "register",
    "tasks",
]
