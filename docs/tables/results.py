"""Rows of the result files, and tables that say where their rows are from."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Cells, and the rows of result files that they were made from."""

    head: Sequence[Any]
    body: Sequence[Sequence[Any]]
    rows: Sequence[Row]

    def __str__(self) -> str:
        """The table as Markdown, and under it a line that says where its figures are from."""
        return f"{self.cells()}\n\n{sources(self.rows)}"

    def cells(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.body]
        return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


@functools.cache
def read(name: str) -> tuple[Row, ...]:
    """The rows of `benchmarks/results/NAME.json`; `measured` of a row is the run that it belongs to."""
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    runs = {run["id"]: run | {"file": f"{name}.json"} for run in content["runs"]}
    return tuple(row | {"measured": runs[row["run"]]} for row in content["rows"])


def select(rows: Iterable[Row], *, case: Row | None = None, **wanted: Any) -> list[Row]:
    """The rows that have these values, in themselves and in their case."""
    inner = (case or {}).items()
    return [row for row in rows if wanted.items() <= row.items() and inner <= row.get("case", {}).items()]


def last_run(rows: Iterable[Row]) -> list[Row]:
    """The rows of the newest run among them."""
    rows = list(rows)
    last = max(row["run"] for row in rows)
    return [row for row in rows if row["run"] == last]


def on(rows: Iterable[Row], gpu: str, count: int | None = None) -> list[Row]:
    """The rows measured on GPUs of this name, as many as `count` if it is given."""
    machines = [(row, row["measured"]["hardware"]) for row in rows]
    return [row for row, had in machines if gpu in had["gpu"] and count in (None, had["count"])]


def sources(rows: Iterable[Row]) -> str:
    """A line: file, hardware, revision and date of every run, and of how many calls medians are."""
    rows = list(rows)
    runs = {(row["measured"]["file"], row["run"]): row["measured"] for row in rows}
    counts: dict[tuple[str, int], set[int]] = {key: set() for key in runs}
    for row in rows:
        if "n" in row and "median_us" in row:
            counts[row["measured"]["file"], row["run"]].add(row["n"])
    said, file = [], ""
    for key, run in sorted(runs.items()):
        words = f"{hardware(run)}, revision {revision(run)}, {run['date']}"
        words += f", medians of {' and '.join(map(str, sorted(counts[key])))}" if counts[key] else ""
        if key[0] == file and words in said[-1]:
            continue  # as the run before
        said.append(words if key[0] == file else f"`{key[0]}`: {words}")
        file = key[0]
    return f"*{'; '.join(said)}.*"


def hardware(run: Row) -> str:
    machine = run["hardware"]
    if "gpu" not in machine:
        return f"{machine['cores']} cores"
    return f"{machine['count']} x {machine['gpu'].removeprefix('NVIDIA ')}"


def revision(run: Row) -> str:
    """The commit; `git describe --dirty` marks one with changes that nobody committed."""
    return run["commit"].replace("-dirty", " with changes")
