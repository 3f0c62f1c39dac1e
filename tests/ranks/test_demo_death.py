"""A rank that dies or hangs ends the run soon, with one sentence that names it and where it was."""

import json
import os
import re
import signal
import time

import pytest
import torch.distributed.run

from imbrex.cli import main
from imbrex.observe import read_board
from tests.ranks.forked import Forked, run_ranks

TIMEOUT_S = 6
ENDING_S = 20
"""What the launcher and the ranks may take to end besides."""
WORDS = ["--steps", "100000", "--checkpoint-every", "4", "--batch", "4", "--length", "64", "--hidden", "64"]
WORDS += ["--expert-width", "64", "--layers", "2", "--timeout", str(TIMEOUT_S)]


@pytest.fixture
def children():
    """Processes to end, with all of their own, whatever the test does."""
    processes = []
    yield processes
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def started(children, out, *, ranks, outer=False):
    words = ["demo", "--out", str(out), *WORDS]
    if outer:
        launcher = ["--standalone", f"--nproc-per-node={ranks}", "-m", "imbrex"]
        process = Forked(torch.distributed.run.main, [*launcher, *words], folder=out)
    else:
        process = Forked(main, [*words, "--ranks", str(ranks)], folder=out)
    children.append(process)
    metrics, until = out / "metrics.jsonl", time.monotonic() + 200
    while not metrics.exists() or metrics.read_text().count("\n") < 6:
        assert process.poll() is None, process.stderr
        assert time.monotonic() < until
        time.sleep(0.1)
    return process


def complaints(stderr):
    return [line for line in stderr.splitlines() if line.startswith("imbrex: error:")]


def end_of(process, out, *, rank, with_signal):
    """Send the signal to a rank; the seconds until the run is over, and what it said on stderr."""
    victim = next(phase for phase in read_board(out / "ranks") if phase.rank == rank)
    os.kill(victim.pid, with_signal)
    began = time.monotonic()
    process.wait(60)
    took_s = time.monotonic() - began
    return victim, took_s, process.stderr


@pytest.mark.parametrize("outer", [False, True], ids=["own launcher", "torchrun"])
def test_a_killed_rank_is_named_with_its_phase_and_the_run_resumes(children, tmp_path, outer):
    process = started(children, tmp_path, ranks=2 if outer else 3, outer=outer)
    victim, took_s, stderr = end_of(process, tmp_path, rank=1, with_signal=signal.SIGKILL)
    assert process.poll() not in (0, None)
    assert took_s < TIMEOUT_S + ENDING_S
    (sentence,) = complaints(stderr)
    assert f"rank 1 (pid {victim.pid} on " in sentence
    assert re.search(r" in step \d+(, layer \d)?, phase \w+", sentence), sentence
    assert "--resume" in sentence
    dead = next(phase for phase in read_board(tmp_path / "ranks") if phase.rank == 1)
    assert str(dead) in sentence
    if outer:
        return
    last = sorted((tmp_path / "checkpoint").glob("step_*"))[-1]
    steps = int(last.name.removeprefix("step_")) + 2
    run_ranks(["demo", "--out", str(tmp_path), "--resume", "--steps", str(steps)], ranks=1, folder=tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(steps))


def test_ranks_end_with_a_launcher_that_is_killed(children, tmp_path):
    """Nobody is left to end them, or to say that the run is over."""
    process = Forked(main, ["demo", "--out", str(tmp_path), *WORDS, "--ranks", "2"], folder=tmp_path)
    children.append(process)
    until = time.monotonic() + 200
    while sum(phase.name != "start" for phase in read_board(tmp_path / "ranks")) < 2:
        assert process.poll() is None, process.stderr
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + 30
    while any(phase.alive for phase in read_board(tmp_path / "ranks")):
        assert time.monotonic() < until, "ranks without a launcher"
        time.sleep(0.05)


def test_a_rank_that_hangs_is_named_within_the_time_out(children, tmp_path):
    process = started(children, tmp_path, ranks=2)
    victim, took_s, stderr = end_of(process, tmp_path, rank=1, with_signal=signal.SIGSTOP)
    assert process.poll() == 1
    assert took_s < TIMEOUT_S + ENDING_S
    (sentence,) = complaints(stderr)
    assert f"rank 1 (pid {victim.pid} on " in sentence
    assert f"did not answer for {TIMEOUT_S} s in step " in sentence
