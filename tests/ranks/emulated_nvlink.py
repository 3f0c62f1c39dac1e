"""The NVLink transport among gloo ranks: heaps in shared memory, kernels by g++ (`tests.emulated`).

A rank's kernel runs in its own process and waits for its peers' flags as on a GPU.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from imbrex.runtime.words import words
from imbrex.transport.board import Board
from imbrex.transport.nvlink import Nvlink
from tests.emulated import kernel
from tests.poison import real_empty


class SharedHeap:
    """Every rank's part of one file, mapped by all; as `imbrex.kernels.heap.Heap` describes."""

    def __init__(self, path: Path, ranks: int, first: int, nbytes: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), ranks * nbytes)
        parts = torch.frombuffer(self._memory, dtype=torch.uint8).view(ranks, nbytes)
        self.bases = tuple(part.data_ptr() for part in parts)
        self.first, self.local = first, parts[first : first + 1]

    def close(self, *, together: bool = True) -> None:
        self.local = self.local[:, :0]


class EmulatedNvlink(Nvlink):
    """As `Nvlink`, on CPUs."""

    load = staticmethod(kernel.load)

    def __init__(self, group: dist.ProcessGroup, **options: Any) -> None:
        few = dict.fromkeys(("dispatch_sms", "small_sms", "push_sms", "combine_sms", "beside_sms"), 2)
        super().__init__(group, **few, **options)

    @staticmethod
    def may_run_on(group: dist.ProcessGroup) -> bool:
        return True

    def why_not(self) -> str | None:
        return None

    def _make_heap(self, nbytes: int) -> SharedHeap:
        nbytes = -(-nbytes // 4096) * 4096
        name = int(self.exchange_counts(words(os.getpid() << 40 ^ id(self)))[0, 0])
        path = Board.path_of(name)
        if self.rank == 0:
            with path.open("wb") as file:
                file.truncate(self.world_size * nbytes)
        self.exchange_counts(words(0))
        with real_empty():
            heap = SharedHeap(path, self.world_size, self.rank, nbytes)
        self.exchange_counts(words(0))
        if self.rank == 0:
            path.unlink()
        return heap
