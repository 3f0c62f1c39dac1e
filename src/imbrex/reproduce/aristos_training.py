"""Aristos' patience in a training: loss against wall time, tau and epsilon swept."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from imbrex.reproduce import chart
from imbrex.reproduce.frame import Finding, Options
from imbrex.reproduce.patience import Course, in_parts, settings
from imbrex.reproduce.stage import RanOn
from imbrex.reproduce.stragglers import NETWORK, Way

PATIENT: dict[str, Any] = {"schedule": "events", "late": "before"}
ENDLESS, RARELY, ALWAYS = "endless patience", "tau 0.25 steps, 1 of 38 calls", "tau 0.25 steps"
WAYS = {
    ENDLESS: Way(schedule="events", late="before"),
    RARELY: Way(**PATIENT, tau=0.25, epsilon=1, every=38),
    ALWAYS: Way(**PATIENT, tau=0.25, epsilon=1),
    "tau 2 steps, epsilon 2": Way(**PATIENT, tau=2.0, epsilon=2),
    "serial": Way(schedule="serial", late="before"),
}
ONCE = (ALWAYS, "tau 2 steps, epsilon 2", "serial")
"""Ways of one seed: of serial, whose bits are those of endless patience, the wall time is asked for alone."""
MOST_DROPPED, MOST_APART = 0.01, 0.01
"""Goals: the choices dropped, and nats from no dropping, in the mean over seeds."""
LIMIT_S = {False: 100.0, True: 600.0}
"""Seconds after which a seed's trainings are broken off, all at the same step."""
BRIEFLY = Course(steps=100, seeds=1, held_out=16)


def find(options: Options) -> Finding:
    course = Course() if options.full else BRIEFLY
    course = replace(course, steps=options.rounds) if options.rounds else course
    runs, ran_on = train_all(course, LIMIT_S[options.full], options.parts)
    steps = min(run["steps"] for run in runs)
    budget_s = min(run["seconds"] for run in runs)
    enough = "" if steps == course.steps else f" (of {course.steps}: the time was up)"
    return Finding(
        title="Aristos: training with patience while one rank is late",
        question="What does patience cost a training, and does it save time?",
        head=(
            "way",
            "dropped",
            "nats a byte held out",
            "minus endless, seed by seed",
            "wall, s",
            f"nats learning after {budget_s:.0f} s",
            "step, ms",
        ),
        table=tuple(_line(runs, name, budget_s) for name in WAYS),
        differs=(
            f"The demo's model of bytes with one layer of 8 experts on 4 gloo ranks: {ran_on}; "
            f"{course.seeds} seed(s), {steps} steps{enough} of {course.batch * course.length} bytes; those "
            "of a seed take turns. Rank 3 is late by 5 median steps in one of every ten, drawn. The loss "
            "held out is taken serially. The paper has no such figure.",
        ),
        verdict=_verdict(runs, steps == 1000 and course.seeds > 1),
        rows=[_row(run, course, ran_on) for run in runs],
        chart=chart.lines(
            {name: curve(runs, name) for name in WAYS},
            "wall time, s",
            "nats a byte, learning",
            logarithmic=False,
        ),
    )


def train_all(course: Course, limit_s: float, folder: str | None) -> tuple[list[dict[str, Any]], RanOn]:
    """The records of all trainings, a seed after the other: minutes each."""
    requests = []
    for seed in range(course.seeds):
        ways = {name: way for name, way in WAYS.items() if seed == 0 or name not in ONCE}
        requests.append(settings(ways, course, limit_s=limit_s, seeds=(seed,)))
    return in_parts("aristos-training", "patience", requests, NETWORK, folder)


def of_way(runs: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [run for run in runs if run["way"] == name]


def dropped(runs: Sequence[dict[str, Any]], name: str) -> float:
    mine = of_way(runs, name)
    return sum(run["dropped"] for run in mine) / sum(run["choices"] for run in mine)


def apart(runs: Sequence[dict[str, Any]], name: str) -> dict[int, float]:
    """The nats held out minus those of patience without an end, which drops nothing."""
    endless = {run["seed"]: run["held_out_nats"] for run in of_way(runs, ENDLESS)}
    return {run["seed"]: run["held_out_nats"] - endless[run["seed"]] for run in of_way(runs, name)}


def curve(runs: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Wall seconds and training nats a byte, means over seeds, from point to point."""
    points = zip(*(run["curve"] for run in of_way(runs, name)), strict=True)
    return [
        (statistics.fmean(wall for _, wall, _ in point), statistics.fmean(nats for *_, nats in point))
        for point in points
    ]


def _line(runs: Sequence[dict[str, Any]], name: str, budget_s: float) -> tuple[str, ...]:
    mine = of_way(runs, name)
    in_time = [nats for wall_s, nats in curve(runs, name) if wall_s <= budget_s]
    differences = ", ".join(f"{value:+.4f}" for value in apart(runs, name).values())
    return (
        name,
        f"{dropped(runs, name):.2%}",
        f"{statistics.fmean(run['held_out_nats'] for run in mine):.4f}",
        "" if name == ENDLESS else differences,
        f"{statistics.fmean(run['seconds'] for run in mine):.1f}",
        f"{in_time[-1]:.4f}" if in_time else "",
        f"{1e3 * statistics.fmean(run['median_s'] for run in mine):.1f}",
    )


def _verdict(runs: Sequence[dict[str, Any]], decides: bool) -> tuple[str, ...]:
    share, mean = dropped(runs, RARELY), statistics.fmean(apart(runs, RARELY).values())
    met = share < MOST_DROPPED and abs(mean) <= MOST_APART
    endless, always, serial = (of_way(runs, name)[0]["seconds"] for name in (ENDLESS, ALWAYS, "serial"))
    return (
        f"Goal, under {MOST_DROPPED:.0%} dropped and a loss within {MOST_APART} nats of no dropping after "
        f"1000 steps: {('reached' if met else 'missed') if decides else 'not decided by so few steps'}, "
        f"{share:.2%} and {mean:+.4f} nats in the mean over seeds with 1 of 38 calls given up.",
        f"Patience in every call takes {always / endless:.2f} times the wall time of endless patience, which "
        f"takes {endless / serial:.2f} times that of serial. The gradients meet all ranks once a step, the "
        "late one too, so what the layer gives up is waited there.",
    )


def _row(run: dict[str, Any], course: Course, ran_on: RanOn) -> dict[str, Any]:
    way = {name: value for name, value in asdict(WAYS[run["way"]]).items() if value != math.inf}
    case = ran_on.case | asdict(course) | way | {"seed": run["seed"], "steps": run["steps"]}
    columns = {name: run[name] for name in ("held_out_nats", "curve", "seconds")}
    shares = {"dropped_share": run["dropped"] / run["choices"], "median_us": 1e6 * run["median_s"]}
    return {"op": "train-late", "impl": run["way"], "case": case, **columns, **shares, "n": run["steps"]}
