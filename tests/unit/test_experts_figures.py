"""The measures of the expert kernels, from a small made-up result file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import experts_figures as shown

ROOT = Path(__file__).resolve().parents[2]


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
    assert "not measured" in lines["forward, compiled torch's"]  # ours of as many repeats is not there


def test_cases_behind_torch_are_named() -> None:
    assert shown.behind(ROWS) == ["0.950 grouped_gemm mixtral 1024 balanced torch"]


def test_the_committed_file_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ROOT / "benchmarks/results/experts.json"
    monkeypatch.setattr("sys.argv", ["experts_figures.py", str(file)])
    shown.main()
    out = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert f"behind torch, eager or compiled, any number of rows: {len(shown.behind(rows))} of " in out
