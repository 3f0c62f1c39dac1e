"""A rank that is killed in the loop of a command is named with its step."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest

from imbrex.cli import main
from imbrex.observe import read_board
from imbrex.observe.board import Phase
from tests.ranks.forked import Forked

LOOPS = {
    "serve": ["bench", "serve", "--transport", "alltoall", "--rounds", "10000", "--input", "4"],
    "layer": ["bench", "layer", "--transport", "alltoall", "--model", "16,16,4,2", "--warmup", "100000"],
    "tune": ["tune", "--transport", "alltoall", "--model", "64,64,4,2", "--tokens", ",".join(["4096"] * 9)],
}
"""Words of commands that loop for minutes."""
SAID = {"serve": "phase serving alltoall", "layer": "phase", "tune": "phase 4096 tokens"}


def run(folder: str, words: list[str]) -> int:
    tempfile.tempdir = folder
    return main(words)


def rank_in_loop(folder: Path, command: Forked) -> Phase:
    """Rank 1, once it is in its third step."""
    until = time.monotonic() + 100
    while True:
        for phase in (phase for board in folder.glob("imbrex-*") for phase in read_board(board)):
            if phase.rank == 1 and phase.step >= 2:
                return phase
        assert command.poll() is None, command.stderr
        assert time.monotonic() < until, command.stderr
        time.sleep(0.02)


@pytest.mark.untraced
@pytest.mark.parametrize("name", LOOPS)
def test_a_rank_killed_in_a_loop_is_named_with_its_step(name: str, tmp_path: Path) -> None:
    words = [*LOOPS[name], "--ranks", "2", "--device", "cpu", "--timeout", "20"]
    command = Forked(run, str(tmp_path), words, folder=tmp_path, IMBREX_CACHE_DIR=str(tmp_path))
    try:
        victim = rank_in_loop(tmp_path, command)
        os.kill(victim.pid, signal.SIGKILL)
        assert command.wait(60) == 1
    finally:
        if command.poll() is None:
            os.killpg(command.pid, signal.SIGKILL)
    (sentence,) = [line for line in command.stderr.splitlines() if line.startswith("imbrex: error:")]
    found = re.search(r"rank 1 \(pid (\d+) on \S+\) was killed by SIGKILL in step (\d+), .*", sentence)
    assert found, sentence
    assert int(found[1]) == victim.pid
    assert int(found[2]) >= victim.step
    assert SAID[name] in sentence
