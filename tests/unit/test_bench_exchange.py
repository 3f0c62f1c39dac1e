"""`imbrex bench exchange` without the GPUs that it needs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from imbrex.bench import results
from imbrex.bench.exchange.command import PARTS, QUICK, attempt
from imbrex.bench.exchange.job import Job, shape_of
from imbrex.bench.exchange.rows import FP8_SHARE, describe
from imbrex.cli import main
from imbrex.codec import make as make_codec
from imbrex.kernels.exchange import layout as lay

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where nothing is")
def test_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "exchange"]) == 2
    assert capsys.readouterr().err == (
        "imbrex bench exchange: imbrex kernels need an NVIDIA GPU and torch sees none\n"
    )


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "exchange", "--parts=main,spam"])
    assert "--parts: 'spam' is not known; use all or some of main, " in capsys.readouterr().err
    assert set(QUICK) <= set(PARTS)


def test_room_for_rows() -> None:
    """Uniform routing: 1.3 of the mean, 4096 * 8, and 128 a slot. All to one rank: all that could come."""
    even, one = (
        shape_of(Job(T=4096, D=7168, K=8, E=256, W=4, routing=name)) for name in ("uniform", "one-rank")
    )
    assert even.row_capacity == int(1.3 * 4096 * 8) + 128 * 64
    assert one.row_capacity == 4 * 4096 * 8 + 128 * 64
    assert even.token_capacity == one.token_capacity == 3 * 4096


def test_a_case_names_its_trace_without_its_folder() -> None:
    job = Job(T=1, D=1, K=1, E=1, W=1, routing="trace:/somewhere/ids.npz:law_ids:3")
    assert job.case["routing"] == "trace:ids.npz:law_ids:3"


def test_bytes_of_an_fp8_row() -> None:
    assert make_codec("fp8").nbytes(7168, torch.bfloat16) == 7168 * 2 * FP8_SHARE
    assert lay.fp8_bytes(7168) == 7168 + 7168 // 32


class Noting:
    """Stands in for `Rows`."""

    def __init__(self) -> None:
        self.entries: list[dict] = []

    def add(self, row: dict) -> None:
        self.entries.append(row)


@pytest.mark.parametrize(("left", "reason"), [(5.0, "no room for it"), (-1.0, "no time left")])
def test_a_part_that_fails_is_a_row_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, left: float, reason: str
) -> None:
    rows, calls = Noting(), []

    def part() -> None:
        calls.append(1)
        raise ValueError("no room for it\nand more")

    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda values, device: tensor(values))
    monkeypatch.setattr("torch.distributed.broadcast", lambda tensor, source: None)
    attempt("sweep", part, rows, left)  # pyright: ignore[reportArgumentType]
    assert rows.entries == [{"op": "sweep", "impl": "imbrex", "skipped": reason}]
    assert len(calls) == (left > 0)
    assert describe(rows.entries[0]) == f"sweep imbrex: skipped {reason}"


def test_a_result_that_a_run_wrote_is_no_change_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next benchmark of the same checkout runs the revision as it is."""
    code, result = tmp_path / "code.py", tmp_path / "benchmarks/results/layer.json"
    result.parent.mkdir(parents=True)
    for file in (code, result):
        file.write_text("1")
    who = "-c", "user.name=a", "-c", "user.email=a@b"
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(results, "__file__", str(code))
    clean = results._commit()
    result.write_text("2")
    assert results._commit() == clean != "unknown"
    code.write_text("2")
    assert results._commit() == f"{clean}-dirty"


def test_a_tree_without_its_history_knows_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a file that `git archive` fills in; in a copy of the files nobody knows."""
    own, copied = Path(results.__file__).with_name("revision.txt"), tmp_path / "revision.txt"
    assert f"{own.relative_to(ROOT)} export-subst" in (ROOT / ".gitattributes").read_text()
    monkeypatch.setattr(results, "__file__", str(tmp_path / "results.py"))
    copied.write_text(own.read_text())
    assert results._commit() == "unknown"
    copied.write_text("0123abc\n")
    assert results._commit() == "0123abc"
