"""The table of tiers.md: exchanges between two nodes beside their network alone."""

from __future__ import annotations

from docs.tables.results import Row, Table, read, select

NETWORK = "network"
NAMES = {NETWORK: "network alone", "tiered": "`tiered`", "hierarchical": "`hierarchical`"}
MESSAGES = "the same rows in several messages"


def measured() -> Table:
    """Forwards and steps in ms, and times the network's own."""
    rows = list(read("tiers"))
    head = ["exchange", "chunks", "forward", "of the network", "with the backward", "of the network"]
    names = dict.fromkeys(row["impl"] for row in rows)
    return Table(head=head, body=[_line(rows, name) for name in names if name != f"{NETWORK}-1"], rows=rows)


def _line(rows: list[Row], name: str) -> list[str]:
    exchange, _, chunks = name.partition("-")
    line = [MESSAGES if exchange == NETWORK and chunks else NAMES[exchange], chunks]
    for op in ("forward", "step"):
        (ours,), (alone,) = (select(rows, op=op, impl=impl) for impl in (name, NETWORK))
        share = "" if name == NETWORK else f"{ours['median_us'] / alone['median_us']:.2f}"
        line += [f"{ours['median_us'] / 1e3:.1f}", share]
    return line
