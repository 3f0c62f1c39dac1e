"""Simulates the events of a layer's tasks on many ranks.

Every rank has two sequences of tasks, computing and moving, in the order that a scheduler made; the order is
the same on all ranks. Ranks depend on each other only where rows arrive. So between two arrivals every rank
runs by itself, and all advance at once, as arrays, from event to event, each by its own clock. When all ranks
have sent a move, its arrival is known, and only then what waits for it. The result is that of a queue of
events in the order of time, for a few array operations per event of one rank.

A `collective` move arrives everywhere when the last rank of its group has sent, and the next one starts then.
`one-sided` rows arrive sender by sender: the first of n chunks has the rows of that n-th part of the ranks
that sent first, and a rank sends on without waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from imbrex.schedule.contention import Contention
from imbrex.schedule.tasks import Order, Task

Floats = NDArray[np.float64]
CLOSE = 1e-12
"""Two times that differ by less than this, in seconds, are equal."""


class Arrival(Enum):
    """The way in which sent rows arrive: `collective` or `one-sided`; see the module."""

    COLLECTIVE = "collective"
    ONE_SIDED = "one-sided"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Times of every rank, in seconds from the start of the layer. begins, ends: of every task; a move ends
    when its rows have arrived. over: the end of the last task."""

    begins: Mapping[Task, Floats]
    ends: Mapping[Task, Floats]
    over: Floats

    @property
    def seconds(self) -> float:
        return float(self.over.max())


def simulate(
    order: Order,
    seconds: Mapping[Task, Floats],
    *,
    contention: Contention | None = None,
    arrival: Arrival = Arrival.COLLECTIVE,
) -> Timeline:
    """Run an order. seconds: of every task on every rank if it runs alone, float64 [W].

    Example: two ranks whose experts take 1 and 3 seconds, everything else nothing: both end after 3, because
    the faster one waits for rows.

    Raises ValueError if tasks wait for tasks that come later, or one takes no finite time.
    """
    if not all(np.isfinite(seconds_W).all() for seconds_W in seconds.values()):
        raise ValueError("simulate: a task never ends; give sizes and figures within reason")
    state = _State(order, seconds, contention or Contention(), len(next(iter(seconds.values()))))
    for number in range(len(order.moves)):
        state.send(number, wait=arrival is Arrival.COLLECTIVE)
        state.arrive(number, arrival)
    state.compute_on()
    return Timeline(begins=state.begins, ends=state.ends, over=state.over())


