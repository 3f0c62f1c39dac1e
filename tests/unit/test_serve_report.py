"""Pareto curves of serving: the front, the page, and the reproductions' words."""

from __future__ import annotations

import argparse
import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import pareto
from torch import nn

from imbrex.bench.serve import command, measured
from imbrex.bench.serve.command import ways_from_words
from imbrex.bench.serve.report import curves, front, name_of, write_report
from imbrex.reproduce import Options, find, serving
from imbrex.serve.engine import HostTime


def row(impl: str, users: int, user: float | None, gpu: float | None, **case: Any) -> dict[str, Any]:
    return {
        "op": "serve",
        "impl": impl,
        "case": {"users": users, "drafts": 0, "interval": 1} | case,
        "tokens_per_s_user": user,
        "tokens_per_s_gpu": gpu,
        "gap_ms": {"p50": 1.0, "p99": 2.0},
        "tokens_per_row_step": 1.0,
        "step_ms": 1.5,
    }


ROWS = [
    row("alltoall", 4, 8.0, 9.0),
    row("alltoall", 2, 10.0, 5.0),
    row("alone", 4, 7.0, 8.0),
    row("alone", 8, None, None),
    row("alone", 4, 12.0, 4.0, drafts=1, forced=1.0),
]


def test_the_front_is_what_nothing_beats() -> None:
    points = [point for of in curves(ROWS).values() for point in of]
    assert len(points) == 4
    assert [(p["tokens_per_s_user"], p["tokens_per_s_gpu"]) for p in front(points)] == [
        (12.0, 4.0),
        (10.0, 5.0),
        (8.0, 9.0),
    ]
    assert [p["case"]["users"] for p in curves(ROWS)["alltoall"]] == [2, 4]
    assert name_of(ROWS[-1]) == "alone, 1 drafts, 1 forced"
    assert name_of(row("nvlink", 1, 1.0, 1.0, interval=4)) == "nvlink, interval 4"


def test_the_page_has_every_point_and_marks_the_front(tmp_path: Path) -> None:
    write_report(tmp_path / "page.html", facts={"model": "demo"}, rows=ROWS)
    page = (tmp_path / "page.html").read_text()
    assert page.count("<td>alltoall *</td>") == 2
    assert "<td>alone</td>" in page
    assert "<td>alone, 1 drafts, 1 forced *</td>" in page


