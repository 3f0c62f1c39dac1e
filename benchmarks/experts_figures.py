"""What the expert kernels must show, and what benchmarks/results/experts.json says, a line a measure.

python benchmarks/experts_figures.py [FILE]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imbrex.bench.shapes import MODELS

RESULTS = Path(__file__).parent / "results" / "experts.json"
MANY_ROWS = 16384
"""Rows from which the tensor cores are the limit of every model's experts."""
WIDE = 1408
"""F from which a product's share of the dense rate has a target."""
TOKENS = "ffn_unpermuted"
OVER_TORCH = (
    ("grouped GEMM", "grouped_gemm", ""),
    ("forward", "ffn", "1.10 / 1.18"),
    ("tokens to weighted sums", TOKENS, "1.25 / 1.4"),
    ("forward and backward", "ffn_training", "1.10 / 1.25"),
)
Row = Mapping[str, Any]
Pair = tuple[Row, Row]
"""The same case of two implementations: the rival, ours."""


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


def pairs(rows: Iterable[Row], rival: str, ours: str) -> list[Pair]:
    """Both rows of every case that both have in one run, with as many repeats."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(json.dumps([row["run"], row["op"], row["case"], row["n"]]), {})[row["impl"]] = row
    return [(case[rival], case[ours]) for case in cases.values() if rival in case and ours in case]


def ratios(found: Iterable[Pair], *wanted: Callable[[Row], bool]) -> list[float]:
    return [
        rival["median_us"] / ours["median_us"] for rival, ours in found if all(want(ours) for want in wanted)
    ]


def of(op: str) -> Callable[[Row], bool]:
    return lambda row: row["op"] == op


def many(row: Row) -> bool:
    return row["case"]["rows"] >= MANY_ROWS


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
        values = ratios(torch, of(op), many)
        found.append(Figure(name=f"{name}, torch's time over ours", values=values, targets=targets))
    decode = [row["share"] for row in rows if row["op"] == "decode" and row["impl"] == "imbrex"]
    given, here = pairs(rows, "imbrex", "imbrex-fp8-rows"), pairs(rows, "imbrex", "imbrex-fp8")
    return [
        *found,
        Figure(name="forward, compiled torch's", values=ratios(compiled, of("ffn"), many), targets=""),
        Figure(name="decode: share of the copy rate", values=decode, targets="0.88 / 0.95", geometric=False),
        *fp8_figures("rows given", ratios(given, of("ffn"), many), ratios(given, of("ffn"))),
        *fp8_figures("rows quantised", ratios(here, of("ffn"), many), ratios(here, of("ffn"))),
        *fp8_figures("tokens", ratios(here, of(TOKENS), many), ratios(here, of(TOKENS))),
    ]


def fp8_figures(name: str, of_many: Sequence[float], of_all: Sequence[float]) -> list[Figure]:
    fp8, targets = "fp8, bf16's time over it", "1.5 / 1.75"
    return [
        Figure(name=f"{fp8}, {name}", values=of_many, targets=targets),
        Figure(name=f"{fp8}, {name}, any number of rows", values=of_all, targets=targets),
    ]


def shares(rows: Iterable[Row], number: int) -> list[float]:
    """Of the dense rate, of every balanced product of `number` rows of wide experts."""
    return [
        row["share"]
        for row in rows
        if (row["op"], row["impl"], row["case"]["skew"]) == ("grouped_gemm", "imbrex", "balanced")
        and row["case"]["rows"] == number
        and MODELS[row["case"]["model"]].intermediate_size >= WIDE
    ]


def behind(rows: Sequence[Row]) -> list[str]:
    """A line for every case, of any number of rows, in which torch, eager or compiled, takes less time."""
    lines = []
    for rival, ours in raced(rows):
        ratio = rival["median_us"] / ours["median_us"]
        if ratio < 1:
            case = " ".join(map(str, ours["case"].values()))
            lines.append(f"{ratio:.3f} {ours['op']} {case} {rival['impl']}")
    return sorted(lines)


def raced(rows: Sequence[Row]) -> list[Pair]:
    return [pair for rival in ("torch", "torch-compiled") for pair in pairs(rows, rival, "imbrex")]


def main() -> None:
    rows = json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else RESULTS).read_text())["rows"]
    print(
        f"Ratios are of {MANY_ROWS} rows and more unless said, not decode; geometric means, of shares plain."
    )
    print("\n| measure | at least / aim | mean | least | cases |\n|---|---|---|---|---|")
    for figure in figures(rows):
        print(figure.line())
    slower = behind(rows)
    print(f"\nbehind torch, eager or compiled, any number of rows: {len(slower)} of {len(raced(rows))} cases")
    print("\n".join(slower))


if __name__ == "__main__":
    main()
