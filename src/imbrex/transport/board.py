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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from imbrex.runtime.compiling import tell_running
from imbrex.runtime.roll import ASK_S
from imbrex.runtime.waits import Deadline, RankLostError

CHECK_S = 0.01
SPIN_S = 50e-6
"""Seconds of polling a word without a pause. Beside two H200 a pause of 0 s took 65 us."""
BITS = 32
"""Bits of a word's value; the number of the call is stored above them."""


class Board:
    """Two words and two notes for every rank, used in turn, so that a rank may be one call ahead.

    path: of a file that every rank can map, made by rank 0 before the others open it. failed: words on a rank
        whose program has failed, if there is one.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        world_size: int,
        timeout_s: float,
        failed: Callable[[], str] = str,
    ) -> None:
        self.rank, self.world_size, self.timeout_s, self.calls = rank, world_size, timeout_s, 0
        self.failed = failed
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 4 * 8 * world_size)
        self._words = memoryview(self._memory).cast("q")
        """Words and notes of all ranks, of even and of odd calls."""
        self.notes_W = [0] * world_size

    @staticmethod
    def make_file(name: int, world_size: int) -> Path:
        """Make the file of a board, all zeros. Its maker removes it once every rank has opened it."""
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
        assert 0 <= value < 1 << BITS
        assert 0 <= note < 1 << BITS
        tell_running()
        self.calls += 1
        ranks, first = self.world_size, self.calls << BITS
        at = self.calls % 2 * 2 * ranks
        self._words[at + self.rank] = first | value
        self._words[at + ranks + self.rank] = first | note
        words = self._words[at : at + 2 * ranks].tolist()
        if min(words) < first:
            words = self._wait(at, first, check)
        values = [word - first for word in words]
        self.notes_W = values[ranks:]
        return values[:ranks]

    def _wait(self, at: int, first: int, check: Callable[[], None] | None) -> list[int]:
        """Wait until no word at `at` is below `first`, and return words and notes."""
        start = last_check = last_question = time.monotonic()
        deadline = Deadline(self.timeout_s)
        here = self._words[at : at + 2 * self.world_size]
        while True:
            words = here.tolist()
            if min(words) >= first:
                return words
            now = time.monotonic()
            if now - start > SPIN_S:
                time.sleep(0)
            if check is not None and now - last_check > CHECK_S:
                check()
                last_check = now
            if now > last_question + ASK_S:
                last_question = now
                if why := self.failed():
                    self._give_up(words, first, f": {why}")
            if now > deadline.until and not deadline.moves():
                self._give_up(words, first, f" within {self.timeout_s} s")

    def _give_up(self, words: Sequence[int], first: int, why: str) -> NoReturn:
        ranks = self.world_size
        late = [rank for rank in range(ranks) if words[rank] < first]
        last = [max(self._words[rank], self._words[2 * ranks + rank]) >> BITS for rank in late]
        raise RankLostError(
            f"dispatch: ranks {late} did not come to call {self.calls} of the exchange{why}; their last was "
            f"{last}"
        )
