"""Runs an order of tasks: computes on this thread, and keeps moves under way beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from imbrex.contracts import Pending
from imbrex.schedule.tasks import MOVES, Kind, Order

Clock = Callable[[Kind, Callable[[], Any]], Any]
"""Runs all tasks of a kind; a profiler's measures them."""
AFTER_MOVES = (Kind.decode_out, Kind.decode_back)


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


def execute_timed(degree: int, work: Work, clock: Clock, *, weights: bool = False) -> None:
    """Every kind of task for all chunks under the clock, nothing beside it. The moves of all chunks are under
    way together: alone, one that fits into a buffer on its way would look faster than the network is."""
    chunks, received = range(degree), {}

    def move(step: Callable[[int], Pending | None]) -> None:
        pending = [step(chunk) for chunk in chunks]
        received.update(zip(chunks, map(_finish, pending), strict=True))

    for kind in Kind:
        if kind == Kind.weights and not weights:
            continue
        step = getattr(work, kind.name)
        if kind in MOVES:
            clock(kind, lambda s=step: move(s))
        elif kind in AFTER_MOVES:
            clock(kind, lambda s=step: [s(chunk, received.pop(chunk)) for chunk in chunks])
        else:
            clock(kind, lambda s=step: [s(chunk) for chunk in chunks])


def _finish(pending: Pending | None) -> Any:
    return None if pending is None else pending.finish()


__all__ = ["Clock", "Kind", "Work", "execute", "execute_timed"]
