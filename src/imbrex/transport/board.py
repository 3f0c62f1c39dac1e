"""A board in shared memory: the hosts of one machine's ranks tell each other a word before they launch.

    board = Board(path, rank, world_size, timeout_s)
    words_W = board.tell(4096)                # this call's word of every rank; waits for hosts, not GPUs

A word is there within a microsecond of its writing, and no GPU is asked for anything: hosts run ahead of
their GPUs as before, only not ahead of each other's calls.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from imbrex.runtime.waits import RankLostError

CHECK_S = 0.01
BITS = 32
"""A word's value takes the lower half of what is stored; the number of the call stands above it."""


class Board:
    """Two words and two notes for every rank: a rank that is one call ahead writes the others.

    path: of a file that every rank can map, made by rank 0 before the others open it.
    """

    def __init__(self, path: Path, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s, self.calls = rank, world_size, timeout_s, 0
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 4 * 8 * world_size)
        self._words_22W = np.frombuffer(self._memory, dtype=np.int64).reshape(2, 2, world_size)
        self.notes_W = [0] * world_size

    @staticmethod
    def make_file(name: int, world_size: int) -> Path:
        """Zeros for a board; removed by whoever made it once every rank has opened it."""
        path = Board.path_of(name)
        path.write_bytes(bytes(4 * 8 * world_size))
        return path

    @staticmethod
    def path_of(name: int) -> Path:
        shared = Path("/dev/shm")
        return (shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())) / f"imbrex-{name}"

    def tell(self, value: int, note: int = 0, check: Callable[[], None] | None = None) -> list[int]:
        """`value` (0 to 2^32 - 1) of this rank to the values of all ranks in the same call; their notes, as
        large, are then in `notes_W`. check: raises where an earlier call has failed, so that nobody waits for
        a rank that will not come; asked before the wait and during it.

        Raises RankLostError where a rank does not make the call within the time-out.
        """
        if check is not None:
            check()
        assert 0 <= min(value, note) <= max(value, note) < 1 << BITS
        self.calls += 1
        words_2W = self._words_22W[self.calls % 2]
        words_2W[:, self.rank] = self.calls << BITS | value, self.calls << BITS | note
        start = asked = time.monotonic()
        while (words_2W >> BITS < self.calls).any():
            time.sleep(0)
            now = time.monotonic()
            if check is not None and now - asked > CHECK_S:
                check()
                asked = now
            if now - start > self.timeout_s:
                # on the host: the words are in memory that the processes share
                late = [rank for rank, word in enumerate(words_2W[0].tolist()) if word >> BITS < self.calls]
                last = [int(self._words_22W[:, 0, rank].max()) >> BITS for rank in late]
                raise RankLostError(
                    f"dispatch: ranks {late} did not come to call {self.calls} of the exchange within "
                    f"{self.timeout_s} s; their last was {last}"
                )
        # on the host: as above
        values_W, self.notes_W = (words_2W & ((1 << BITS) - 1)).tolist()
        return values_W
