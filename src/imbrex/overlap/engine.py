"""Runs the tasks of a layer in a given order: computing tasks on this thread, moves at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from imbrex.contracts import Pending
from imbrex.schedule.tasks import MOVES, Kind, Order

Clock = Callable[[Kind, Callable[[], Any]], Any]
"""Runs a function that does all tasks of a kind, and times it."""
AFTER_MOVES = (Kind.decode_out, Kind.decode_back)


class Work(Protocol):
    """The tasks of one direction, forward or backward, each for one chunk. The names are those of `Kind`; the
    backward also has `weights`."""

    def encode_out(self, chunk: int) -> Any: ...
    def move_out(self, chunk: int) -> Pending | None: ...
    def decode_out(self, chunk: int, received: Any) -> None: ...
    def experts(self, chunk: int) -> None: ...
    def encode_back(self, chunk: int) -> None: ...
    def move_back(self, chunk: int) -> Pending | None: ...
    def decode_back(self, chunk: int, received: Any) -> None: ...


def execute(order: Order, work: Work) -> None:
    """Run all tasks of an order.

    A move starts as soon as the task that it depends on (`task.before`) has run and all earlier moves have
    started; the network does them one after the other. The task that depends on a move waits for it. Moves
    are collectives, so `order.moves` must be the same on every rank.
    """
    moves, completed, pending = list(order.moves), set(), {}

    def start_moves() -> None:
        while moves and moves[0].before in completed:
            task = moves.pop(0)
            pending[task] = getattr(work, task.kind.name)(task.chunk)

    for task in order.compute:
        before = task.before
        step = getattr(work, task.kind.name)
        if before is not None and before.is_move:
            assert before in pending, "the order was not checked"
            started = pending.pop(before)
            step(task.chunk, None if started is None else started.finish())
        else:
            step(task.chunk)
        completed.add(task)
        start_moves()


def execute_timed(degree: int, work: Work, clock: Clock, *, weights: bool = False) -> None:
    """Run and time the tasks kind by kind, each kind for all chunks, with nothing else at the same time.

    All moves of a kind are started together. A single small move would look faster than the network is,
    because it fits into a buffer.

    weights: whether to run the tasks `weights`, which only the backward has.
    """
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
