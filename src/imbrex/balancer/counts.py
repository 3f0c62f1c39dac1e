"""Choices of every slot in an iteration: known on the host at once, or read from a GPU later."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from imbrex.contracts import Placement
from imbrex.placement.packing import Ints
from imbrex.runtime.streams import StreamEvent

BLOCK = 1 << 18
"""int32 numbers of a block: 240 layers of 272 slots on 4 ranks."""


class Iteration:
    """Choices of one iteration of one layer, read when first asked for.

    read: int64 [sources, S]. Sources are the ranks of the group, or one row where all have the same tokens.
    known: whether reading would not wait.
    """

    def __init__(
        self, placement: Placement, read: Callable[[], Ints], known: Callable[[], bool] = lambda: True
    ) -> None:
        self.placement, self._read, self._known = placement, read, known

    @property
    def known(self) -> bool:
        return self._known()

    @cached_property
    def rows_WS(self) -> Ints:
        return self._read()

    @cached_property
    def counts_WE(self) -> Ints:
        """Choices of every source for every expert."""
        slots = np.array(self.placement.slots)
        filled = slots >= 0
        counts_EW = np.zeros((self.placement.num_experts, len(self.rows_WS)), dtype=np.int64)
        np.add.at(counts_EW, slots[filled], self.rows_WS.T[filled])
        return counts_EW.T

    @property
    def counts_E(self) -> Ints:
        """Choices of all ranks for every expert."""
        return self.counts_WE.sum(0)

    @cached_property
    def crossings_WW(self) -> Ints:
        """Choices of a rank's tokens by the rank that computed them. Tensor ranks count for their expert
        rank; one row, where all ranks have the same tokens, for rank 0."""
        ranks = self.placement.num_ranks
        ends_WS = np.pad(np.cumsum(self.rows_WS, 1), ((0, 0), (1, 0)))
        rows_WW = np.diff(ends_WS[:, list(self.placement.rank_offsets)])
        crossings_WW = np.zeros((ranks, ranks), dtype=np.int64)
        np.add.at(crossings_WW, np.arange(len(rows_WW)) // max(len(rows_WW) // ranks, 1), rows_WW)
        return crossings_WW

    @property
    def loads_W(self) -> Ints:
        """Choices that every rank computed."""
        return self.crossings_WW.sum(0)


class Page:
    """The contents of the blocks of a `Book` when it was turned."""

    def __init__(self, blocks: list[Tensor], mark: StreamEvent, timeout_s: float) -> None:
        self.blocks, self.mark, self.timeout_s = blocks, mark, timeout_s

    def read(self, at: tuple[int, int], shape: tuple[int, int]) -> Ints:
        self.mark.wait(self.timeout_s)
        block, first = at
        values = self.blocks[block].numpy()[first : first + shape[0] * shape[1]]
        return values.reshape(shape)


class Book:
    """Sums that kernels keep on a device, copied to the host after every iteration without waiting."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.device, self.timeout_s = device, timeout_s
        self._blocks: list[Tensor] = []
        self._used = BLOCK

    def open(self, ranks: int, slots: int) -> tuple[Tensor, tuple[int, int]]:
        """Zeros int32 [ranks, slots] that stay where they are, and where in the book."""
        size = ranks * slots
        if self._used + size > BLOCK:
            self._blocks.append(torch.zeros(max(BLOCK, size), dtype=torch.int32, device=self.device))
            self._used = 0
        at = len(self._blocks) - 1, self._used
        self._used += size
        return self._blocks[-1][at[1] : self._used].view(ranks, slots), at

    def turn(self) -> Page:
        """A page of what has been queued so far."""
        pinned = self.device.type == "cuda"
        copies = []
        for number, block in enumerate(self._blocks):
            used = self._used if number == len(self._blocks) - 1 else len(block)
            copy = torch.empty(used, dtype=torch.int32, device="cpu", pin_memory=pinned)
            copies.append(copy.copy_(block[:used], non_blocking=True))
        return Page(copies, StreamEvent(self.device), self.timeout_s)


def difference(after: Page, before: Page | None, at: tuple[int, int], shape: tuple[int, int]) -> Ints:
    """Choices between two pages, int64; sums that have run over 2^31 wrap around."""
    rows = after.read(at, shape)
    if before is not None:
        rows = rows - before.read(at, shape)
    return rows.astype(np.int64)
