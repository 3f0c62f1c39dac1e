"""Tables of experts.md from benchmarks/tiles.py: tiles of 192 rows, and telling of tiles in fp8."""

from __future__ import annotations

from collections.abc import Iterable

from docs.tables.results import Row, Table, last_run, read

PRODUCTS = {"gate_up": "gate and up", "rows_gradient": "rows' gradient"}
DRAWS = {"balanced": "equal", "uniform": "drawn uniformly"}
Ways = dict[str, Row]
"""The rows of a case, by way."""


def cases(ops: Iterable[str]) -> list[Ways]:
    """The ways of every case of these operations in the newest run, in its order."""
    found: dict[str, Ways] = {}
    for row in last_run(read("tiles")):
        if row["op"] in ops:
            found.setdefault(f"{row['op']} {row['case']}", {})[row["impl"]] = row
    return list(found.values())


def figure(value: str, taken: bool) -> str:
    return f"**{value}**" if taken else value


def tall() -> Table:
    """A line per product, model and draw of counts: by mean rows of an expert, us in the better of single
    blocks and pairs, and that over tiles of 192 rows."""
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    used: list[Row] = []
    for ways in cases(PRODUCTS):
        row, case = ways["tall"], ways["tall"]["case"]
        other = min(ways["single blocks"]["median_us"], ways["pairs"]["median_us"])
        cell = figure(f"{other:.0f}, {other / row['median_us']:.2f}", row["taken"])
        line = PRODUCTS[row["op"]], f"{case['model']}, {case['experts']} experts", DRAWS[case["skew"]]
        lines.setdefault(line, {})[case["mean"]] = cell
        used += ways.values()
    means = sorted({mean for cells in lines.values() for mean in cells})
    body = [[*line, *(cells.get(mean, "") for mean in means)] for line, cells in lines.items()]
    return Table(head=["product", "model", "rows of an expert", *means], body=body, rows=used)


def telling() -> Table:
    """A line per model and rows: both products in fp8 without telling, us, and that over the other ways."""
    body, used = [], []
    for ways in cases(["fp8"]):
        case, cells = ways["pairs"]["case"], []
        for way, row in ways.items():
            alone = ways[way.split(",")[0]]
            us = row["median_us"]
            value = f"{us:.0f}" if row is alone else f"{alone['median_us'] / us:.3f}"
            cells.append(figure(value, row["taken"]))
        body.append([case["model"], case["rows"], *cells])
        used += ways.values()
    ways = ("single blocks, us", "told", "followed", "pairs, us", "told")
    return Table(head=["model", "rows", *ways], body=body, rows=used)
