"""The tables of `experts.md`, from the result file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "experts.json"
MARK, FP8_MARK = "<!-- experts -->", "<!-- experts in fp8 -->"
TITLES = {
    "grouped_gemm": "grouped GEMM alone",
    "ffn": "forward, permuted rows",
    "ffn_unpermuted": "forward, tokens to weighted sums",
    "ffn_training": "forward and backward",
    "decode": "decode (weights read once)",
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri != "experts.md":
        return markdown
    return markdown.replace(MARK, table()).replace(FP8_MARK, fp8_table())


def table() -> str:
    """A line per operation, rows and skew: torch's time over ours, and our share of the limit."""
    head = "torch's time over ours: mean, least | share of the limit: mean, least"
    return _lines(head, lambda rows: (_faster(rows, "torch", "imbrex"), rows["imbrex"]["share"]))


def fp8_table() -> str:
    """The same of the fp8 forward: our bf16's time over it, and torch's."""
    head = "our bf16 time over it: mean, least | torch's bf16 time over it: mean, least"
    ours = "imbrex-fp8"
    return _lines(
        head, lambda rows: (_faster(rows, "imbrex", ours), _faster(rows, "torch", ours)), (ours,), "{:.2f}"
    )


def _faster(rows: dict[str, Any], rival: str, ours: str) -> float:
    return rows[rival]["median_us"] / rows[ours]["median_us"]


def _lines(
    head: str,
    figures: Callable[[dict[str, Any]], tuple[float, float]],
    needed: tuple[str, ...] = (),
    second: str = "{:.0%}",
) -> str:
    """A line per operation, rows and skew: two figures of every model, mean and least (ratios: geometric)."""
    found: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    cases: dict[str, dict[str, Any]] = {}
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]:
        cases.setdefault(json.dumps([row["run"], row["op"], row["case"]]), {}).setdefault(row["impl"], row)
    for rows in cases.values():
        if all(name in rows for name in ("imbrex", "torch", *needed)):
            ours = rows["imbrex"]
            key = ours["op"], ours["case"]["rows"], ours["case"]["skew"]
            found.setdefault(key, []).append(figures(rows))
    lines = [f"| | rows | skew | {head} |", "|---|---|---|---|---|"]
    for op, title in TITLES.items():
        for (_, rows, skew), values in sorted((k, v) for k, v in found.items() if k[0] == op):
            firsts, seconds = zip(*values, strict=True)
            cells = [title, rows, skew, f"{statistics.geometric_mean(firsts):.2f}, {min(firsts):.2f}"]
            mean = statistics.geometric_mean(seconds) if needed else statistics.mean(seconds)
            cells.append(f"{second.format(mean)}, {second.format(min(seconds))}")
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