def test_rivals_are_not_named_after_codecs_and_experts_that_they_do_not_use() -> None:
    args = argparse.Namespace(
        transport="alltoall,alone,gather-scatter", codec="int8,identity", experts="loop"
    )
    named = [way.name for way in ways_from_words(args)]
    assert named == ["alltoall int8 loop", "alltoall loop", "alone loop", "gather-scatter"]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_time_without_a_step_is_beside_the_hosts(
    on_gpu: bool, args: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """On GPUs alone, where it is timed."""
    host = {"host_us": dict.fromkeys(HostTime.NAMES, 1.0), "launches": 1.0}
    case = ROWS[0]["case"] | {"input": 8, "model": "demo", "weights": "random"}
    rows = [ROWS[0] | host | {"case": case} | ({"no_step_share": 0.0123} if on_gpu else {})]
    for name, value in {"ranks": 2, "input": "8", "output": 4, "dtype": "float32", "levers": None}.items():
        setattr(args, name, value)
    args.device = "cpu"
    command.show(args, rows)
    printed = capsys.readouterr().out
    assert ("1.23" in printed, command.ABOUT_IDLE in printed) == (on_gpu, on_gpu)


def test_answers_of_one_token_are_said_to_decode_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    host = {"host_us": dict.fromkeys(HostTime.NAMES, 1.0), "launches": 1.0, "gap_ms": {}}
    case = ROWS[0]["case"] | {"model": "demo", "weights": "random", "input": 8}
    args = argparse.Namespace(
        output=1, device="cpu", ranks=1, input="8", dtype="float32", train=0, levers=None
    )
    for decoded, cell, said in ((0.0, "-", 1), (1.0, "1.00", 0)):
        served = row("auto", 4, None, 43.3) | host | {"tokens_per_row_step": decoded, "case": case}
        args.output = 1 if said else 2
        command.show(args, [served])
        assert command._cells(served)[4] == cell
        assert capsys.readouterr().out.count("comes of its prompt's last chunk; no step decodes") == said


def test_what_is_named_twice_is_served_once() -> None:
    args = argparse.Namespace(transport="auto,alone,auto", codec="identity", experts="auto", users="2,7,2")
    assert [way.name for way in ways_from_words(args)] == ["auto", "alone"]
    assert command.numbers(args, "users") == [2, 7]


def test_a_page_has_a_section_for_every_load(tmp_path: Path) -> None:
    more = [row("alltoall", 2, 1.0, 2.0, model="demo", input=n, output=8) for n in (4, 9)]
    write_report(tmp_path / "page.html", facts={}, rows=more)
    page = (tmp_path / "page.html").read_text()
    for tokens in (4, 9):
        assert f"Pareto curves: demo, {tokens} tokens in, 8 out" in page


def steps(model: str, impl: str, us: float, gib: float, **case: Any) -> list[dict[str, Any]]:
    case = {"model": model, "W": 2, "dtype": "bf16", "room": 1280, "context": 1024} | case
    timed = {"median_us": us, "weights_gib": gib}
    return [
        *({"run": 0, "op": "decode step", "impl": impl, "case": case | {"B": b}} | timed for b in (2, 4)),
        {"run": 0, "op": "chunk", "impl": impl, "case": case | {"rows": 2, "tokens": 64}} | timed,
    ]


def test_loops_are_replayed_where_they_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """128 tokens a user and 1 MiB of them: 100 GiB of weights leave no room on a GPU of 100."""
    monkeypatch.setattr(measured, "USERS", (2, 4))
    rows = steps("demo", "nvlink", 1000.0, 30.0)
    rows += steps("demo", "nvlink", 1500.0, 30.0, drafts=1, forced=1.0)
    rows += steps("demo", "alone", 800.0, 100.0)
    points = measured.replayed(rows, 100.0, [(64, 16)])
    assert [name_of(p) for p in points] == 2 * ["nvlink, replayed, interval 4"] + 2 * [
        "nvlink, 1 drafts, 1 forced, replayed, interval 4"
    ]
    assert [p["case"]["users"] for p in points] == [4, 8, 4, 8]
    for point, rate in zip(points, (1000.0, 1000.0, 2000 / 1.5, 2000 / 1.5), strict=True):
        assert 0.5 * rate < point["tokens_per_s_user"] <= 1.01 * rate
    run = {"id": 0, "hardware": {"gpu": "G", "count": 2, "memory_gib": 100.0}, "commit": "c", "date": "d"}
    monkeypatch.setattr(serving, "RESULTS", tmp_path)
    monkeypatch.setattr(serving, "LOADS", [(64, 16)])
    with pytest.raises(ValueError, match=r"serve\.json is missing"):
        find("trtllm-pareto-replayed", Options())
    # A later run has steps of one way and no chunks, and one of the other way again.
    later = [
        {**row, "run": 1}
        for row in (*steps("demo", "alltoall", 1.0, 30.0)[:2], *steps("demo", "nvlink", 2e3, 30.0))
    ]
    content = {"runs": [run, run | {"id": 1, "commit": "e"}], "rows": rows + later}
    (tmp_path / "serve.json").write_text(json.dumps(content))
    (tmp_path / "serve_one.json").write_text(json.dumps({"runs": [], "rows": []}))
    finding = find("trtllm-pareto-replayed", Options())
    assert finding.verdict[0].startswith("demo, 2 GPUs, 64 tokens in, on the front: nvlink, ")
    assert len(finding.table) == 4
    assert 250 < float(finding.table[0][4]) <= 505, "2 ms a step"
    assert "2 x G, e, d; 2 x G, c, d" in finding.differs[0]
    assert [line[-2] for line in finding.table] == 4 * [""], "no loop ran"
    # One of the four loads ran as a loop, by a way that steps know under another name.
    case = {"model": "demo", "W": 2, "users": 8, "input": 64, "output": 16, "drafts": 0, "interval": 4}
    served = {"run": 0, "op": "serve", "impl": "auto", "case": case, "tokens_per_s_gpu": 2000.0}
    (tmp_path / "serve_loops.json").write_text(json.dumps({"runs": [run], "rows": [served]}))
    finding = find("trtllm-pareto-replayed", Options())
    assert [line[-2] for line in finding.table] == ["", "2000", "", ""]
    ratio = float(finding.table[1][5]) / 2000
    assert finding.verdict[-1] == f"Replayed over measured, where a loop ran (1): {ratio:.2f} to {ratio:.2f}."


def test_steps_of_one_length_of_caches_tell_nothing_of_longer_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured, "USERS", (2,))
    one = steps("demo", "nvlink", 1000.0, 30.0, context=48)
    two = one + steps("demo", "nvlink", 2000.0, 30.0, context=60)
    loads = [(48, 16), (64, 16)]
    replayed = ([p["case"]["input"] for p in measured.replayed(rows, 100.0, loads)] for rows in (one, two))
    assert list(replayed) == [[48], [48, 64]]


