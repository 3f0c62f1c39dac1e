"""Commands whose output nobody reads to its end, as in `imbrex plan | head`: no traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import NoReturn

import pytest

from imbrex.cli import main
from imbrex.cli import plan as command
from imbrex.demo import folder
from imbrex.demo import rank as demo_rank
from imbrex.launch import local, ranks
from imbrex.launch.reader import EXIT_UNREAD, unread
from imbrex.observe import death
from tests.as_a_user import environment


def test_a_reader_that_has_gone_ends_a_command_in_silence() -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "imbrex", "--help"]
    told = environment(PYTHONUNBUFFERED="")  # else argparse has seen the error, and says nothing
    ran = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, env=told, timeout=60)
    os.close(write)
    assert (ran.returncode, ran.stderr) == (EXIT_UNREAD, b"")


@pytest.mark.parametrize("gone", [True, False])
def test_only_what_is_printed_may_lack_a_reader(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken pipe to another process is a fault like any other."""
    monkeypatch.setattr("imbrex.cli.unread", lambda: gone)
    monkeypatch.setattr(command, "run", _broken)
    words = ["plan", "--gpus", "2"]
    if gone:
        assert main(words) == EXIT_UNREAD
        return
    with pytest.raises(BrokenPipeError):
        main(words)


def test_a_rank_that_nobody_reads_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that a disk is full."""
    monkeypatch.setattr(local, "unread", lambda: True)
    death.reserve_note(tmp_path, 0)
    rank = local.Rank(
        tmp_path, rank=0, num_ranks=1, timeout_s=5.0, hint=lambda: "run it again", files="--out"
    )
    assert rank.run(_broken) == local.EXIT_FAILED
    assert "imbrex: error: nobody reads what rank 0 prints; run it again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"json": "out.json"}, "--json"),
        ({"json": None}, "TMPDIR"),
        ({"json": None, "report": "out.html"}, "--report"),
        ({"json": "out.json", "report": "out.html"}, "--json or --report"),
        ({"out": "runs"}, "--out"),
    ],
)
def test_a_full_disk_of_ranks_names_what_the_command_has(
    given: dict[str, str | None],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr("imbrex.demo.rank._train", _full)
    monkeypatch.setenv("RANK", "0")
    if "out" in given:
        (tmp_path / folder.RANKS).mkdir()
        demo_rank.work(Namespace(out=str(tmp_path), ranks=1, timeout=5.0))
    else:
        ranks.be_a_rank(Namespace(board=str(tmp_path), ranks=1, timeout=5.0, **given), _full)
    sentence = f"imbrex: error: No space left on device: free the disk or choose another {place}\n"
    assert capsys.readouterr().err == sentence


@pytest.mark.parametrize(
    ("number", "mend"),
    [
        (errno.EDQUOT, "free the disk or choose another --out"),
        (errno.EMFILE, "raise the limit of open files (ulimit -n)"),
        (errno.EACCES, "give rights to it, or choose another --out"),
        (errno.ENOENT, "see what is there, or choose another --out"),
    ],
)
def test_another_fault_of_the_system_is_no_full_disk(
    number: int, mend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = local.Rank(tmp_path, rank=0, num_ranks=1, timeout_s=5.0, hint=str, files="--out")

    def fail() -> NoReturn:
        raise OSError(number, "wrong", "a.json")

    assert rank.run(fail) == local.EXIT_REFUSED
    assert capsys.readouterr().err == f"imbrex: error: wrong: a.json: {mend}\n"


WHERE = {
    "plan": ["plan", "--gpus", "2"],
    "balance": ["balance", "plan", "--stats", "none.npy", "--ranks", "2", "--slots", "8"],
    "replay": ["balance", "replay", "--trace", "none.npy", "--ranks", "2"],
    "report": ["balance", "report", "--journal", "none.jsonl"],
    "profile": ["profile"],
    "reproduce": ["reproduce", "comet-table-3"],
    "experts": ["bench", "experts"],
    "exchange": ["bench", "exchange"],
}


@pytest.mark.parametrize(
    ("command_name", "option"),
    [
        *(("plan", "json"), ("plan", "report"), ("balance", "out"), ("replay", "json"), ("replay", "html")),
        *(("report", "out"), ("profile", "out"), ("reproduce", "results")),
        *(("experts", "json"), ("exchange", "json")),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    command_name: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder, no name, and a folder that is missing: nothing is printed, and no input is missed."""
    missing = f"{tmp_path}/no/a"
    cases = {
        str(tmp_path): f"--{option} {tmp_path}: that is no file that can be written; give another",
        "": f"--{option} : that is no file that can be written; give another",
        missing: f"--{option} {missing}: its folder is missing or cannot be written; make it first",
    }
    for path, said in cases.items():
        with pytest.raises(SystemExit) as ended:
            main([*WHERE[command_name], f"--{option}", path])
        told = capsys.readouterr()
        assert (ended.value.code, told.out, told.err) == (2, "", f"imbrex: error: {said}\n")


def test_a_full_disk_is_one_sentence() -> None:
    """Nothing is left to trip over when Python ends."""
    words = [sys.executable, "-m", "imbrex", "--help"]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=60)
    said = b"imbrex: error: No space left on device: free the disk, or give another path, or another TMPDIR\n"
    assert (ran.returncode, ran.stderr) == (2, said)


def test_a_name_that_the_terminal_cannot_write_ends_nothing() -> None:
    words, told = [sys.executable, "-m", "imbrex", "\u00fc"], environment(PYTHONIOENCODING="ascii")
    ran = subprocess.run(words, capture_output=True, env=told, timeout=60)
    assert (ran.returncode, ran.stdout) == (2, b"")
    assert ran.stderr.startswith(b"imbrex: error: argument COMMAND: invalid choice: '\\xfc'")


def test_ctrl_c_in_the_seconds_of_imports_ends_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert main(["plan", "--gpus", "2"]) == local.EXIT_INTERRUPTED
    assert capsys.readouterr().err == ""


def test_what_somebody_reads_is_left_alone() -> None:
    assert not unread()


def _full(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _broken(*_: object) -> NoReturn:
    raise BrokenPipeError