class _State:
    """The state of all ranks: `clock`, the place in the order of computing, and the seconds left of its
    task."""

    def __init__(
        self, order: Order, seconds: Mapping[Task, Floats], contention: Contention, ranks: int
    ) -> None:
        self.order, self.seconds, self.contention = order, seconds, contention
        place = {task: number for number, task in enumerate(order.moves)}
        # A computing task waits for a move, a move for a computing task; -1 for nothing.
        self.awaited = np.array(
            [-1 if t.before is None else place.get(t.before, -1) for t in order.compute] + [-1]
        )
        self.work_CW = np.stack([*(seconds[task] for task in order.compute), np.zeros(ranks)])
        self.arrived_MW = np.full((max(1, len(order.moves)), ranks), np.inf)
        self.clock, self.at = np.zeros(ranks), np.zeros(ranks, dtype=np.int64)
        self.left, self.ranks = self.work_CW[0].copy(), np.arange(ranks)
        self.begins: dict[Task, Floats] = {}
        self.ends: dict[Task, Floats] = {}
        self._begun_CW = np.full((len(order.compute) + 1, ranks), np.nan)
        self._ended_CW = np.full((len(order.compute) + 1, ranks), np.nan)

    def send(self, number: int, *, wait: bool) -> None:
        """Advance every rank until it has sent a move. wait: until the one before has arrived."""
        task = self.order.moves[number]
        left = self.seconds[task].copy()
        # A move may begin when the task before it, a computing one, is over.
        needed = self._place_of(task.before) + 1
        allowed = self.arrived_MW[number - 1] if wait and number else np.zeros_like(self.clock)
        begun, sending = np.full_like(self.clock, np.nan), np.ones(len(left), dtype=bool)
        while sending.any():
            busy = sending & (self.at >= needed) & (self.clock >= allowed - CLOSE)
            np.copyto(begun, self.clock, where=busy & np.isnan(begun))
            until = np.where(sending & (self.at >= needed) & ~busy, allowed - self.clock, np.inf)
            left = self._step(sending, busy, left, until)
            sending &= ~(busy & (left <= CLOSE))
        self.begins[task], self.ends[task] = begun, self.clock.copy()

    def arrive(self, number: int, arrival: Arrival) -> None:
        """Say when a move that all have sent is there."""
        task = self.order.moves[number]
        sent_W = self.ends[task]
        if arrival is Arrival.COLLECTIVE:
            there_W = np.full_like(sent_W, sent_W.max())
        else:
            last = int(np.ceil((task.chunk + 1) / self.order.degree * len(sent_W))) - 1
            there_W = np.maximum(np.sort(sent_W)[last], sent_W)
        self.arrived_MW[number] = there_W
        self.ends[task] = there_W

    def compute_on(self) -> None:
        """Advance every rank to the end of its computing line."""
        last = len(self.order.compute)
        nothing = np.zeros_like(self.clock)
        while (running := self.at < last).any():
            self._step(running, np.zeros_like(running), nothing, np.full_like(self.clock, np.inf))
        for place, task in enumerate(self.order.compute):
            self.begins[task], self.ends[task] = self._begun_CW[place], self._ended_CW[place]

    def over(self) -> Floats:
        """When every rank is over: its computing, and the last rows that it waits for."""
        arrived_MW = self.arrived_MW[: len(self.order.moves)]
        return np.maximum(self.clock, arrived_MW.max(0, initial=0.0))

    def _place_of(self, task: Task | None) -> int:
        return -1 if task is None else self.order.compute.index(task)

    def _step(self, running: NDArray, sending: NDArray, left: Floats, until: Floats) -> Floats:
        """Advance every running rank to its next event. Returns the seconds left of their moves."""
        last = len(self.order.compute)
        waits = self.awaited[self.at]
        rows_there = np.where(waits < 0, -np.inf, self.arrived_MW[waits, self.ranks])
        waiting = running & (self.at < last)
        computing = waiting & (rows_there <= self.clock + CLOSE)
        both = computing & sending
        slow_compute = np.where(both, self.contention.compute, 1.0)
        slow_moves = np.where(both, self.contention.moves, 1.0)
        begun = self._begun_CW[self.at, self.ranks]
        self._begun_CW[self.at, self.ranks] = np.where(computing & np.isnan(begun), self.clock, begun)
        passed = np.minimum(
            np.where(computing, self.left * slow_compute, np.inf),
            np.where(sending, left * slow_moves, np.inf),
        )
        passed = np.minimum(passed, until)
        passed = np.minimum(passed, np.where(waiting & ~computing, rows_there - self.clock, np.inf))
        if np.isinf(passed[running]).any():
            raise ValueError("simulate: tasks wait for tasks that come later: the order has a cycle")
        passed = np.where(running, passed, 0.0)
        self.clock = self.clock + passed
        self.left = self.left - np.where(computing, passed / slow_compute, 0.0)
        left = left - np.where(sending, passed / slow_moves, 0.0)
        ended = computing & (self.left <= CLOSE)
        self._ended_CW[self.at[ended], self.ranks[ended]] = self.clock[ended]
        self.at = self.at + ended
        self.left = np.where(ended, self.work_CW[self.at, self.ranks], self.left)
        return left


__all__ = ["Arrival", "Floats", "Timeline", "simulate"]
