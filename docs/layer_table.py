"""The table of `nvlink.md`, from the result file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "layer.json"
MARK = "<!-- layer -->"
OURS, FLOOR, RIVALS = "imbrex-serial", "floor", ("nccl-a2a", "nccl-agrs")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown.replace(MARK, tables()) if page.file.src_uri == "nvlink.md" else markdown


def tables() -> str:
    """One for each number of GPUs, under the revision that was measured."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    revisions = {run["id"]: run["commit"] for run in results["runs"]}
    found = []
    for ranks in sorted({row["case"]["W"] for row in results["rows"]}):
        rows = [row for row in results["rows"] if row["case"]["W"] == ranks]
        measured = ", ".join(sorted({revisions[row["run"]] for row in rows}))
        found += [f"{ranks} GPUs, revision {measured}:", table(rows)]
    return "\n\n".join(found)


def table(rows: list[dict[str, Any]]) -> str:
    """A line per model, number of tokens and operation: microseconds, and ratios within a run."""
    cases: dict[tuple[str, int, str], dict[str, float]] = {}
    for row in rows:
        key = row["case"]["model"], row["case"]["M"], row["op"]
        cases.setdefault(key, {})[row["impl"]] = row["median_us"]
    lines = [
        "| model | M | | ours, us | experts alone | NCCL all-to-all | AllGather / ReduceScatter"
        " | ours over experts | all-to-all over ours |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, tokens, op), us in sorted(cases.items()):
        ours, floor, rivals = us[OURS], us[FLOOR], [us[name] for name in RIVALS]
        cells = [model, tokens, op, *(f"{t:.0f}" for t in (ours, floor, *rivals))]
        cells += [f"{ours / floor:.2f}", f"{rivals[0] / ours:.2f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
