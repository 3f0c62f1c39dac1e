"""Pareto curves of a serving run as one HTML file: a GPU's tokens a second over a user's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from imbrex.observe.page import empty_figure, table, write_page

Row = Mapping[str, Any]
HEAD = ("way", "users", "tokens/s a user", "tokens/s a GPU", "gap p50, p99 ms", "tokens a step", "step ms")


def curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by way, drafts and interval, in the order of users; points without a window are left out."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        if row["tokens_per_s_gpu"] is not None and row["tokens_per_s_user"] is not None:
            by_name.setdefault(name_of(row), []).append(row)
    return {name: sorted(of, key=lambda row: row["case"]["users"]) for name, of in by_name.items()}


def name_of(row: Row) -> str:
    """The way, with what else differs from a plain run."""
    case = row["case"]
    forced = f", {case['forced']:g} forced" if "forced" in case else ""
    drafts = f", {case['drafts']} drafts{forced}" if case["drafts"] else ""
    replayed = ", replayed" if row["op"] == "replayed" else ""
    interval = f", interval {case['interval']}" if case["interval"] > 1 else ""
    return row["impl"] + drafts + replayed + interval


def front(rows: Sequence[Row]) -> list[Row]:
    """The points that no other beats in both, from the fastest user to the fullest GPU.

    Example: (10, 5), (8, 9), (7, 8): the last is beaten by the second.
    """
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (-row["tokens_per_s_user"], -row["tokens_per_s_gpu"])):
        if not best or row["tokens_per_s_gpu"] > best[-1]["tokens_per_s_gpu"]:
            best.append(row)
    return best


def write_report(path: str | os.PathLike[str], *, facts: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Write the file. For every model, number of ranks and load, each way's curve, and all points as a table,
    those of the common front marked."""
    loads: dict[str, list[Row]] = {}
    for row in rows:
        loads.setdefault(_load(row["case"]), []).append(row)
    write_page(
        path,
        title="Serving: what a user sees and what a GPU gives",
        facts=facts,
        sections=[section for load, of in loads.items() for section in _sections(load, of)],
    )


def _load(case: Mapping[str, Any]) -> str:
    load = f"{case['input']} tokens in, {case['output']} out" if "input" in case else ""
    ranks = f"{case['W']} rank{'s' * (case['W'] > 1)}" if "W" in case else ""
    return ", ".join(filter(None, (case.get("model", ""), ranks, load)))


def _sections(load: str, rows: Sequence[Row]) -> list[tuple[str, str, Any]]:
    figure = empty_figure("tokens a second of a user", "tokens a second of a GPU", height=460)
    by_name = curves(rows)
    for name, of in by_name.items():
        x, y = ([row[key] for row in of] for key in ("tokens_per_s_user", "tokens_per_s_gpu"))
        text = [f"{row['case']['users']} users" for row in of]
        figure.add_scatter(x=x, y=y, text=text, name=name, mode="lines+markers")
    best = {id(row) for row in front([row for of in by_name.values() for row in of])}
    lines = [
        (
            name + (" *" if id(row) in best else ""),
            str(row["case"]["users"]),
            f"{row['tokens_per_s_user']:.1f}",
            f"{row['tokens_per_s_gpu']:.1f}",
            f"{row['gap_ms']['p50']:.2f}, {row['gap_ms']['p99']:.2f}" if row["gap_ms"] else "-",
            f"{row['tokens_per_row_step']:.2f}",
            f"{row['step_ms']:.2f}",
        )
        for name, of in by_name.items()
        for row in of
    ]
    about = "Users in a closed loop: each asks anew when it is answered. Up and right is better."
    starred = "A star marks what no other point beats in both."
    return [
        (f"Pareto curves: {load}" if load else "Pareto curves", about, figure),
        ("Points", starred, table(HEAD, lines)),
    ]
