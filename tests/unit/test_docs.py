"""The documentation shows what the result files say; the expert kernels' measures of a small made-up file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from docs.tables import api, fused, pages
from docs.tables import experts as shown
from docs.tables import serve as serving
from docs.tables.results import Table, sources

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

LONGEST_PARAGRAPH = 600


def row(op: str, impl: str, us: float, model: str = "mixtral", **more: Any) -> dict[str, Any]:
    case = {"model": model, "rows": more.pop("rows", 16384), "skew": more.pop("skew", "balanced")}
    return {"run": 0, "op": op, "impl": impl, "case": case, "median_us": us, "n": 20, "share": 0.9, **more}


ROWS = [
    row("grouped_gemm", "imbrex", 100.0, share=0.88),
    row("grouped_gemm", "torch", 110.0),
    row("grouped_gemm", "imbrex", 100.0, "qwen3-30b-a3b", share=0.5),  # F = 768 has no target
    row("grouped_gemm", "imbrex", 20.0, rows=1024, share=0.4),
    row("grouped_gemm", "torch", 19.0, rows=1024),
    row("ffn", "imbrex", 100.0),
    row("ffn", "torch", 121.0),
    row("ffn", "imbrex", 100.0, skew="uniform"),
    row("ffn", "torch", 100.0, skew="uniform"),
    row("ffn", "imbrex-fp8", 80.0),
    row("ffn", "imbrex", 50.0, rows=1024),
    row("ffn", "imbrex-fp8", 10.0, rows=1024),  # few rows: counted apart
    row("ffn", "torch-compiled", 90.0, n=10),
    row("ffn", "torch", 130.0, n=10),  # timed again beside it: the faster counts
    row("decode", "imbrex", 10.0, rows=64, share=0.97),
]


def test_means_and_leasts() -> None:
    lines = {figure.name: figure.line().split(" | ") for figure in shown.figures(ROWS)}
    assert lines["forward, torch's time over ours"][2:] == ["1.100", "1.000", "2 |"]
    assert lines["fp8, bf16's time over it, rows quantised"][2:] == ["1.250", "1.250", "1 |"]
    assert lines["fp8, bf16's time over it, rows quantised, any number of rows"][2:] == [
        "2.500",
        "1.250",
        "2 |",
    ]
    share = "rows, balanced, F >= 1408: share of the dense rate"
    assert lines[f"grouped GEMM, 16384 {share}"][2:] == ["0.880", "0.880", "1 |"]
    assert lines[f"grouped GEMM, 1024 {share}"][2] == "0.400"
    assert lines["decode: share of the copy rate"][2] == "0.970"
    assert "not measured" in lines["forward and backward, torch's time over ours"]
    assert lines["forward, compiled torch's"][2:] == ["0.900", "0.900", "1 |"]


def test_cases_behind_torch_are_named() -> None:
    compiled = "0.900 ffn mixtral 16384 balanced torch-compiled"
    assert shown.behind(ROWS) == [compiled, "0.950 grouped_gemm mixtral 1024 balanced torch"]


def test_the_committed_file_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    file = ROOT / "benchmarks/results/experts.json"
    shown.main([str(file)])
    out = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert f"behind torch, eager or compiled, any number of rows: {len(shown.behind(rows))} of " in out


def test_tables_and_pictures_are_those_of_the_results() -> None:
    assert [str(path) for path in pages.stale()] == [], "run `make docs-tables`"


def test_a_changed_figure_is_noticed(tmp_path: Path) -> None:
    text = (ROOT / "docs/nvlink.md").read_text()
    figure = re.search(r"\| qwen2-moe \| 16384 \| forward \| (\d+) ", text)
    assert figure
    assert pages.filled("docs/nvlink.md", text.replace(figure[1], "1")) == text


def serving_step(run: int, impl: str, us: float, context: int = 1024, **more: Any) -> dict[str, Any]:
    """A step of decoding that reads as many GB as it takes ms, with a floor of 1 ms."""
    case = {"model": "qwen3-30b-a3b", "B": 8, "context": context} | more
    figures = {"median_us": us, "floor_us": 1e3, "times_floor": us / 1e3, "read_gb": us / 1e3}
    measured = {"file": "serve.json", "commit": "c", "date": "d", "hardware": {"gpu": "G", "count": 2}}
    row = {"run": run, "op": "decode step", "impl": impl, "case": case, "measured": measured}
    return row | figures | {"tokens_per_s_gpu": 1e6 / us}


def lines_of(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table.head, line, strict=True)) for line in table.body]


def test_a_rival_of_serving_is_beside_ours_of_its_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        *(serving_step(0, "nvlink", 4e3, n) for n in (1024, 4608)),
        *(serving_step(0, "gather-scatter", 8e3, n) for n in (1024, 4608)),
        serving_step(1, "nvlink", 2e3),
        serving_step(2, "alone", 1e3),
    )
    monkeypatch.setattr(serving, "read", lambda name: rows)
    table = serving.steps()
    assert table.head[:3] == ["model", "rows a rank", "tokens before"]
    lines = lines_of(table)
    assert [line["tokens before"] for line in lines] == [1024, 4608]
    assert [line["imbrex"] for line in lines] == ["2.00", "4.00"]
    assert [line["over the best rival"] for line in lines] == ["2.00", "2.00"], "8 over 4, not over 2"


def serving_loop(
    impl: str = "auto", *, run: int = 0, share: float | None = None, **case: Any
) -> dict[str, Any]:
    load = {"model": "qwen3-30b-a3b", "input": 8, "output": 4, "users": 2, "drafts": 0}
    figures = {"tokens_per_s_gpu": 1.0, "tokens_per_s_user": 1.0, "gap_ms": {"p50": 1.0, "p99": 1.0}}
    figures |= {} if share is None else {"no_step_share": share}
    return {"run": run, "impl": impl, "case": load | case} | figures


def test_loops_of_serving_say_when_no_step_ran_where_it_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    older = [serving_loop(), serving_loop("alone")]
    monkeypatch.setattr(serving, "read", lambda name: older)
    assert serving.loops().head[-1] == "ms a token, median, p99"
    monkeypatch.setattr(serving, "read", lambda name: [*older, serving_loop(run=1, share=0.0123)])
    assert [line["no step ran, %"] for line in lines_of(serving.loops())] == ["1.2", ""]


def test_loops_of_serving_stand_by_model_and_load(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [serving_loop(output=n, users=u) for u in (2, 6) for n in (4, 9)]
    rows.append(serving_loop(model="deepseek-v3-8", drafts=1, forced=0.8))
    rows.append(serving_loop(model="deepseek-v3-8"))
    monkeypatch.setattr(serving, "read", lambda name: rows)
    lines = [line[:3] + line[4:5] for line in map(list, serving.loops().body)]
    qwen3 = [["Qwen3-30B-A3B", f"8, {n}", u, "0"] for n in (4, 9) for u in (2, 6)]
    assert lines == [*qwen3, *(["DeepSeek-V3's widths, 8 layers", "8, 4", 2, n] for n in ("0", "1 (0.8)"))]


def test_what_serving_can_reach_is_of_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        serving_step(0, "nvlink", 4e3),
        serving_step(0, "alone", 5e3),
        serving_step(1, "nvlink", 2e3),
        serving_step(2, "alone", 1e3),
        serving_step(2, "nvlink-fp8-experts", 1e3),
        serving_step(2, "alone-fp8", 2e3),
    )
    half = serving_step(0, "auto", 2e3, model="qwen3-30b-a3b-half")
    monkeypatch.setattr(serving, "read", lambda name: rows if name == "serve" else (half,))
    line, fp8 = lines_of(serving.reach())
    names = ("ratio of the floors", "ratio of the steps", "1.3 wants a step within", "where nothing crosses")
    assert [line[name] for name in names] == ["1.25", "1.25", "3.85", "2.50"]
    assert [fp8[name] for name in ("experts", *names)] == ["fp8", "2.00", "2.00", "1.54", ""]


def test_drafts_of_serving_are_beside_none_of_their_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        serving_step(0, "nvlink", 4e3),
        serving_step(0, "nvlink", 5e3, drafts=1, forced=0.8),
        serving_step(1, "nvlink", 1e3),
        serving_step(2, "nvlink", 5e3, drafts=3, forced=1.6),
    )
    monkeypatch.setattr(serving, "read", lambda name: rows)
    assert [(line["drafts"], line["over none"]) for line in lines_of(serving.two_gpu_drafts())] == [
        (1, "0.80"),
        (3, "0.20"),
    ]


def test_a_page_and_its_tables_belong_together() -> None:
    with pytest.raises(ValueError, match="no such table"):
        pages.filled("docs/nvlink.md", f"<!-- table: no such table -->\n{pages.END}")
    with pytest.raises(ValueError, match=r"room for tables \[\]"):
        pages.filled("docs/nvlink.md", "nothing here")
    assert pages.filled("docs/layer.md", "nothing here") == "nothing here"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "LOG.md"], ids=lambda path: path.name
)
def test_code_of_the_pages_imports_public_names(page: Path) -> None:
    """Names are public that stand in docs/api.md."""
    code = "\n".join(re.findall(r"^```\w*\n.*?^```$", page.read_text(), re.MULTILINE | re.DOTALL))
    lines = re.findall(r"^ *from (imbrex[.\w]*) import ([\w, ]+)", code, re.MULTILINE)
    taken = {(module, name) for module, names in lines for name in names.split(", ")}
    public = {(module, name) for module in api.MODULES for name in api.names_of(module)}
    assert taken - public == set()


NO_TIMES = {
    "convergence.json": "losses of trainings",
    "fused_first.json": "an experiment that decided what to build; its page says that it claims no speed",
    "simulate.json": "predictions, and how far they are from what was measured",
}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "LOG.md"], ids=lambda path: path.name
)
def test_what_is_quoted_is_of_twenty_calls_and_of_a_clean_revision(page: Path) -> None:
    """What is of fewer is no claim and goes to the log."""
    wrong = []
    for line in re.findall(r"^\*(`\w+\.json`: .+)\*$", page.read_text(), re.MULTILINE):
        excused = any(f"`{name}`" in line for name in NO_TIMES)
        few = [
            n for medians in re.findall(r"medians of ([\d and]+)", line) for n in re.findall(r"\d+", medians)
        ]
        if not excused and ("with changes" in line or min(map(int, few), default=20) < 20):
            wrong.append(line)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_nothing_waits_to_be_filled(page: Path) -> None:
    """Every comment is a table's, or names what a test checks."""
    comments = re.findall(r"<!-- (.+?) -->", page.read_text())
    known = r"table: |end of the (table|rooms)$|.*checked against .* by tests/"
    assert [comment for comment in comments if not re.match(known, comment)] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "LOG.md"], ids=lambda path: path.name
)
def test_paragraphs_are_short(page: Path) -> None:
    assert [text for text in paragraphs(page.read_text()) if len(text) > LONGEST_PARAGRAPH] == []


