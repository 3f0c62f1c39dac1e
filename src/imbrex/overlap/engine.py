"""Runs an order of tasks: computes on this thread, and keeps moves under way beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from imbrex.contracts import Pending
from imbrex.overlap.tasks import Kind, Order, Task

Clock = Callable[[Task, Callable[[], Any]], Any]
"""Runs a task's function and returns what it returns; a profiler's measures it."""


class Work(Protocol):
    """The steps of all chunks in one direction, forward or backward; the backward has `weights` besides."""

    def encode_out(self, chunk: int) -> Any: ...
    def move_out(self, chunk: int) -> Pending | None: ...
    def decode_out(self, chunk: int, received: Any) -> None: ...
    def experts(self, chunk: int) -> None: ...
    def encode_back(self, chunk: int) -> None: ...
    def move_back(self, chunk: int) -> Pending | None: ...
    def decode_back(self, chunk: int, received: Any) -> None: ...


def execute(order: Order, work: Work) -> None:
    """Every rank must be given the same `order.moves`: that is the order of its collectives.

    A move starts when the task before it is over and all moves before it have started; the network's own
    queue keeps them apart. The task after it waits for it.
    """
    moves, over, pending = list(order.moves), set(), {}

    def start_moves() -> None:
        while moves and moves[0].before in over:
            task = moves.pop(0)
            pending[task] = getattr(work, task.kind.name)(task.chunk)

    for task in order.compute:
        before = task.before
        step = getattr(work, task.kind.name)
        if before is not None and before.is_move:
            assert before in pending, "the order was not checked"
            under_way = pending.pop(before)
            step(task.chunk, None if under_way is None else under_way.finish())
        else:
            step(task.chunk)
        over.add(task)
        start_moves()


def execute_timed(order: Order, work: Work, clock: Clock) -> None:
    """One task after the other, each under the clock: `order` is sequential."""
    merged = sorted([*order.compute, *order.moves], key=lambda task: (task.chunk, task.kind))
    received: Any = None
    for task in merged:
        step = getattr(work, task.kind.name)
        if task.is_move:
            received = clock(task, lambda s=step, c=task.chunk: _finish(s(c)))
        elif task.before is not None and task.before.is_move:
            clock(task, lambda s=step, c=task.chunk, r=received: s(c, r))
        else:
            clock(task, lambda s=step, c=task.chunk: s(c))


def _finish(pending: Pending | None) -> Any:
    return None if pending is None else pending.finish()


__all__ = ["Clock", "Kind", "Work", "execute", "execute_timed"]
