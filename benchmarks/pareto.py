"""What does a GPU give at what a user sees, over loads that would take hours? `python benchmarks/pareto.py`.

Replays of loops (`imbrex.bench.serve.replay`) over the steps in `results/serve.json`, on a CPU: every way and
draft length that was timed there, 8, 32 and 128 users a GPU where weights and caches fit. `--report FILE`
draws the curves.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from imbrex.bench.results import describe_run, write_results
from imbrex.bench.serve.measured import replayed
from imbrex.bench.serve.report import write_report

HERE = Path(__file__).parent / "results"
QUESTION = "What does a GPU give at what a user sees, replayed from measured steps?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", default=str(HERE / "serve.json"), help="the file with the steps")
    parser.add_argument("--report", metavar="FILE", help="an HTML file of the curves")
    parser.add_argument("--out", default=str(HERE / "pareto.json"))
    args = parser.parse_args()
    content = json.loads(Path(args.steps).read_text())
    source = content["runs"][-1]
    hardware = source["hardware"]
    steps = [row for row in content["rows"] if row["run"] == source["id"]]
    rows = replayed(steps, hardware["memory_gib"])
    where = f"{hardware['count']} x {hardware['gpu']}, revision {source['commit']}, {source['date']}"
    write_results(args.out, QUESTION, describe_run(f"python benchmarks/pareto.py # steps: {where}"), rows)
    if args.report:
        write_report(args.report, facts={"replayed on a CPU from steps of": where}, rows=rows)


if __name__ == "__main__":
    main()
