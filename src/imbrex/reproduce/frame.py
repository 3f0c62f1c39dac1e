"""Options and result of a reproduction: `Options`, `Finding`, and how both become a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from imbrex.kernels import why_not_hopper

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
"""The committed results, a folder of the repository; an installed package has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of a reproduction.

    full: run at the paper's size, instead of a few minutes on a laptop. rounds: the number of rounds of every
        timing; 0 lets the reproduction choose. data: files of text or of traces, for reproductions that read
        them. parts: a folder in which a long reproduction stores finished parts. Parts that are there already
        are not run again.
    """

    full: bool = False
    rounds: int = 0
    data: tuple[str, ...] = ()
    parts: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of a reproduction.

    title, question: those of the result file. head, table: the paper's figures beside ours. differs:
        sentences that say what is not as in the paper. verdict: sentences that say which claims hold, which
        do not, and where the paper cannot be right. rows: those of the result file. chart: an SVG.
    """

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


def spread_of(times: Sequence[float]) -> dict[str, Any]:
    """The median and both ends of a row's microseconds, and how many there are."""
    ends = {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}
    return {**{name: round(us, 1) for name, us in ends.items()}, "n": len(times)}


def count_gpus() -> int:
    """GPUs that run our kernels; 1 is none, since nothing crosses."""
    world = torch.cuda.device_count() if why_not_hopper() is None else 0
    return world if world > 1 else 0


Run = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]
"""A run of a benchmark as it is kept, and its rows."""


def read_runs(path: Path) -> Sequence[Run]:
    """The runs of a committed result file; none without a checkout."""
    content = json.loads(path.read_text()) if path.exists() else {"runs": ()}
    return [(run, [row for row in content["rows"] if row["run"] == run["id"]]) for run in content["runs"]]


def read_committed(path: Path) -> tuple[Sequence[Mapping[str, Any]], str]:
    """The rows of a committed result file, and where they are from; none without a checkout."""
    if not path.exists():
        return (), ""
    content = json.loads(path.read_text())
    return content["rows"], source_of(path, content["runs"])


def source_of(path: Path, runs: Sequence[Mapping[str, Any]]) -> str:
    """Words on runs of a committed result file."""
    machines = {
        f"{run['hardware']['count']} x {run['hardware']['gpu']}, revision {run['commit']}, {run['date']}"
        for run in runs
    }
    return f"benchmarks/results/{path.name} ({'; '.join(sorted(machines))})"


def or_committed(
    rows: Sequence[Mapping[str, Any]], here: str, path: Path
) -> tuple[Sequence[Mapping[str, Any]], str]:
    """These rows or, if there are none, those of a committed file, and words on where they are from. here:
    these words for rows that were measured now."""
    if rows:
        return rows, here
    results, source = read_committed(path)
    return results, f"not this machine, but {source}" if results else "blank, no pair of Hopper GPUs is here"
