"""Words that the hosts of one machine's ranks tell each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from imbrex.runtime.waits import RankLostError
from imbrex.transport import board as board_module
from imbrex.transport.board import Board


@pytest.fixture
def file() -> Iterator[Path]:
    path = Board.make_file(time.time_ns(), 3)
    yield path
    path.unlink()


def test_every_call_has_its_own_words(file: Path) -> None:
    """300 calls of three ranks, the first of which is always late: nobody reads a word of another call."""

    def run(rank: int) -> list[list[int]]:
        board, heard = Board(file, rank, 3, timeout_s=20.0), []
        for call in range(300):
            if rank == 0 and call % 50 == 0:
                time.sleep(0.002)
            heard.append(board.tell(1000 * rank + call))
        return heard

    with ThreadPoolExecutor(3) as threads:
        for heard in threads.map(run, range(3)):
            assert heard == [[call, 1000 + call, 2000 + call] for call in range(300)]


def test_a_rank_that_does_not_come_is_named(file: Path) -> None:
    """Soon after the time that was given: a slow machine may take some seconds more."""
    boards = [Board(file, rank, 3, timeout_s=0.3) for rank in (0, 2)]
    with ThreadPoolExecutor(2) as threads:
        begin = time.monotonic()
        answers = [threads.submit(board.tell, 7) for board in boards]
        for answer in answers:
            with pytest.raises(RankLostError, match=r"ranks \[1\] did not come to call 1 .* within 0.3 s"):
                answer.result()
    assert 0.3 <= time.monotonic() - begin < 15.0


def test_nobody_waits_for_a_rank_whose_program_has_failed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "ASK_S", 0.05)
    why = "the program of rank 1 has ended with ValueError: no such batch"
    said = iter(["", why])
    board = Board(file, 0, 2, 60.0, lambda: next(said))
    with pytest.raises(RankLostError, match=rf"ranks \[1\] did not come to call 1 of the exchange: {why}; "):
        board.tell(7)


def test_the_largest_word(file: Path) -> None:
    board = Board(file, 0, 1, timeout_s=1.0)
    for _ in range(3):
        assert board.tell(2**32 - 1) == [2**32 - 1]


def test_notes_are_told_with_the_words(file: Path) -> None:
    boards = [Board(file, rank, 3, timeout_s=20.0) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        for call in range(20):
            answers = [threads.submit(board.tell, call, 7 * call + rank) for rank, board in enumerate(boards)]
            assert [answer.result() for answer in answers] == [[call] * 3] * 3
            assert [board.notes_W for board in boards] == [[7 * call, 7 * call + 1, 7 * call + 2]] * 3
