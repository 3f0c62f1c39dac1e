"""`imbrex bench layer` from the command line: every transport beside the oracle, figures that add up."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from argparse import Namespace
from pathlib import Path

import pytest

from imbrex.bench.layer import race
from imbrex.bench.results import write_results
from imbrex.cli import main
from imbrex.launch import ranks as launch
from tests.ranks.forked import run_ranks


def bench(*words: str, folder: Path) -> str:
    """On two ranks that a launcher of the user's started; README's command starts its own."""
    return run_ranks(["bench", "layer", "--device", "cpu", "--scale", "1", *words], ranks=2, folder=folder)


def test_every_transport_beside_the_oracle(tmp_path: Path) -> None:
    file = tmp_path / "layer.json"
    words = ["--model", "24,40,6,2", "--tokens", "51,7", "--skew", "zipf:1", "--backward"]
    printed = bench(*words, "-n", "3", "--warmup", "1", "--json", str(file), folder=tmp_path)
    for word in ("oracle", "imbrex alltoall", "imbrex allgather", "imbrex allreduce", "dispatch", "2 ranks"):
        assert word in printed
    content = json.loads(file.read_text())
    rows = {row["impl"]: row for row in content["rows"] if row["case"]["M"] == 51}
    assert len(content["rows"]) == 2 * len(rows)
    assert rows.keys() >= {"oracle", "imbrex alltoall", "imbrex allgather", "imbrex allreduce"}
    for row in rows.values():
        assert row["n"] == 3
        assert 0 < row["min_us"] <= row["median_us"] <= row["max_us"]
        assert row["error"] <= 1e-5
        assert 0 < row["phases_us"]["experts"] < row["median_us"]
    assert rows["oracle"]["bytes_sent"] == 0
    # 26 tokens of the larger rank go to at most one other rank, 24 float32 and 3 x 2 labels of 4 bytes each.
    out, back = 26 * (24 * 4 + 6 * 4), 26 * 24 * 4
    assert 0 < rows["imbrex alltoall"]["bytes_sent"] <= 2 * (out + back)
    assert content["runs"][0]["command"].startswith("imbrex bench layer --model 24,40,6,2 --tokens 51,7")


def test_a_codec_shows_its_error_and_its_bytes_with_tensor_ranks(tmp_path: Path) -> None:
    file = tmp_path / "layer.json"
    words = ["--model", "64,40,4,2", "--tokens", "40", "--tp", "2", "--transport", "alltoall"]
    bench(*words, "-n", "1", "--warmup", "0", "--codec", "int8", "--json", str(file), folder=tmp_path)
    row = json.loads(file.read_text())["rows"][1]
    assert row["case"]["TP"] == 2
    assert row["case"]["EP"] == 1
    assert 1e-4 < row["error"] < 0.05
    # Every token goes to the other tensor rank: 64 int8, a scale and 3 x 2 labels; 64 int8 and a scale back.
    assert row["bytes_sent"] == 20 * (64 + 4 + 24) + 20 * (64 + 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "1,2"], "--model: '1,2'"),
        (["--ranks", "3", "--ep", "2"], "--ep 2 x --tp 1 does not divide --ranks 3"),
        (["--ranks", "0"], "--ranks is 0"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--transport", "pigeon"], "'pigeon' is not known"),
        (["--codec", "morse"], "'morse' is not known"),
        (["--skew", "zipf:x"], "not a number"),
        (["--scale", "0"], "--scale"),
        (["--tp", "3", "--ranks", "3", "--model", "8,8,4,2", "--scale", "1"], "--tp 3 does not divide"),
        (["--json", "/nowhere/at/all.json"], "its folder is missing"),
        (["--json", "/tmp"], "/tmp: that is no file that can be written"),
        (["--json", ""], "that is no file that can be written"),
        (["--seed", "9223372036854775808"], "--seed is 9223372036854775808: give 0 to"),
    ],
)
def test_wrong_words_are_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "layer", "--device", "cpu", *words])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1


def test_ranks_end_with_their_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    monkeypatch.setattr(launch, "end_with_launcher", lambda: asked.append("the kernel"))
    monkeypatch.setattr(launch, "end_as", lambda *_: None)
    monkeypatch.setenv("RANK", "0")
    launch.be_a_rank(Namespace(board=str(tmp_path), ranks=1, timeout=1.0), lambda *_: None)
    assert asked == ["the kernel"]


def run_of(command: str, gpu: str) -> dict:
    return {"command": command, "hardware": {"gpu": gpu}, "versions": {}, "ceilings": {}}


def test_a_run_replaces_its_own_rows_and_keeps_the_others(tmp_path: Path) -> None:
    file = tmp_path / "results" / "layer.json"
    write_results(file, "layer", run_of("a", "H200"), [{"impl": "x", "median_us": 1.0}])
    write_results(file, "layer", run_of("a", "none"), [{"impl": "x", "median_us": 2.0}])
    write_results(file, "layer", run_of("a", "H200"), [{"impl": "x", "median_us": 3.0}])
    content = json.loads(file.read_text())
    assert [(row["run"], row["median_us"]) for row in content["rows"]] == [(1, 2.0), (2, 3.0)]
    assert [run["id"] for run in content["runs"]] == [1, 2]
    with pytest.raises(ValueError, match="answers 'layer', not 'experts'"):
        write_results(file, "experts", run_of("a", "H200"), [])
    file.write_text("{")
    with pytest.raises(ValueError, match="no result file"):
        write_results(file, "layer", run_of("a", "H200"), [])


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(self: Path, *_: object, **__: object) -> None:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def no_ranks(*_: object, board: Path, **__: object) -> None:
        half(board / "a")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        write_results(tmp_path / "layer.json", "layer", run_of("a", "H200"), [])
    monkeypatch.setattr(launch, "launch", no_ranks)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="No space left"):
        launch.run_on_ranks(
            Namespace(ranks=1, timeout=1.0), ["bench", "layer"], lambda *_: None, worker=False
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("host_us", "wanted"), [(100.0, 3_000_000), (1000.0, 4_000_000), (1e5, 12_000_000)])
def test_a_slow_host_gets_a_longer_pause(
    monkeypatch: pytest.MonkeyPatch, host_us: float, wanted: int
) -> None:
    """Not a call that waits for the device, whose host takes ever longer."""
    monkeypatch.setattr(race, "host_microseconds", lambda *_: host_us)
    assert race.pause_of(lambda: None, 3_000_000) == wanted
