"""The tables of `experts.md`, from the result file."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "experts.json"
LAYER_RESULTS = RESULTS.with_name("layer_fp8.json")
MARK, FP8_MARK, LAYER_MARK = "<!-- experts -->", "<!-- experts in fp8 -->", "<!-- layer in fp8 -->"
NEEDS_MARK = "<!-- experts' launches and memory -->"
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
    filled = markdown.replace(MARK, table()).replace(FP8_MARK, fp8_table())
    return filled.replace(NEEDS_MARK, needs_table()).replace(LAYER_MARK, layer_table())


def table() -> str:
    """A line per operation, rows and skew: torch's time over ours, and our share of the limit."""
    head = "torch's time over ours: mean, least | share of the limit: mean, least"
    return _lines(head, lambda rows: (_faster(rows, "torch", "imbrex"), rows["imbrex"]["share"]))


def fp8_table() -> str:
    """The same of the fp8 forward: our bf16's time over it, quantising rows or not, and torch's."""
    ours, given = "imbrex-fp8", "imbrex-fp8-rows"
    heads = "our bf16 time over it", "the same, rows given in fp8", "torch's bf16 time over it"

    def figures(rows: dict[str, Any]) -> tuple[float, ...]:
        straight = _faster(rows, "imbrex", given) if given in rows else math.nan
        return _faster(rows, "imbrex", ours), straight, _faster(rows, "torch", ours)

    return _lines(" | ".join(f"{head}: mean, least" for head in heads), figures, (ours,))


def needs_table() -> str:
    """A line per operation and model: launches of a call, and its MiB, ours and torch's."""
    lines = ["| | | launches: imbrex, torch | MiB: imbrex, torch |", "|---|---|---|---|"]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]:
        case = row["case"]
        if (case["rows"], case["skew"]) == (16384, "uniform") and "launches" in row and "product" not in case:
            found.setdefault((row["op"], case["model"]), {}).setdefault(row["impl"], row)
    for (op, model), rows in sorted(found.items(), key=lambda item: list(TITLES).index(item[0][0])):
        both = rows["imbrex"], rows["torch"]
        launches, memory = (
            ", ".join(f"{row[name]:.0f}" for row in both) for name in ("launches", "peak_mib")
        )
        lines.append(f"| {TITLES[op]} | {model} | {launches} | {memory} |")
    return "\n".join(lines)


def layer_table() -> str:
    """A line per model and operation: microseconds of every way to use fp8."""
    ways = {
        "imbrex-serial": "bf16",
        "imbrex-serial-fp8-experts": "experts in fp8, rows cross in bf16",
        "imbrex-serial-fp8-decoded": "rows cross in fp8, quantised again",
        "imbrex-serial-fp8-rows": "rows stay in fp8",
    }
    lines = [f"| us | | {' | '.join(ways.values())} |", "|---|---|" + "---|" * len(ways)]
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in json.loads(LAYER_RESULTS.read_text(encoding="utf-8"))["rows"]:
        case = row["case"]
        what = f"{case['model']}, {case['M']} tokens on {case['W']} GPUs"
        found.setdefault((what, row["op"]), {})[row["impl"]] = row["median_us"]
    for (what, op), times in found.items():
        cells = what if op == "forward" else "", op, *(f"{times[way]:.0f}" for way in ways)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _faster(rows: dict[str, Any], rival: str, ours: str) -> float:
    return rows[rival]["median_us"] / rows[ours]["median_us"]


def _lines(
    head: str,
    figures: Callable[[dict[str, Any]], tuple[float, ...]],
    needed: tuple[str, ...] = (),
) -> str:
    """A line per operation, rows and skew: figures of every model, mean and least. All are ratios, whose mean
    is geometric, but the second of two, a share."""
    found: dict[tuple[str, int, str], list[tuple[float, ...]]] = {}
    cases: dict[str, dict[str, Any]] = {}
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]:
        cases.setdefault(json.dumps([row["run"], row["op"], row["case"]]), {}).setdefault(row["impl"], row)
    for rows in cases.values():
        if all(name in rows for name in ("imbrex", "torch", *needed)):
            ours = rows["imbrex"]
            key = ours["op"], ours["case"]["rows"], ours["case"]["skew"]
            found.setdefault(key, []).append(figures(rows))
    columns = 3 + head.count("|") + 1
    lines = [f"| | rows | skew | {head} |", "|" + "---|" * columns]
    for op, title in TITLES.items():
        for (_, rows, skew), values in sorted((k, v) for k, v in found.items() if k[0] == op):
            cells = [title, rows, "recorded" if skew.startswith("load:") else skew]
            for number, column in enumerate(zip(*values, strict=True)):
                share = number == 1 and len(values[0]) == 2
                cells.append(_cell([value for value in column if not math.isnan(value)], share=share))
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _cell(values: list[float], *, share: bool) -> str:
    if not values:
        return ""
    if share:
        return f"{statistics.mean(values):.0%}, {min(values):.0%}"
    return f"{statistics.geometric_mean(values):.2f}, {min(values):.2f}"
