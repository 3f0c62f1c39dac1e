"""The time of an order if computing and moving slow each other down, because they share cores or memory
bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from imbrex.schedule.tasks import Order, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Contention:
    """Slowdown factors, at least 1: `compute` of a computing task while rows move, `moves` of a move while
    something is computed."""

    compute: float = 1.0
    moves: float = 1.0

    def makespan(self, order: Order, times: Mapping[Task, float]) -> float:
        """The seconds of an order. Example: one second of computing and one of moving at the same time, which
        slow each other down by 1.5, end after 1.5 seconds.

        Raises ValueError if tasks wait for each other in a circle.
        """
        lines, at, clock = (order.compute, order.moves), [0, 0], 0.0
        left = [times[line[0]] if line else 0.0 for line in lines]
        over: set[Task] = set()
        while at[0] < len(lines[0]) or at[1] < len(lines[1]):
            busy = [k for k in (0, 1) if at[k] < len(lines[k]) and _ready(lines[k][at[k]], over)]
            if not busy:
                raise ValueError("schedule: tasks wait for tasks that come later: the order has a cycle")
            slower = (self.compute, self.moves) if len(busy) == 2 else (1.0, 1.0)
            first = min(busy, key=lambda k: left[k] * slower[k])
            passed = left[first] * slower[first]
            clock += passed
            for k in busy:
                left[k] -= passed / slower[k]
            over.add(lines[first][at[first]])
            at[first] += 1
            left[first] = times[lines[first][at[first]]] if at[first] < len(lines[first]) else 0.0
        return clock


def _ready(task: Task, over: set[Task]) -> bool:
    return task.before is None or task.before in over


def fit(compute: float, move: float, beside: float, together: float) -> Contention:
    """The slowdown factors that explain four measured times, in seconds: computing alone, moving alone, the
    computing while rows move (`beside`), and both until the later one ends (`together`). The move starts
    first, and should be the longer one.

    Example: computing takes 1 alone, moving 2. At the same time the computing takes 1.5, and both have ended
    after 2.75. So the move had 1.25 left when the computing ended: it did 0.75 in 1.5 seconds, half its
    speed.
    """
    slow_compute = max(1.0, beside / compute) if compute > 0 else 1.0
    after = max(0.0, together - beside)
    done = move - after
    slow_moves = max(1.0, beside / done) if done > 0.05 * move else 1.0
    return Contention(compute=min(slow_compute, 3.0), moves=min(slow_moves, 3.0))


__all__ = ["Contention", "fit"]
