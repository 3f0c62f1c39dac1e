"""The sentence a lost run ends with, from boards and notes alone."""

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time

import pytest

from imbrex.observe import PhaseBoard, death, read_board


def board_of(directory, rank, pid, name="dispatch", host=None):
    """A record as a rank with another pid, and maybe of another host, would have left it."""
    board = PhaseBoard(directory, rank)
    board.step = 9
    board.write(name, 1)
    path = directory / f"rank-{rank:05d}.phase"
    record = bytearray(path.read_bytes())
    struct.pack_into("<q", record, 16, pid)
    if host is not None:
        record[-64:] = host.encode().ljust(64, b"\0")
    path.write_bytes(record)


def gone_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_process_gone_without_a_note_is_the_dead_one(tmp_path):
    PhaseBoard(tmp_path, 0)
    board_of(tmp_path, 1, gone := gone_pid())
    board_of(tmp_path, 2, gone_pid())
    death.leave_note(tmp_path, 2, death.LOST, "lost its peers")
    sentence = death.find_lost(tmp_path, num_ranks=3, timeout_s=5, patience_s=0) or ""
    assert f"rank 1 (pid {gone} on " in sentence
    assert "died in step 9, layer 1, phase dispatch" in sentence
    assert "rank 2" not in sentence
    assert "rank 0" not in sentence


def test_a_rank_that_finished_is_not_dead(tmp_path):
    PhaseBoard(tmp_path, 0)
    board_of(tmp_path, 1, gone_pid(), name="done")
    assert death.find_lost(tmp_path, num_ranks=2, timeout_s=5, patience_s=0) is None


def test_ranks_of_an_earlier_larger_run_do_not_count(tmp_path):
    PhaseBoard(tmp_path, 0)
    board_of(tmp_path, 5, gone_pid())
    assert death.find_lost(tmp_path, num_ranks=2, timeout_s=5, patience_s=0) is None


def test_a_rank_that_hangs_is_the_one_without_a_note(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        board_of(tmp_path, 1, process.pid, name="experts")
        PhaseBoard(tmp_path, 0)
        death.leave_note(tmp_path, 0, death.LOST, "lost its peers")
        sentence = death.find_lost(tmp_path, num_ranks=2, timeout_s=5, patience_s=0) or ""
        assert f"rank 1 (pid {process.pid} on " in sentence
        assert "did not answer for 5 s in step 9, layer 1, phase experts" in sentence
        process.communicate(b"\n")


def test_a_rank_of_another_host_is_named_only_when_it_alone_left_no_note(tmp_path):
    board_of(tmp_path, 1, 1, host="elsewhere")
    (record,) = read_board(tmp_path)
    assert record.alive is None, "its process cannot be asked"
    PhaseBoard(tmp_path, 0)
    assert death.find_lost(tmp_path, num_ranks=2, timeout_s=5, patience_s=0) is None
    death.leave_note(tmp_path, 0, death.LOST, "lost its peers")
    sentence = death.find_lost(tmp_path, num_ranks=2, timeout_s=5, patience_s=0) or ""
    assert "rank 1 (pid 1 on elsewhere) did not answer for 5 s in step 9" in sentence


def be_told_to_stop(directory):
    """Rank 1, in a process of its own."""
    PhaseBoard(directory, 1).write("experts", 3)
    death.Watch(
        directory,
        rank=1,
        num_ranks=3,
        timeout_s=5,
        ended=lambda sentence, kind: death.leave_note(directory, 1, kind, sentence),
    )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@pytest.mark.untraced
def test_a_rank_that_alone_was_told_to_stop_is_the_one_that_others_lost(tmp_path):
    """Not one that still runs, and has said nothing so far."""
    PhaseBoard(tmp_path, 0)
    board_of(tmp_path, 2, 1, host="elsewhere")
    if (child := os.fork()) == 0:
        try:
            be_told_to_stop(tmp_path)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
    death.leave_note(tmp_path, 0, death.LOST, "lost its peers")
    sentence = death.find_lost(tmp_path, num_ranks=3, timeout_s=5, patience_s=0) or ""
    assert re.match(r"rank 1 \(pid \d+ on \S+\) was told to stop by SIGTERM in set-up, layer 3, ", sentence)
    # One that hung is told to stop after others have lost it.
    death.leave_note(tmp_path, 1, death.STOPPED, "was told to stop")
    sentence = death.find_lost(tmp_path, num_ranks=3, timeout_s=5, patience_s=0) or ""
    assert sentence.startswith("rank 2 ")
    assert "did not answer for 5 s" in sentence


def test_the_first_failure_explains_more_than_a_lost_peer(tmp_path):
    death.leave_note(tmp_path, 0, death.LOST, "lost")
    death.leave_note(tmp_path, 1, death.FAILED, "broke")
    cause = death.first_cause(death.read_notes(tmp_path))
    assert cause is not None
    assert cause.sentence == "broke"
    death.forget(tmp_path, 1)
    assert [note.rank for note in death.read_notes(tmp_path)] == [0]
    death.forget(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_of_all_tells_the_user_once_a_run(tmp_path):
    assert [death.may_speak(tmp_path) for _ in range(3)] == [True, False, False]
    death.forget(tmp_path, 1)
    assert not death.may_speak(tmp_path)
    death.forget(tmp_path, 0)
    assert death.may_speak(tmp_path)


FULL = """
import os
from pathlib import Path
from imbrex.observe import death

for rank in (0, 1):
    death.reserve_note(".", rank)
with open("fill", "wb", buffering=0) as fill:
    try:
        while fill.write(bytes(4096)):
            pass
    except OSError as error:
        assert error.strerror == "No space left on device", error
death.leave_note(".", 0, death.REFUSED, "the disk is full")
try:
    death.leave_note(".", 2, death.REFUSED, "no room was taken for me")
except OSError:
    print([note.sentence for note in death.read_notes(".")])
"""


@pytest.mark.untraced
def test_a_full_disk_can_be_told(tmp_path):
    mounted = f"mount -t tmpfs -o size=64k tmpfs {tmp_path} && cd {tmp_path}"
    may = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*may, mounted], capture_output=True).returncode:
        pytest.skip("this machine makes no mount namespaces")
    done = subprocess.run(
        [*may, f'{mounted} && exec "$0" -c "$1"', sys.executable, FULL], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['the disk is full']"
