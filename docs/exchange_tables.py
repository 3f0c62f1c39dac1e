"""The tables of `exchange.md`, from the result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
TARGETS = (
    ("dispatch", "compact", "bf16", 560, 510),
    ("dispatch", "expert", "bf16", 620, 545),
    ("combine", "compact", "bf16", 560, 520),
    ("combine", "expert", "bf16", 640, 560),
    ("dispatch", "compact", "fp8", 340, 285),
)
Row = dict[str, Any]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri != "exchange.md":
        return markdown
    tables = {
        "targets": targets,
        "skew": skew,
        "sweep": sweep,
        "beside": beside,
        "doors": doors,
        "glue": glue,
    }
    for name, table in tables.items():
        markdown = markdown.replace(f"<!-- {name} -->", table())
    return markdown


def rows_of(name: str) -> list[Row]:
    """Of one call measured in several runs, the last."""
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    what = ("op", "impl", "case", "num_sms", "full_call", "cached", "graph", "quantised")
    return list({json.dumps([row.get(field) for field in what]): row for row in found}.values())


def as_table(head: list[str], lines: list[list[Any]]) -> str:
    cells = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in cells)


def main_rows(**wanted: Any) -> list[Row]:
    """Rows of the shape of the targets, uniform routing."""
    shape = {"T": 4096, "D": 7168, "E": 256, "routing": "uniform"}
    found = [row for row in rows_of("exchange") if shape.items() <= row.get("case", {}).items()]
    return [row for row in found if all(row.get(k, row["case"].get(k)) == v for k, v in wanted.items())]


def time_of(**wanted: Any) -> float | str:
    times = [row["median_us"] for row in main_rows(full_call=True, **wanted) if "cached" not in row]
    return min(times) if times else "-"


def targets() -> str:
    lines = []
    for ranks in (2, 4):
        for op, layout, dtype, least, aim in TARGETS:
            case = {"op": op, "layout": layout, "dtype": dtype, "W": ranks}
            others = [time_of(impl=impl, **case) for impl in ("nccl-a2a", "nccl-agrs")]
            goal = f"{least} / {aim}" if ranks == 4 else "-"
            ours = time_of(impl="imbrex", **case)
            lines.append([ranks, op, layout, dtype, f"**{ours}**", *others, goal])
    head = ["GPUs", "", "rows", "", "imbrex, us", "NCCL all-to-all", "AG / RS", "at least / aim"]
    return as_table(head, lines)


def skew() -> str:
    """Full calls under skewed routing."""
    lines: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows_of("exchange"):
        case = row.get("case", {})
        if case.get("routing") in (None, "uniform") or not row.get("full_call"):
            continue
        key = case["W"], case["routing"], row["op"], case["layout"]
        lines.setdefault(key, {})[row["impl"]] = row["median_us"]
    names = ("imbrex", "nccl-a2a", "nccl-agrs")
    body = [[*key, *(times.get(name, "-") for name in names)] for key, times in sorted(lines.items())]
    return as_table(["GPUs", "routing", "", "rows", "imbrex, us", "NCCL all-to-all", "AG / RS"], body)


def sweep() -> str:
    """Wire GB/s of the kernels alone over SMs, two experts a rank."""
    lines: dict[tuple[Any, ...], dict[int, str]] = {}
    for row in rows_of("exchange"):
        case = row.get("case", {})
        if case.get("D") == 8192 and "wire_gbps" in row:
            key = case["W"], row["op"], case["layout"], case["dtype"]
            lines.setdefault(key, {})[row["num_sms"]] = f"{row['wire_gbps']:.0f} / {row['logical_gbps']:.0f}"
    sms = sorted({n for found in lines.values() for n in found})
    body = [[*key, *(found.get(n, "-") for n in sms)] for key, found in sorted(lines.items())]
    return as_table(["EP", "", "rows", "", *(f"{n} SMs" for n in sms)], body)


def beside() -> str:
    lines = [
        [
            row["case"]["W"],
            row["impl"].removeprefix("beside "),
            row["num_sms"],
            f"{row['slowdown']:.2f}",
            row["exchange_slowdown"],
        ]
        for row in rows_of("exchange")
        if row["op"] == "gemm" and "num_sms" in row
    ]
    lines.sort(key=lambda line: line[0])
    return as_table(["GPUs", "beside", "SMs", "GEMM's time over alone", "exchange's time over alone"], lines)


def doors() -> str:
    lines = []
    for row in main_rows():
        if row["impl"].startswith("deep_ep"):
            call = row["impl"], row["op"], "handle" if "cached" in row else ""
            lines.append([row["case"]["W"], *call, row["median_us"], row["host_syncs"]])
    return as_table(["GPUs", "", "", "with an earlier", "us", "host synchronisations"], lines)


def glue() -> str:
    """Microseconds over emulated EP: ours, torch's."""
    lines: dict[tuple[Any, ...], dict[int, dict[str, float]]] = {}
    for row in rows_of("glue"):
        case = row["case"]
        at = lines.setdefault((case["valid_rows"], row["op"]), {}).setdefault(case["ep"], {})
        at[row["impl"]] = row["median_us"]
    sizes = sorted({ep for found in lines.values() for ep in found})
    body = [
        [*key, *(f"{found[ep]['imbrex']:.0f} / {found[ep]['torch']:.0f}" for ep in sizes)]
        for key, found in lines.items()
    ]
    return as_table(["rows", "", *(f"EP {ep}" for ep in sizes)], body)
