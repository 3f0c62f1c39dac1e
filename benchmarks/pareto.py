"""What does a GPU give at what a user sees, over loads that would take hours? `python benchmarks/pareto.py`.

Replays of loops (`imbrex.bench.serve.replay`) over the steps in `results/serve.json`, on a CPU: every way and
draft length that was timed there, 8, 32 and 128 users a GPU where weights and caches fit. `--report FILE`
draws the curves.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from imbrex.bench.results import describe_run, write_results
from imbrex.bench.serve.measured import LOADS, replayed
from imbrex.bench.serve.report import write_report

HERE = Path(__file__).parent / "results"
QUESTION = "What does a GPU give at what a user sees, replayed from measured steps?"


def replay(
    steps: list[dict[str, Any]], memory_gib: float, task: tuple[tuple[int, int], str]
) -> list[dict[str, Any]]:
    """The rows of one load and way."""
    torch.set_num_threads(1)
    load, way = task
    return replayed([row for row in steps if row["impl"] == way], memory_gib, [load])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", default=str(HERE / "serve.json"), help="the file with the steps")
    parser.add_argument("--loads", type=int, default=len(LOADS), help="of the loads, how many")
    parser.add_argument("--report", metavar="FILE", help="an HTML file of the curves")
    parser.add_argument("--out", default=str(HERE / "pareto.json"))
    args = parser.parse_args()
    content = json.loads(Path(args.steps).read_text())
    source = content["runs"][-1]
    hardware = source["hardware"]
    steps = [row for row in content["rows"] if row["run"] == source["id"] and row["op"] != "serve"]
    ways = dict.fromkeys(row["impl"] for row in steps if row["op"] == "decode step")
    tasks = [(load, way) for load in LOADS[: args.loads] for way in ways]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        points = pool.map(partial(replay, steps, hardware["memory_gib"]), tasks)
        rows = list(chain.from_iterable(points))
    where = f"{hardware['count']} x {hardware['gpu']}, revision {source['commit']}, {source['date']}"
    write_results(args.out, QUESTION, describe_run(f"python benchmarks/pareto.py # steps: {where}"), rows)
    if args.report:
        write_report(args.report, facts={"replayed on a CPU from steps of": where}, rows=rows)


if __name__ == "__main__":
    main()
