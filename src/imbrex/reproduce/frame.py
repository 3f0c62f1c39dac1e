"""The question and the answer that every reproduction has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The settings of a reproduction.

    full: as large as the claim, instead of a few minutes on a laptop. rounds: of every timing; 0 is the
    reproduction's own choice. data: text files, where text is needed. parts: a folder for finished parts of
    a reproduction that takes long and has such: those that are there are not made again."""

    full: bool = False
    rounds: int = 0
    data: tuple[str, ...] = ()
    parts: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The answer of a reproduction.

    title, question: of the result file. head, table: the paper's figures beside ours. differs: what is
    not as in the paper. verdict: what holds, what does not, and where the paper cannot be right.
    rows: for the result file. chart: SVG."""

    title: str
    question: str
    head: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    differs: tuple[str, ...]
    verdict: tuple[str, ...]
    rows: Sequence[Mapping[str, Any]]
    chart: str

    def text(self) -> str:
        """Markdown."""
        lines = [f"## {self.title}", "", *_table(self.head, self.table), "", "What differs:"]
        lines += [f"- {sentence}" for sentence in self.differs]
        lines += ["", "What it shows:", *(f"- {sentence}" for sentence in self.verdict)]
        return "\n".join(lines) + "\n"


def _table(head: Sequence[str], table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *table)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(head), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, table)]


def timed_rows(
    op: str, timed: Mapping[str, Any], case: Mapping[str, Any], *, rounds: int
) -> list[dict[str, Any]]:
    """Rows of the result file: a row per way, times in microseconds of a forward and its backward."""
    return [
        {
            "op": op,
            "impl": name,
            "case": dict(case),
            "median_us": 1e6 * times.step,
            "min_us": 1e6 * times.shortest,
            "max_us": 1e6 * times.longest,
            "forward_us": 1e6 * times.forward,
            "moving_us": 1e6 * times.moving,
            "experts_us": 1e6 * times.experts,
            "n": rounds,
        }
        for name, times in timed.items()
    ]
