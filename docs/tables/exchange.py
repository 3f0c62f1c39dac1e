"""The tables of exchange.md."""

from __future__ import annotations

import json
from typing import Any

from docs.tables.results import Row, Table, read, select

TARGETS = (
    ("dispatch", "compact", "bf16", 560, 510),
    ("dispatch", "expert", "bf16", 620, 545),
    ("combine", "compact", "bf16", 560, 520),
    ("combine", "expert", "bf16", 640, 560),
    ("dispatch", "compact", "fp8", 340, 285),
)
RIVALS = "nccl-a2a", "nccl-agrs"
RIVAL_HEADS = "NCCL all-to-all, a row a rank", "AllGather, ReduceScatter"


def rows_of(name: str) -> list[Row]:
    """The rows of a file; of one call measured in several runs, the last."""
    what = ("op", "impl", "case", "num_sms", "full_call", "cached", "graph", "quantised")
    return list({json.dumps([row.get(field) for field in what]): row for row in read(name)}.values())


def main_rows(**wanted: Any) -> list[Row]:
    """Rows of the targets' shape, uniform routing."""
    shape = {"T": 4096, "D": 7168, "E": 256, "routing": "uniform"}
    return select(rows_of("exchange"), case=shape, **wanted)


def targets() -> Table:
    lines, used = [], []
    for ranks in (2, 4):
        for op, layout, dtype, least, aim in TARGETS:
            case = {"layout": layout, "dtype": dtype, "W": ranks}
            calls = select(main_rows(op=op, full_call=True), case=case)
            fastest = {
                name: min((row for row in calls if row["impl"] == name), key=lambda row: row["median_us"])
                for name in ("imbrex", *RIVALS)
                if any(row["impl"] == name for row in calls)
            }
            used += fastest.values()
            ours, *others = (fastest[n]["median_us"] if n in fastest else "-" for n in ("imbrex", *RIVALS))
            goal = f"{least} / {aim}" if ranks == 4 else "-"
            lines.append([ranks, op, layout, dtype, f"**{ours}**", *others, goal])
    head = ["GPUs", "call", "rows", "dtype", "imbrex, us", *RIVAL_HEADS, "at least / aim"]
    return Table(head=head, body=lines, rows=used)


def skew() -> Table:
    """Full calls under skewed routing."""
    lines: dict[tuple[Any, ...], dict[str, float]] = {}
    rows = [
        row
        for row in rows_of("exchange")
        if row.get("case", {}).get("routing") not in (None, "uniform") and row.get("full_call")
    ]
    for row in rows:
        case = row["case"]
        routing = "recorded" if case["routing"].startswith("trace:") else case["routing"]
        key = case["W"], routing, row["op"], case["layout"]
        lines.setdefault(key, {})[row["impl"]] = row["median_us"]
    body = [
        [*key, *(times.get(name, "-") for name in ("imbrex", *RIVALS))]
        for key, times in sorted(lines.items())
    ]
    return Table(head=["GPUs", "routing", "call", "rows", "imbrex, us", *RIVAL_HEADS], body=body, rows=rows)


def sweep() -> Table:
    """Wire GB/s of the kernels alone over SMs, two experts a rank."""
    lines: dict[tuple[Any, ...], dict[int, str]] = {}
    rows = [row for row in select(rows_of("exchange"), case={"D": 8192}) if "wire_gbps" in row]
    for row in rows:
        key = row["case"]["W"], row["op"], row["case"]["layout"], row["case"]["dtype"]
        lines.setdefault(key, {})[row["num_sms"]] = f"{row['wire_gbps']:.0f} / {row['logical_gbps']:.0f}"
    sms = sorted({n for found in lines.values() for n in found})
    body = [[*key, *(found.get(n, "-") for n in sms)] for key, found in sorted(lines.items())]
    return Table(head=["EP", "call", "rows", "dtype", *(f"{n} SMs" for n in sms)], body=body, rows=rows)


def doors() -> Table:
    """Calls of DeepEP's buffers, where the host was timed, too."""
    rows = [row for row in main_rows() if row["impl"].startswith("deep_ep") and "called_us" in row]
    lines = [
        [
            row["case"]["W"],
            row["impl"],
            row["op"],
            "a handle" if "cached" in row else "none",
            *(row.get(name, "-") for name in ("median_us", "host_us", "called_us")),
            row["host_syncs"],
        ]
        for row in rows
    ]
    head = ["GPUs", "buffer", "call", "handle", "us", "host, us", "called, us", "host synchronisations"]
    return Table(head=head, body=lines, rows=rows)


def glue() -> Table:
    """Microseconds over emulated EP: ours, torch's."""
    lines: dict[tuple[Any, ...], dict[int, dict[str, float]]] = {}
    rows = rows_of("glue")
    for row in rows:
        case = row["case"]
        at = lines.setdefault((case["valid_rows"], row["op"]), {}).setdefault(case["ep"], {})
        at[row["impl"]] = row["median_us"]
    sizes = sorted({ep for found in lines.values() for ep in found})
    body = [
        [*key, *(f"{found[ep]['imbrex']:.0f} / {found[ep]['torch']:.0f}" for ep in sizes)]
        for key, found in lines.items()
    ]
    return Table(head=["rows", "operator", *(f"EP {ep}" for ep in sizes)], body=body, rows=rows)
