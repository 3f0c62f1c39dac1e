"""The tables of `codecs.md`, from the result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
WIDTH = 7168


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri != "codecs.md":
        return markdown
    return markdown.replace("<!-- codec rates -->", rates()).replace("<!-- learning -->", learning())


def rows_of(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def rates() -> str:
    """A line per codec: share of a copy's rate by direction and dtype of the rows."""
    share: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows_of("codecs"):
        if row["impl"] == "imbrex" and row["case"]["D"] == WIDTH:
            share.setdefault(row["case"]["codec"], {})[row["op"], row["case"]["dtype"]] = row["share"]
    columns = [(op, dtype) for dtype in ("bfloat16", "float32") for op in ("encode", "decode")]
    lines = ["| | " + " | ".join(f"{op}, {dtype}" for op, dtype in columns) + " |", "|---|---|---|---|---|"]
    for codec, of in share.items():
        cells = (f"{of[column]:.0%}" if column in of else "" for column in columns)
        lines.append(f"| `{codec}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def learning() -> str:
    """A line per variant: held-out loss, and what it has over none, seed by seed."""
    found: dict[str, dict[int, float]] = {}
    for row in rows_of("convergence"):
        found.setdefault(row["impl"], {})[row["case"]["seed"]] = row["held_out_nats"]
    lines = ["| | nats a byte, mean | minus `none`, seed by seed |", "|---|---|---|"]
    for variant, nats in sorted(found.items(), key=lambda item: sum(item[1].values())):
        apart = ", ".join(f"{value - found['none'][seed]:+.4f}" for seed, value in sorted(nats.items()))
        lines.append(f"| {variant} | {sum(nats.values()) / len(nats):.4f} | {apart} |")
    return "\n".join(lines)
