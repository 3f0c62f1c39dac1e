"""What does a GPU give at what a user sees, over loads that would take hours? `python benchmarks/pareto.py`.

Replays of loops (`imbrex.bench.serve.replay`) over the steps in `results/serve.json` and `serve_one.json`, on
a CPU, in a few minutes: of every way and draft length the newest run that timed its steps and chunks, 8, 32
and 128 users a GPU where weights and caches fit. `--report FILE` draws the curves.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from imbrex.bench.results import describe_run, write_results
from imbrex.bench.serve.measured import LOADS, about, key_of, newest_steps, replayed, timed_as
from imbrex.bench.serve.report import write_report

HERE = Path(__file__).parent / "results"
FILES = ("serve.json", "serve_one.json")
LOOPS = HERE / "serve_loops.json"
QUESTION = "What does a GPU give at what a user sees, replayed from measured steps?"

Task = tuple[list[dict[str, Any]], float, tuple[int, int]]
"""Steps and chunks of one way, GiB of the GPU, tokens in and out."""


def replay(task: Task) -> list[dict[str, Any]]:
    """The rows of one load and way."""
    torch.set_num_threads(1)
    steps, memory_gib, load = task
    return replayed(steps, memory_gib, [load])


def tasks_of(run: Any, steps: list[Any], loads: int) -> list[Task]:
    """One for every way and load of a run."""
    keys = dict.fromkeys(map(key_of, steps))
    of_way = [[row for row in steps if key_of(row) == key] for key in keys]
    return [(rows, run["hardware"]["memory_gib"], load) for load in LOADS[:loads] for rows in of_way]


def newest_loops(path: Path) -> list[dict[str, Any]]:
    """The newest loop of every way and load that ran on GPUs, the way named as its steps are; none where
    there is no file."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    newest = {(row["impl"], *row["case"].items()): row for row in sorted(rows, key=lambda row: row["run"])}
    return [row | {"impl": timed_as(row)} for row in newest.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = [str(HERE / name) for name in FILES]
    parser.add_argument("--steps", nargs="+", default=default, help="the files with the steps")
    parser.add_argument("--loads", type=int, default=len(LOADS), help="of the loads, how many")
    parser.add_argument("--report", metavar="FILE", help="an HTML file of the curves")
    parser.add_argument("--out", default=str(HERE / "pareto.json"))
    args = parser.parse_args()
    runs = [one for path in args.steps for one in newest_steps(json.loads(Path(path).read_text()))]
    if not runs:
        parser.error("no steps and chunks were measured; `make gpu-bench NAME=serve` measures them")
    tasks = [task for run, steps in runs for task in tasks_of(run, steps, args.loads)]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        rows = list(chain.from_iterable(pool.map(replay, tasks)))
    where = "; ".join(about(run) for run, _ in runs)
    write_results(args.out, QUESTION, describe_run(f"python benchmarks/pareto.py # steps: {where}"), rows)
    if args.report:
        facts = {"replayed on a CPU from steps of": where}
        write_report(args.report, facts=facts, rows=[*rows, *newest_loops(LOOPS)])


if __name__ == "__main__":
    main()
