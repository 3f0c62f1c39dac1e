"""The tables of experts.md, and what the expert kernels must show.

    python -m docs.tables.experts [FILE]

prints every measure with its targets, and every case in which torch takes less time.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs.tables.results import RESULTS, Row, Table, read

from imbrex.bench.shapes import MODELS

TITLES = {
    "grouped_gemm": "grouped GEMM alone",
    "ffn": "forward, permuted rows",
    "ffn_unpermuted": "forward, tokens to weighted sums",
    "ffn_training": "forward and backward",
    "decode": "decode (weights read once)",
}
MANY_ROWS = 16384
"""Rows from which the tensor cores are the limit of every model's experts."""
WIDE = 1408
"""F from which a product's share of the dense rate has a target."""
TOKENS = "ffn_unpermuted"
LEAST_CALLS = 20
OVER_TORCH = (
    ("grouped GEMM", "grouped_gemm", ""),
    ("forward", "ffn", "1.10 / 1.18"),
    ("tokens to weighted sums", TOKENS, "1.25 / 1.4"),
    ("forward and backward", "ffn_training", "1.10 / 1.25"),
)
FP8_WAYS = {
    "imbrex-serial": "bf16",
    "imbrex-serial-fp8-experts": "experts in fp8, rows cross in bf16",
    "imbrex-serial-fp8-decoded": "rows cross in fp8, quantised again",
    "imbrex-serial-fp8-rows": "rows stay in fp8",
}
Pair = tuple[Row, Row]
"""The same case of two implementations: the rival, ours."""


