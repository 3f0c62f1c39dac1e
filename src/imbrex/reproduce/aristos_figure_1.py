"""Aristos' figure 1: what a step is spent on, with a straggler and without."""

from __future__ import annotations

from imbrex.reproduce import chart
from imbrex.reproduce.frame import Finding, Options
from imbrex.reproduce.stragglers import Way, communicating, measure, row, shares

WAYS = {
    "serial, nobody late": Way(schedule="serial"),
    "events, nobody late": Way(schedule="events"),
    "serial, rank 3 late": Way(schedule="serial", late="before"),
    "events, rank 3 late": Way(schedule="events", late="before"),
    "tau 0.25 steps, rank 3 late": Way(schedule="events", tau=0.25, epsilon=1, late="before"),
}


def find(options: Options) -> Finding:
    measured, ran_on, steps = measure(options, WAYS)
    by_way = {name: shares(one_way) for name, one_way in measured.items()}
    calm, late = (communicating(by_way[f"serial, {who} late"]) for who in ("nobody", "rank 3"))
    return Finding(
        title="Aristos, figure 1: what a step is spent on",
        question="Which share of a step is the all-to-all's?",
        head=("way", *by_way["serial, nobody late"], "communicating"),
        table=tuple(
            (name, *(f"{value:.0%}" for value in phases.values()), f"{communicating(phases):.0%}")
            for name, phases in by_way.items()
        ),
        differs=(
            f"One layer, forward and backward, {steps} steps on 4 gloo ranks: {ran_on}; shares of rank 0's "
            "time. The paper shows kernels of a training on a supercomputer, without figures.",
            "Rank 3 is late by 5 median steps in 10 % of the steps.",
        ),
        verdict=(
            f"Communicating takes {calm:.0%} of a step with nobody late, {late:.0%} where rank 3 is late now "
            "and then: what a profile shows as the all-to-all is the wait for who is not there.",
        ),
        rows=[row(name, one_way, ran_on, steps) for name, one_way in measured.items()],
        chart=chart.bars(by_way, "share of the step"),
    )
