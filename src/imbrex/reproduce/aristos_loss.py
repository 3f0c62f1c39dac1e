"""Losses of trainings whose choices are dropped as patience drops them: many seeds, and no clock."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from imbrex.reproduce import chart
from imbrex.reproduce.frame import Finding, Options
from imbrex.reproduce.patience import Course, in_parts
from imbrex.reproduce.stage import Network, RanOn

ALONE = Network(nodes=1, ranks_per_node=1, inter="none")
NONE, GOAL = "nothing", "1 of 38 steps"
WAYS = {NONE: 0, GOAL: 38, "1 of 19 steps": 19, "every late step": 1}
"""Numbers of steps of which patience is spent in one, where a rank is late; 0: in none."""
SEEDS = {False: 2, True: 10}
STEPS = {False: 100, True: 1000}
MOST_APART = 0.01
"""The goal: nats from no dropping."""


def find(options: Options) -> Finding:
    course = replace(Course(), steps=options.rounds or STEPS[options.full], seeds=SEEDS[options.full])
    of_each = {name: value for name, value in asdict(course).items() if name != "seeds"}
    what = {"course": of_each, "ways": WAYS}
    requests = [what | {"seed": seed} for seed in range(course.seeds)]
    runs, ran_on = in_parts("aristos-loss", "dropping", requests, ALONE, options.parts)
    decides = course.steps >= 1000 and course.seeds >= 8
    return Finding(
        title="Aristos: what dropped choices cost a training",
        question="What do choices that patience drops cost a training?",
        head=(
            "dropped in",
            "of all choices",
            "nats a byte held out",
            "minus nothing dropped",
            "lower in",
        ),
        table=tuple(_line(runs, name) for name in WAYS),
        differs=(
            f"The demo's model of bytes with one layer of 8 experts: {course.seeds} seeds, {course.steps} "
            f"steps of {course.batch * course.length} bytes, in one process. In the steps named, the choices "
            "of one of 4 ranks at the others, and theirs at it, do not count, as where that rank comes late "
            "to a step and all do without it. Who is late is drawn, 1 of 10 steps, and no clock decides. The "
            "paper has no such figure.",
        ),
        verdict=(_verdict(runs, decides),),
        rows=[_row(run, course, ran_on) for run in runs],
        chart=chart.dots(
            {name: [*apart(runs, name).values()] for name in WAYS if name != NONE},
            "nats a byte minus nothing dropped",
            bands=(-MOST_APART, MOST_APART),
        ),
    )


def apart(runs: Sequence[Mapping[str, Any]], name: str) -> dict[int, float]:
    """Differences by seed: the nats held out minus those of the same training with nothing dropped."""
    whole = {run["seed"]: run["held_out_nats"] for run in runs if run["way"] == NONE}
    return {run["seed"]: run["held_out_nats"] - whole[run["seed"]] for run in runs if run["way"] == name}


def error(values: Sequence[float]) -> float:
    """The standard error of their mean; infinite of one."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def _share(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    mine = [run for run in runs if run["way"] == name]
    return sum(run["dropped"] for run in mine) / sum(run["choices"] for run in mine)


def _line(runs: Sequence[Mapping[str, Any]], name: str) -> tuple[str, ...]:
    values = [*apart(runs, name).values()]
    mean = statistics.fmean(run["held_out_nats"] for run in runs if run["way"] == name)
    cells = ("", "")
    if name != NONE:
        cells = (
            f"{statistics.fmean(values):+.4f} ± {error(values):.4f}",
            f"{sum(value < 0 for value in values)} of {len(values)}",
        )
    return name, f"{_share(runs, name):.2%}", f"{mean:.4f}", *cells


def _verdict(runs: Sequence[Mapping[str, Any]], decides: bool) -> str:
    values = [*apart(runs, GOAL).values()]
    mean, twice = statistics.fmean(values), 2 * error(values)
    met = "reached" if abs(mean) <= MOST_APART else "missed"
    sure = "too" if abs(mean) + twice <= MOST_APART else "not"
    return (
        f"Goal, a loss within {MOST_APART} nats of no dropping after 1000 steps at under 1 % dropped: "
        f"{met if decides else 'not decided by so few steps and seeds'}, {mean:+.4f} nats in the mean over "
        f"seeds, with twice its standard error of {twice / 2:.4f} {sure}, {_share(runs, GOAL):.2%} dropped. "
        f"A single seed parts by up to {max(map(abs, values)):.4f} either way."
    )


def _row(run: Mapping[str, Any], course: Course, ran_on: RanOn) -> dict[str, Any]:
    case = ran_on.case | asdict(course) | {"seed": run["seed"], "spent_in_one_of": WAYS[run["way"]]}
    share = {"dropped_share": run["dropped"] / run["choices"]}
    return {"op": "train-dropped", "impl": run["way"], "case": case, "n": run["steps"]} | {
        "held_out_nats": run["held_out_nats"],
        **share,
    }


__all__ = ["apart", "error", "find"]
