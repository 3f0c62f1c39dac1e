"""The tables of `placement.md`, from the result files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
POLICIES = {
    ("none", 64): "experts in order",
    ("deepseek", 68): "DeepSeek's EPLB, 4 extra slots, replicas in turn",
    ("balanced", 68): "this plan and split, 4 extra slots",
}
LINES = {"none": "no balancer", "stale": "stale plan", "online": "online", "hindsight": "hindsight"}
VARIANTS = {"off": "off", "nothing_to_do": "on, nothing to do", "two_experts": "experts moving"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "placement.md":
        for name, make in TABLES.items():
            markdown = markdown.replace(f"<!-- {name} -->", make())
    return markdown


def halves() -> str:
    """Imbalance on the second half of a task, by policy and tokens a batch."""
    rows = _rows("placement", "second_half")
    lines = [["tokens a batch, all ranks", "128", "512", "2048"]]
    for task in dict.fromkeys(row["case"]["task"] for row in rows):
        for (impl, slots), about in POLICIES.items():
            mine = [r for r in rows if (r["case"]["task"], r["impl"], r["case"]["S"]) == (task, impl, slots)]
            mine.sort(key=lambda row: row["case"]["batch"])
            lines.append([f"{task}: {about}", *(f"{row['imbalance']:.4f}" for row in mine)])
    return _table(lines)


def drift() -> str:
    """Imbalance after one cycle, by task and tokens an iteration."""
    rows = _rows("placement", "drift")
    lines = [["tokens an iteration", "task", *LINES.values()]]
    for key in dict.fromkeys((row["case"]["batch"], row["case"]["task"]) for row in rows):
        of = {r["impl"]: r for r in rows if (r["case"]["batch"], r["case"]["task"]) == key}
        found = (f"{of[impl]['imbalance_after_a_cycle']:.3f}" for impl in LINES)
        lines.append([str(key[0]), key[1], *found])
    return _table(lines)


def split() -> str:
    rows = _rows("placement_gpu", "split")
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    lines = [["ranks, experts, slots", *(f"{impl}, us" for impl in impls)]]
    for key in dict.fromkeys(tuple(row["case"][x] for x in "WES") for row in rows):
        of = {row["impl"]: row for row in rows if tuple(row["case"][x] for x in "WES") == key}
        lines.append([", ".join(map(str, key)), *(f"{of[impl]['median_us']:.0f}" for impl in impls)])
    return _table(lines)


def iterations() -> str:
    """Medians and, where written down, means, which have the iterations in which a migration ends."""
    rows = _rows("placement_gpu", "iteration", every=True)
    lines = [["GPUs", "tokens a rank", "balancer", "iteration, ms", "over off", "mean over off", "experts"]]
    for row in rows:
        off = next(r for r in rows if r["impl"] == "off" and r["case"] == row["case"])
        over = [f"{row[name] / off[name] - 1:+.1%}" for name in ("median_us", "mean_us") if name in row]
        lines.append(
            [
                str(row["case"]["W"]),
                str(row["case"]["T"]),
                VARIANTS[row["impl"]],
                f"{row['median_us'] / 1000:.2f}",
                *[*over, ""][:2],
                f"{row.get('fetched_an_iteration', 0):.1f}",
            ]
        )
    return _table(lines)


def skewed() -> str:
    rows = _rows("placement_gpu", "skewed", every=True)
    head = [
        "GPUs",
        "model",
        "task, layer",
        "in order: ms (imbalance)",
        "planned: ms",
        "predicted: ms",
        "off by",
    ]
    lines = [head]
    for row in rows:
        if row["impl"] != "planned":
            continue
        before = next(r for r in rows if r["impl"] == "in_order" and r["case"] == row["case"])
        lines.append(
            [
                str(row["case"]["W"]),
                row["case"]["model"],
                f"{row['case']['task']}, {row['case']['layer']}",
                f"{before['median_us'] / 1000:.2f} ({before['imbalance']:.2f})",
                f"{row['median_us'] / 1000:.2f}",
                f"{row['predicted_us'] / 1000:.2f}",
                f"{row['measured_over_predicted'] - 1:+.1%}",
            ]
        )
    return _table(lines)


TABLES: dict[str, Callable[[], str]] = {
    "placement halves": halves,
    "placement drift": drift,
    "placement split": split,
    "placement iterations": iterations,
    "placement skewed": skewed,
}


def _rows(name: str, op: str, *, every: bool = False) -> list[dict[str, Any]]:
    """Of the last run that has some, or of every run."""
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    last = max(row["run"] for row in rows if row["op"] == op)
    return [row for row in rows if row["op"] == op and (every or row["run"] == last)]


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])