def test_loops_of_other_loads_are_beside_their_replays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the longer loads only what ran is replayed, without a front; with `full` all is."""
    monkeypatch.setattr(measured, "USERS", (2, 4))
    monkeypatch.setattr(serving, "RESULTS", tmp_path)
    monkeypatch.setattr(serving, "LOADS", [(64, 16), (128, 16), (256, 16)])
    run = {"id": 0, "command": "c", "commit": "c", "date": "d"}
    run["hardware"] = {"gpu": "G", "count": 2, "memory_gib": 100.0}
    rows = steps("demo", "nvlink", 1000.0, 30.0) + steps("demo", "alone-fp8", 800.0, 30.0)
    (tmp_path / "serve.json").write_text(json.dumps({"runs": [run], "rows": rows}))
    (tmp_path / "serve_one.json").write_text(json.dumps({"runs": [], "rows": []}))

    def ran(impl: str, tokens: int, rate: float) -> dict[str, Any]:
        case = {"model": "demo", "W": 2, "users": 8, "input": tokens, "output": 16, "drafts": 0}
        return {
            "run": 0,
            "op": "serve",
            "impl": impl,
            "case": case | {"interval": 4},
            "tokens_per_s_gpu": rate,
        }

    loops = [ran("auto", 128, 2000.0), ran("alone kernels-fp8", 256, 3000.0), ran("alone", 256, 1.0)]
    (tmp_path / "serve_loops.json").write_text(json.dumps({"runs": [run], "rows": loops}))
    finding = find("trtllm-pareto-replayed", Options())
    beside = [(line[1], line[2].split(",")[0], line[3], *line[-2:]) for line in finding.table]
    assert sorted(line[0] for line in beside) == ["128, 16", "256, 16", *["64, 16"] * 4]
    assert ("128, 16", "nvlink", "8", "2000", "") in beside
    assert ("256, 16", "alone-fp8", "8", "3000", "") in beside
    assert len(finding.verdict) == 2
    assert "where a loop ran (2)" in finding.verdict[-1]
    assert "front" in finding.verdict[0]
    assert len(find("trtllm-pareto-replayed", Options(full=True)).table) == 12


def test_the_newest_loops_are_on_the_page(tmp_path: Path) -> None:
    case = {"model": "demo", "W": 2, "users": 8, "drafts": 0, "interval": 4, "input": 128, "output": 16}
    older, newer = ({**row("auto", 8, 1.0, rate), "case": case, "run": n} for n, rate in ((0, 2.0), (1, 3.0)))
    (tmp_path / "loops.json").write_text(json.dumps({"rows": [newer, older]}))
    loops = pareto.newest_loops(tmp_path / "loops.json")
    assert [(loop["tokens_per_s_gpu"], loop["impl"]) for loop in loops] == [(3.0, "nvlink")]
    assert pareto.newest_loops(tmp_path / "none.json") == []
    write_report(tmp_path / "page.html", facts={}, rows=loops)
    page = (tmp_path / "page.html").read_text()
    assert "Pareto curves: demo, 2 ranks, 128 tokens in, 16 out" in page
    assert "<td>nvlink, interval 4 *</td>" in page


def test_the_curves_are_compared_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "on_ranks", lambda *_: (ROWS, "loopback"))
    finding = find("trtllm-pareto", Options())
    assert finding.verdict == ("On the common front: alltoall; alone, 1 drafts, 1 forced.",)
    assert [line[-1] for line in finding.table] == ["*", "*", "", "*"]


def test_the_heads_are_compared_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"op": "head", "impl": impl, "case": {"T": 8}, "median_us": us}
        for impl, us in (("whole", 300.0), ("split", 200.0))
    ]
    monkeypatch.setattr(serving, "on_ranks", lambda *_: (rows, "loopback"))
    finding = find("trtllm-lm-head", Options())
    assert finding.table == (("8", "300", "200", "1.50x"),)
    assert "1.50x at 8" in finding.verdict[0]


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> argparse.Namespace:
    """The words of a command that measures without ranks."""
    monkeypatch.setenv("IMBREX_TIMEOUT_S", "9.0")  # which the command sets
    monkeypatch.setattr(command, "join", lambda args: torch.device("cpu"))
    monkeypatch.setattr(command, "words_of", lambda args: ["--users", "2"])
    words = {"transport": "alltoall", "codec": "identity", "experts": "auto", "timeout": 9.0}
    return argparse.Namespace(**words, json=str(tmp_path / "rows.json"), board="board", report=None)


def test_rows_are_kept_where_a_run_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, args: argparse.Namespace, tmp_path: Path
) -> None:
    def compare(*_: Any) -> Iterator[dict[str, Any]]:
        yield row("alltoall", 2, 1.0, 2.0, model="demo")
        raise InterruptedError

    monkeypatch.setattr(command, "compare", compare)
    with pytest.raises(InterruptedError):
        command._measure(args, 0, None)  # type: ignore[arg-type]
    kept = json.loads((tmp_path / "rows.json").read_text())
    assert [entry["impl"] for entry in kept["rows"]] == ["alltoall"]
    assert kept["runs"][0]["command"] == "imbrex bench serve --users 2"


def test_a_model_goes_before_that_of_the_next_way_comes(
    monkeypatch: pytest.MonkeyPatch, args: argparse.Namespace
) -> None:
    """Two may not fit a GPU, and Python's collector may wait."""
    alive: list[weakref.ref[nn.Module]] = []

    def compare(*_: Any) -> Iterator[dict[str, Any]]:
        assert not any(model() for model in alive)
        model = nn.Identity()
        model.own = [model]  # type: ignore[assignment]
        alive.append(weakref.ref(model))
        yield row("alltoall", 2, 1.0, 2.0, model="demo")
        if len(alive) == 2:
            raise InterruptedError

    monkeypatch.setattr(command, "compare", compare)
    args.transport = "alltoall,alone"
    gc.disable()
    try:
        with pytest.raises(InterruptedError):
            command._measure(args, 0, None)  # type: ignore[arg-type]
    finally:
        gc.enable()
