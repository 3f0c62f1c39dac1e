"""The tables of `codecs.md`, from the result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from imbrex.codec import CODECS, make

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
WIDTH = 7168
SHOWN_RATES = ("4", "8", "12", "16")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri != "codecs.md":
        return markdown
    return markdown.replace("<!-- codec rates -->", rates()).replace("<!-- learning -->", learning())


def rows_of(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def rates() -> str:
    """A line per codec: bytes of a row, bound, share of a copy's rate by direction and dtype."""
    share: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows_of("codecs"):
        if row["impl"] == "imbrex" and row["case"]["D"] == WIDTH:
            share.setdefault(row["case"]["codec"], {})[row["op"], row["case"]["dtype"]] = row["share"]
    columns = [(op, dtype) for dtype in ("bfloat16", "float32") for op in ("encode", "decode")]
    head = ["", f"bytes of a row of {WIDTH}", "bound", *(f"{op}, {dtype}" for op, dtype in columns)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in (name for name in CODECS if name in share):
        if name.startswith("zfp") and name.split("-")[1] not in SHOWN_RATES:
            continue
        of = share[name]
        codec = make(name)
        stated = [str(codec.nbytes(WIDTH, torch.bfloat16)), f"{codec.error_bound(1.0, torch.float32):.2g}"]
        cells = [f"{of[column]:.0%}" if column in of else "" for column in columns]
        lines.append(f"| `{name}` | " + " | ".join(stated + cells) + " |")
    return "\n".join(lines) + "\n\n" + slowest(share)


def slowest(share: dict[str, dict[tuple[str, str], float]]) -> str:
    """Which of ZFP's rates is slowest, each way."""
    found = []
    for op in ("encode", "decode"):
        of_op = [
            (value, name, dtype)
            for name, of in share.items()
            for (way, dtype), value in of.items()
            if way == op and name.startswith("zfp")
        ]
        value, name, dtype = min(of_op)
        found.append(f"{op} {value:.0%} (`{name}`, {dtype})")
    return f"The slowest of ZFP's 26 rates: {', '.join(found)}."


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
