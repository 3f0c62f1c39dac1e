"""Pareto curves of serving: the front, the page, and the reproductions' words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from imbrex.bench.serve.report import curves, front, name_of, write_report
from imbrex.reproduce import Asked, find, serving


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


def test_the_curves_are_compared_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "on_ranks", lambda *_: (ROWS, "loopback"))
    finding = find("trtllm-pareto", Asked())
    assert finding.verdict == ("On the common front: alltoall; alone, 1 drafts, 1 forced.",)
    assert [line[-1] for line in finding.table] == ["*", "*", "", "*"]


def test_the_heads_are_compared_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"op": "head", "impl": impl, "case": {"T": 8}, "median_us": us}
        for impl, us in (("whole", 300.0), ("split", 200.0))
    ]
    monkeypatch.setattr(serving, "on_ranks", lambda *_: (rows, "loopback"))
    finding = find("trtllm-lm-head", Asked())
    assert finding.table == (("8", "300", "200", "1.50x"),)
    assert "1.50x at 8" in finding.verdict[0]
