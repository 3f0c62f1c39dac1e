"""The seven tasks of a chunk of tokens, their dependencies, and the time of an order of them.

    encode_out ─▶ move_out ─▶ decode_out ─▶ experts ─▶ encode_back ─▶ move_back ─▶ decode_back

The two moves use the network, the other tasks the processor. Each of the two does one task at a time
(ScheMoE, section 4). The backward has the same seven tasks: gradients of the outputs are sent to the experts,
and gradients of the tokens come back. It may also have the tasks `weights`, which compute the gradients of
the parameters, and depend on `experts` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """The kinds of tasks, in the order of their dependencies."""

    encode_out = 0
    move_out = 1
    decode_out = 2
    experts = 3
    encode_back = 4
    move_back = 5
    decode_back = 6
    weights = 7


MOVES = (Kind.move_out, Kind.move_back)
CHAIN = tuple(kind for kind in Kind if kind != Kind.weights)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Task:
    """A task: one kind of work on one chunk. Chunks are numbered from 0."""

    kind: Kind
    chunk: int

    @property
    def is_move(self) -> bool:
        return self.kind in MOVES

    @property
    def before(self) -> Task | None:
        """The task that must end before this one starts; `None` for the first."""
        if self.kind == Kind.encode_out:
            return None
        kind = Kind.experts if self.kind == Kind.weights else Kind(self.kind - 1)
        return Task(kind=kind, chunk=self.chunk)

    def __str__(self) -> str:
        return f"{self.kind.name} of chunk {self.chunk}"


def tasks(degree: int, *, weights: bool = False) -> list[Task]:
    """All tasks of `degree` chunks, chunk by chunk."""
    kinds = tuple(Kind) if weights else CHAIN
    return [Task(kind=kind, chunk=chunk) for chunk in range(degree) for kind in kinds]


Times = Mapping[Task, float]
"""Seconds of every task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Two sequences of tasks, the processor's and the network's. A task starts when the one before it in its
    sequence and the one that it depends on have ended."""

    compute: tuple[Task, ...]
    moves: tuple[Task, ...]

    @staticmethod
    def of(sequence: Sequence[Task]) -> Order:
        """The order of one sequence of all tasks, divided into the two."""
        return Order(
            compute=tuple(t for t in sequence if not t.is_move), moves=tuple(t for t in sequence if t.is_move)
        )

    @property
    def degree(self) -> int:
        return len(self.moves) // 2


def run(order: Order, times: Times) -> tuple[float, dict[Task, float]]:
    """The time at which an order ends, and the start of every task, if each starts as soon as it can.

    Raises ValueError if the tasks wait for each other in a circle.
    """
    begins: dict[Task, float] = {}
    over: dict[Task, float] = {}
    lines, free, at = (order.compute, order.moves), [0.0, 0.0], [0, 0]
    while at[0] < len(lines[0]) or at[1] < len(lines[1]):
        moved = False
        for line in (0, 1):
            while at[line] < len(lines[line]):
                task = lines[line][at[line]]
                if task.before is not None and task.before not in over:
                    break
                begin = max(free[line], over[task.before] if task.before is not None else 0.0)
                begins[task] = begin
                over[task] = free[line] = begin + times[task]
                at[line] += 1
                moved = True
        if not moved:
            stuck = " and ".join(str(lines[k][at[k]]) for k in (0, 1) if at[k] < len(lines[k]))
            raise ValueError(f"schedule: {stuck} wait for tasks that come later: the order has a cycle")
    return max(free), begins


def makespan(order: Order, times: Times) -> float:
    """The seconds of an order, from the start of the first task to the end of the last."""
    return run(order, times)[0]


def check(order: Order, degree: int, *, weights: bool = False) -> None:
    """Raise ValueError unless `order` has every task of `degree` chunks once, in the right sequence, and can
    run to its end."""
    expected = set(tasks(degree, weights=weights))
    for line, name, is_move in ((order.compute, "compute", False), (order.moves, "moves", True)):
        strangers = [t for t in line if t not in expected or t.is_move != is_move]
        if strangers:
            raise ValueError(f"schedule: {strangers[0]} does not belong into `{name}` of {degree} chunks")
        twice = next((t for t in line if line.count(t) > 1), None)
        if twice is not None:
            raise ValueError(f"schedule: {twice} stands twice in `{name}`")
    missing = sorted(expected - {*order.compute, *order.moves})
    if missing:
        raise ValueError(f"schedule: {missing[0]} is missing; {len(missing)} of {len(expected)} tasks are")
    run(order, dict.fromkeys(expected, 1.0))