def pairs(rows: Iterable[Row], rival: str, ours: str) -> list[Pair]:
    """Both rows of every case that both have in one run; the faster where one was timed twice there."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        case = cases.setdefault(json.dumps([row["run"], row["op"], row["case"]]), {})
        if row["impl"] not in case or row["median_us"] < case[row["impl"]]["median_us"]:
            case[row["impl"]] = row
    return [(case[rival], case[ours]) for case in cases.values() if rival in case and ours in case]


def ratio(pair: Pair) -> float:
    """The rival's time over ours."""
    return pair[0]["median_us"] / pair[1]["median_us"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Pairs of rows, and a figure of each."""

    title: str
    pairs: Sequence[Pair]
    figure: Callable[[Pair], float] = ratio
    percent: bool = False

    def cell(self, key: tuple[str, int]) -> str:
        """Mean and least over the models; the mean of ratios is geometric."""
        values = [self.figure(pair) for pair in self.pairs if key_of(pair[1]) == key]
        if not values:
            return ""
        if self.percent:
            return f"{statistics.mean(values):.0%}, {min(values):.0%}"
        return f"{statistics.geometric_mean(values):.2f}, {min(values):.2f}"


def key_of(row: Row) -> tuple[str, int]:
    return row["op"], row["case"]["rows"]


def quoted() -> list[Row]:
    """The rows of twenty calls. 65536 rows, and compiled torch, were timed ten times only."""
    return [row for row in read("experts") if row.get("n", 0) >= LEAST_CALLS]


def over_torch() -> Table:
    """A line per operation and rows: torch's time over ours, and our share of the limit."""
    found = pairs(quoted(), "torch", "imbrex")
    return by_case(
        Column(title="torch's time over ours: mean, least", pairs=found),
        Column(
            title="share of the limit: mean, least",
            pairs=found,
            figure=lambda pair: pair[1]["share"],
            percent=True,
        ),
    )


def fp8() -> Table:
    """A line per operation and rows of the fp8 forward, quantising rows or not."""
    rows, ours = quoted(), "imbrex-fp8"
    return by_case(
        Column(title="our bf16 time over it: mean, least", pairs=pairs(rows, "imbrex", ours)),
        Column(
            title="the same, rows given in fp8: mean, least", pairs=pairs(rows, "imbrex", "imbrex-fp8-rows")
        ),
        Column(title="torch's bf16 time over it: mean, least", pairs=pairs(rows, "torch", ours)),
    )


def by_case(*columns: Column) -> Table:
    """A line for every operation and rows of the first column's pairs, over all models and loads."""
    keys = {key_of(pair[1]) for pair in columns[0].pairs}
    body = [
        [TITLES[op], rows, *(column.cell((op, rows)) for column in columns)]
        for op in TITLES
        for rows in sorted(rows for of, rows in keys if of == op)
    ]
    used = [row for column in columns for pair in column.pairs for row in pair]
    head = ["operation", "rows", *(column.title for column in columns)]
    return Table(head=head, body=body, rows=used)


def needs() -> Table:
    """A line per operation and model: launches of a call, and its MiB, ours and torch's."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in quoted():
        case = row["case"]
        if (case["rows"], case["skew"]) == (16384, "uniform") and "launches" in row and "product" not in case:
            found.setdefault((row["op"], case["model"]), {}).setdefault(row["impl"], row)
    lines, used = [], []
    for (op, model), rows in sorted(found.items(), key=lambda item: list(TITLES).index(item[0][0])):
        both = rows["imbrex"], rows["torch"]
        cells = (", ".join(f"{row[name]:.0f}" for row in both) for name in ("launches", "peak_mib"))
        lines.append([TITLES[op], model, *cells])
        used += both
    head = ["operation", "model", "launches: imbrex, torch", "MiB: imbrex, torch"]
    return Table(head=head, body=lines, rows=used)


def layer_fp8() -> Table:
    """A line per model and operation: microseconds of every way to use fp8."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in read("layer_fp8"):
        case = row["case"]
        layer = f"{case['model']}, {case['M']} tokens on {case['W']} GPUs"
        found.setdefault((layer, row["op"]), {})[row["impl"]] = row["median_us"]
    lines = [
        [layer if op == "forward" else "", op, *(f"{times[way]:.0f}" for way in FP8_WAYS)]
        for (layer, op), times in found.items()
    ]
    return Table(head=["layer", "us", *FP8_WAYS.values()], body=lines, rows=read("layer_fp8"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A measure: values of all its cases, ratios or shares; `targets`: at least, aim, of the mean."""

    name: str
    values: Sequence[float]
    targets: str
    geometric: bool = True

    def line(self) -> str:
        if not self.values:
            return f"| {self.name} | {self.targets} | not measured | | 0 |"
        mean = (statistics.geometric_mean if self.geometric else statistics.mean)(self.values)
        return f"| {self.name} | {self.targets} | {mean:.3f} | {min(self.values):.3f} | {len(self.values)} |"


def ratios(found: Iterable[Pair], op: str, least: int = 0) -> list[float]:
    """Ratios of an operation's pairs of at least so many rows."""
    return [ratio(pair) for pair in found if pair[1]["op"] == op and pair[1]["case"]["rows"] >= least]


def figures(rows: Sequence[Row]) -> list[Figure]:
    torch, compiled = pairs(rows, "torch", "imbrex"), pairs(rows, "torch-compiled", "imbrex")
    found = [
        Figure(
            name=f"grouped GEMM, {number} rows, balanced, F >= {WIDE}: share of the dense rate",
            values=shares(rows, number),
            targets="0.92 / 0.95, least 0.85 / 0.90" if number >= MANY_ROWS else "",
            geometric=False,
        )
        for number in sorted({row["case"]["rows"] for row in rows if row["op"] == "grouped_gemm"})
    ]
    for name, op, targets in OVER_TORCH:
        values = ratios(torch, op, MANY_ROWS)
        found.append(Figure(name=f"{name}, torch's time over ours", values=values, targets=targets))
    decode = [row["share"] for row in rows if row["op"] == "decode" and row["impl"] == "imbrex"]
    given, here = pairs(rows, "imbrex", "imbrex-fp8-rows"), pairs(rows, "imbrex", "imbrex-fp8")
    of_compiled = ratios(compiled, "ffn", MANY_ROWS)
    return [
        *found,
        Figure(name="forward, compiled torch's", values=of_compiled, targets=""),
        Figure(name="decode: share of the copy rate", values=decode, targets="0.88 / 0.95", geometric=False),
        *fp8_figures("rows given", given, "ffn"),
        *fp8_figures("rows quantised", here, "ffn"),
        *fp8_figures("tokens", here, TOKENS),
    ]


def fp8_figures(name: str, found: Sequence[Pair], op: str) -> list[Figure]:
    title, targets = f"fp8, bf16's time over it, {name}", "1.5 / 1.75"
    return [
        Figure(name=title, values=ratios(found, op, MANY_ROWS), targets=targets),
        Figure(name=f"{title}, any number of rows", values=ratios(found, op), targets=targets),
    ]


def shares(rows: Iterable[Row], number: int) -> list[float]:
    """Shares of the dense rate of every balanced product of `number` rows of wide experts."""
    return [
        row["share"]
        for row in rows
        if (row["op"], row["impl"], row["case"]["skew"]) == ("grouped_gemm", "imbrex", "balanced")
        and row["case"]["rows"] == number
        and MODELS[row["case"]["model"]].intermediate_size >= WIDE
    ]


def behind(rows: Sequence[Row]) -> list[str]:
    """A line for every case, of any number of rows, in which torch, eager or compiled, takes less time."""
    return sorted(
        f"{ratio(pair):.3f} {ours['op']} {' '.join(map(str, ours['case'].values()))} {rival['impl']}"
        for pair in raced(rows)
        for rival, ours in [pair]
        if ratio(pair) < 1
    )


def raced(rows: Sequence[Row]) -> list[Pair]:
    return [pair for rival in ("torch", "torch-compiled") for pair in pairs(rows, rival, "imbrex")]


def main(arguments: Sequence[str]) -> None:
    content: Mapping[str, Any] = json.loads(Path(*arguments or [RESULTS / "experts.json"]).read_text())
    rows = content["rows"]
    print(f"Ratios are of {MANY_ROWS} rows and more unless said, not decode; geometric means, shares plain.")
    print("\n| measure | at least / aim | mean | least | cases |\n|---|---|---|---|---|")
    for figure in figures(rows):
        print(figure.line())
    slower = behind(rows)
    print(f"\nbehind torch, eager or compiled, any number of rows: {len(slower)} of {len(raced(rows))} cases")
    print("\n".join(slower))


if __name__ == "__main__":
    main(sys.argv[1:])
