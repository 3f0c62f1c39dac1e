"""The table of `experts.md`, from the result file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "experts.json"
MARK = "<!-- experts -->"
TITLES = {
    "grouped_gemm": "grouped GEMM alone",
    "ffn": "forward, permuted rows",
    "ffn_unpermuted": "forward, tokens to weighted sums",
    "ffn_training": "forward and backward",
    "decode": "decode (weights read once)",
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown.replace(MARK, table()) if page.file.src_uri == "experts.md" else markdown


def table() -> str:
    """A line per operation, rows and skew: torch's time over ours, and our share of the limit."""
    found: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    pairs: dict[str, dict[str, Any]] = {}
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]:
        pairs.setdefault(json.dumps([row["run"], row["op"], row["case"]]), {}).setdefault(row["impl"], row)
    for pair in pairs.values():
        if ours := pair.get("imbrex"):
            key = ours["op"], ours["case"]["rows"], ours["case"]["skew"]
            faster = pair["torch"]["median_us"] / ours["median_us"]
            found.setdefault(key, []).append((faster, ours["share"]))
    lines = [
        "| | rows | skew | torch's time over ours: mean, least | share of the limit: mean, least |",
        "|---|---|---|---|---|",
    ]
    for op, title in TITLES.items():
        for (_, rows, skew), values in sorted((k, v) for k, v in found.items() if k[0] == op):
            faster, shares = zip(*values, strict=True)
            mean = math.exp(sum(map(math.log, faster)) / len(faster))
            share = sum(shares) / len(shares)
            cells = title, rows, skew, f"{mean:.2f}, {min(faster):.2f}", f"{share:.0%}, {min(shares):.0%}"
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
