"""Aristos' figure 2: how one straggler stretches the steps of all, and what patience makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from imbrex.reproduce import chart
from imbrex.reproduce.frame import Finding, Options
from imbrex.reproduce.stage import RanOn
from imbrex.reproduce.stragglers import Load, Way, measure, punctual, quantile, row

SHARES = (0.5, 0.75, 0.95, 0.99)
TAU, EVERY = 0.25, 19
"""Patience in median steps; and of so many calls one is given up: a little over half of those with a late
rank, what a p95 like that of nobody late wants."""
BUDGET = 0.00995
"""A share of all choices a little under the goal's: of 1900 calls 101 may be given up whole, and 96 must be,
for that p95."""
LATE: dict[str, Any] = {"schedule": "events", "tau": TAU, "epsilon": 1}
WAYS = {
    "serial, nobody late": Way(schedule="serial"),
    "events, nobody late": Way(schedule="events"),
    "serial, Zipf 1.2": Way(schedule="serial", skew="zipf:1.2"),
    "events, Zipf 1.2": Way(schedule="events", skew="zipf:1.2"),
    "serial, rank 3 late": Way(schedule="serial", late="before"),
    "tau 0.25 steps, rank 3 late": Way(**LATE, late="before"),
    "tau 0.25 steps, rank 3 late, 1 of 19": Way(**LATE, late="before", every=EVERY),
    "forward: serial, nobody late": Way(schedule="serial", backward=False),
    "forward: events, nobody late": Way(schedule="events", backward=False),
    "forward: serial, experts late": Way(schedule="serial", late="experts", backward=False),
    "forward: tau 0.25 steps, experts late": Way(**LATE, late="experts", backward=False),
    "forward: tau 0.25 steps, 1 of 19 calls": Way(**LATE, late="experts", backward=False, every=EVERY),
    "forward: tau 1.75 usual calls, 1 of 19": Way(
        schedule="events", tau="1.75 p50", epsilon=1, every=EVERY, late="experts", backward=False
    ),
}
LONGER, LONGER_STEPS = Load(tokens=2048), {False: 100, True: 1900}
"""Forwards of some 50 ms, which two cores disturb less than those of 14, and so many that what `EVERY`
and `BUDGET` let through is told from 1 %."""
EVEN: dict[str, Any] = {"skew": "even", "backward": False}
"""Every expert has exactly as many choices: drawn ones would add to what is dropped, or take from it."""
LONGER_WAYS = {
    "longer forward: events, nobody late": Way(schedule="events", **EVEN),
    "longer forward: tau 0.25 steps, 1 of 19": Way(**LATE, late="experts", every=EVERY, **EVEN),
    "longer forward: tau 0.3 steps, budget": Way(
        schedule="events", tau=0.3, epsilon=1, budget=BUDGET, late="experts", **EVEN
    ),
    "longer forward: tau 1.25 p85, budget": Way(
        schedule="events", tau="1.25 p85", epsilon=1, budget=BUDGET, late="experts", **EVEN
    ),
}
GOALS = {
    "longer forward": (
        "longer forward: tau 0.25 steps, 1 of 19",
        "longer forward: tau 0.3 steps, budget",
        "longer forward: tau 1.25 p85, budget",
    ),
    "forward": ("forward: tau 0.25 steps, 1 of 19 calls", "forward: tau 1.75 usual calls, 1 of 19"),
    "forward and backward": ("tau 0.25 steps, rank 3 late, 1 of 19",),
}
MOST_OVER, MOST_DROPPED, MOST_SLOWER = 1.3, 0.01, 1.03
"""Goals: the p95 over that of nobody late, the choices dropped, and events over serial with nobody late."""


def find(options: Options) -> Finding:
    measured, ran_on, steps = measure(options, WAYS)
    longer, _, more = measure(options, LONGER_WAYS, LONGER, LONGER_STEPS[options.full])
    rows = [row(name, one_way, ran_on, steps) for name, one_way in measured.items()]
    rows += [row(name, one_way, ran_on, more, LONGER) for name, one_way in longer.items()]
    measured |= longer
    at = {
        name: {f"p{100 * share:g}": 1e3 * quantile(punctual(one_way), share) for share in SHARES}
        for name, one_way in measured.items()
    }
    over = {name: of_way["p95"] / at[_calm(name)]["p95"] for name, of_way in at.items()}
    dropped = {name: one_way["dropped"] / one_way["choices"] for name, one_way in measured.items()}
    return Finding(
        title="Aristos, figure 2: stragglers",
        question="How does one rank that is late now and then stretch the steps of the others?",
        head=(
            "way",
            *(f"{name}, ms" for name in at["serial, nobody late"]),
            "p95 over nobody late",
            "dropped",
        ),
        table=tuple(
            (name, *(f"{ms:.1f}" for ms in of_way.values()), f"{over[name]:.2f}x", f"{dropped[name]:.2%}")
            for name, of_way in at.items()
        ),
        differs=_differs(ran_on, steps, more),
        verdict=(
            *_goals(measured, over, dropped),
            "A missing rank of four has a fourth of the others' choices, 18.75 % of all; as many of its own "
            "are lost where its packets come late too, and where there is a backward, which waits for the "
            "gradients of every packet that was computed. For a p95 like that of nobody late in every "
            "twentieth step, that is 0.94 or 1.9 % of all choices.",
        ),
        rows=[each | {"p95_over": over[each["impl"]]} for each in rows],
        chart=chart.bars(at, "step, ms"),
    )


def _differs(ran_on: RanOn, steps: int, more: int) -> tuple[str, ...]:
    return (
        f"{steps} forwards and backwards, or forwards alone, of one layer on 4 gloo ranks: {ran_on}. "
        "Rank 3 is late by 5 median steps in one of every ten, drawn; times are of the slowest other "
        "rank, all begin together, and the ways take turns in every step. A p95 is over that of the same "
        "schedule with nobody late.",
        f"Longer forwards are of {LONGER.tokens} tokens a rank where others have {Load().tokens}, {more} "
        "of each way, and every expert has exactly as many choices.",
        "The paper profiles 21,000 kernels of NCCL on 32 GPUs; one machine shows no tail of 100 times.",
    )


def _calm(name: str) -> str:
    """The name of this way with nobody late."""
    ways = LONGER_WAYS if name in LONGER_WAYS else WAYS
    skew = ways[name].skew if name in LONGER_WAYS else "uniform"
    calm = Way(schedule=ways[name].schedule, backward=ways[name].backward, skew=skew)
    return next(other for other, way in ways.items() if way == calm)


def _goals(
    measured: Mapping[str, Any], over: Mapping[str, float], dropped: Mapping[str, float]
) -> tuple[str, ...]:
    def met(holds: bool) -> str:
        return "reached" if holds else "missed"

    calm, skewed = (ratio(measured, load) for load in ("nobody late", "Zipf 1.2"))
    sentences = [
        f"One rank late in 10 % of the steps makes the others' p95 {over['serial, rank 3 late']:.2f} times "
        f"as long; with tau at a quarter of a step {over['tau 0.25 steps, rank 3 late']:.2f} times, and "
        f"{dropped['tau 0.25 steps, rank 3 late']:.2%} of the choices are dropped."
    ]
    for what, names in GOALS.items():
        name = min(names, key=lambda name: (dropped[name] >= MOST_DROPPED, over[name]))
        reached = over[name] <= MOST_OVER and dropped[name] < MOST_DROPPED
        sentences.append(
            f"Goal, a p95 of at most {MOST_OVER} times and under {MOST_DROPPED:.0%} dropped, {what}: "
            f"{met(reached)}, {over[name]:.2f} times and {dropped[name]:.2%}: {name}."
        )
    return (
        *sentences,
        f"Goal, events no more than 3 % slower than serial with nobody late: {met(calm <= MOST_SLOWER)}, "
        f"{calm:.3f} times its time in the median of paired steps. Goal, faster with choices by Zipf 1.2: "
        f"{met(skewed < 1)}, {skewed:.3f} times.",
    )


def ratio(measured: Mapping[str, Any], load: str) -> float:
    """How many times the time of `serial` that of `events` is: the median over steps, which both took one
    right after the other."""
    ours, theirs = (
        [max(of_ranks) for of_ranks in measured[f"{schedule}, {load}"]["seconds"]]
        for schedule in ("events", "serial")
    )
    return quantile([a / b for a, b in zip(ours, theirs, strict=True)], 0.5)
