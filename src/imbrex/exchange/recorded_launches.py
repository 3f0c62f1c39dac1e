"""Records of the launches of calls over NVLink, which `recorded.py` and `recorded_back.py` make and find.

Two calls of one pattern differ in addresses alone: a record is found by its pattern and by those of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from imbrex.contracts import Roles
from imbrex.exchange.recorded_memory import Memory, Scratch
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.records import repeatable
from imbrex.kernels.routing.routed import Sizes

MOST_BYTES = 512 << 20
"""Bytes of memory up to which a call is recorded. An allocator finds more than that easier in parts, and such
a call takes the GPU so long that the host's time does not count."""
MOST_RECORDS = 256
"""The number of records, one for a size, a piece of memory and a buffer, after which all are forgotten."""
BLANKS = {
    lay.Small: {(1, "route.ids"): 0, (1, "route.weights"): 1, (1, "x"): 2},
    lay.Expert: {(1, "route.ids"): 0, (1, "route.weights"): 1, (1, "pull.x"): 2},
    lay.Stage: {(1, "route.ids"): 0, (1, "route.weights"): 1, (1, "pull.x"): 2},
    lay.Reduce: {(1, "out"): 0},
}
"""Arguments that differ from call to call, by the struct of their launch, and their order."""
BLANKS_ADDED = {(1, "out"): 0, (1, "addend"): 1}
"""Arguments of the last launch that differ, if it adds something to the sums."""
BLANKS_BACK = {
    lay.Pull: {(1, "x"): 0},
    lay.StageAgain: {(1, "pull.x"): 0},
    lay.Reduce: {(1, "out"): 0, (1, "values_out"): 1},
}
"""Arguments that differ from backward to backward."""


class Record(NamedTuple):
    """The launches of a forward or of a backward. kinds: the exchange's calls that the first launch makes.
    last: `None` in a backward whose tokens need no gradients."""

    first: Any
    kinds: tuple[str, ...]
    between: tuple[Any, ...]
    last: Any


class Pattern(NamedTuple):
    """The calls of a dispatcher that differ in nothing but addresses. size: the part of their records' keys
    that tells them from others. key: the dispatcher's. choices: K. one_launch: that of the experts.
    small: whether one kernel routes and moves. one_kernel: whether it is to compute the experts as well; such
    calls are captured, too. roles: of kernels that move rows and multiply, `None` in a serial call.
    mean_rows: of a rank."""

    memory: Memory
    size: Any
    key: int
    choices: int
    one_launch: bool | None
    small: bool
    one_kernel: bool
    roles: Roles | None
    mean_rows: int

    @property
    def moves_beside(self) -> bool:
        """Whether rows come beside gate and up."""
        return self.roles is not None and not self.small


class Records:
    """All records of a dispatcher, by key; its patterns, by what tells them apart, and the memory of their
    backwards. They are forgotten together: where experts have moved, choices are counted from now on, or
    there are too many."""

    def __init__(self) -> None:
        self.patterns: dict[Any, Pattern] = {}
        self.scratches: dict[Any, Scratch] = {}
        self.launches: dict[Any, Record] = {}

    def forget(self) -> None:
        self.patterns.clear()
        self.scratches.clear()
        self.launches.clear()

    def keep(
        self, key: Any, first: Any, kinds: tuple[str, ...], between: Sequence[Any], last: Any | None
    ) -> None:
        if len(self.launches) >= MOST_RECORDS:
            self.forget()
        self.launches[key] = Record(first=first, kinds=kinds, between=repeatable(between), last=last)


def sizes_of(shape: lay.Shape) -> Sizes:
    """The sizes of a routing by kernels of this shape."""
    return Sizes(1, shape.ranks, shape.choices, shape.most_slots)