def paragraphs(text: str) -> list[str]:
    """Paragraphs, list items and rows of tables, each on one line; code and comments are left out."""
    prose = re.sub(r"^```.*?^```$|<!--.*?-->", "\n", text, flags=re.MULTILINE | re.DOTALL)
    apart = re.sub(r"\n(?=\s*(?:- |\d+\. |\||#))", "\n\n", prose)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", apart) if part.strip()]


def test_paragraphs_are_told_apart() -> None:
    text = (
        "# A\ntwo\nlines\n\n- one\n- two\n  more\n```python\ncode\n```\n<!-- note -->\n| a | b |\n| c | d |\n"
    )
    assert paragraphs(text) == ["# A two lines", "- one", "- two more", "| a | b |", "| c | d |"]


def test_a_table_says_where_it_is_from() -> None:
    run = {"file": "a.json", "commit": "abc-dirty", "date": "2026-11-22", "hardware": {"cores": 2}}
    gpu = run | {"commit": "def", "hardware": {"gpu": "NVIDIA H200", "count": 4, "cores": 64}}
    rows = [
        {"run": 0, "measured": run, "median_us": 1.0, "n": 5},
        {"run": 0, "measured": run, "median_us": 1.0, "n": 20},
        {"run": 1, "measured": gpu, "share": 0.5},
    ]
    said = "*`a.json`: 2 cores, revision abc with changes, 2026-11-22, medians of 5 and 20; "
    assert sources(rows) == said + "4 x H200, revision def, 2026-11-22.*"
    table = Table(head=["a", "b"], body=[[1, "x"]], rows=rows)
    assert str(table).startswith("| a | b |\n| --- | --- |\n| 1 | x |\n\n*`a.json`")


def test_comets_measure_counts_the_wire_alone() -> None:
    """The wire costs serial 4 us, and fused 1 of them."""
    names = ("serial", 10.0), ("fused", 8.0), ("serial-local", 6.0), ("fused-local", 7.0)
    rows_of = {f"imbrex-{name}": {"median_us": us} for name, us in names}
    assert fused.of_the_wire(rows_of) == "75%"
    assert fused.of_the_wire({"imbrex-serial": rows_of["imbrex-serial"]}) == ""
