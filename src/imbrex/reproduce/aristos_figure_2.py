"""Aristos' figure 2: how one straggler stretches the steps of all, and what patience makes of it."""

from __future__ import annotations

from imbrex.reproduce import chart
from imbrex.reproduce.frame import Asked, Finding
from imbrex.reproduce.stragglers import Way, measure, punctual, quantile, row

SHARES = (0.5, 0.75, 0.95, 0.99)
WAYS = {
    "serial, nobody late": Way(schedule="serial"),
    "events, nobody late": Way(schedule="events"),
    "serial, rank 3 late": Way(schedule="serial", late="before"),
    "events, rank 3 late": Way(schedule="events", late="before"),
    "tau 0.25 steps, rank 3 late": Way(schedule="events", tau=0.25, epsilon=1, late="before"),
    "tau p93, rank 3 late": Way(schedule="events", tau="p93", epsilon=1, late="before"),
    "serial, its experts late": Way(schedule="serial", late="experts"),
    "tau 0.25 steps, its experts late": Way(schedule="events", tau=0.25, epsilon=1, late="experts"),
    "tau p93, its experts late": Way(schedule="events", tau="p93", epsilon=1, late="experts"),
}


def find(asked: Asked) -> Finding:
    measured, ran_on, steps = measure(asked, WAYS)
    at = {
        name: {f"p{100 * share:g}": 1e3 * quantile(punctual(one_way), share) for share in SHARES}
        for name, one_way in measured.items()
    }
    calm = at["serial, nobody late"]
    over = {name: of_way["p95"] / calm["p95"] for name, of_way in at.items()}
    dropped = {name: one_way["dropped"] / one_way["choices"] for name, one_way in measured.items()}
    return Finding(
        title="Aristos, figure 2: stragglers",
        question="How does one rank that is late now and then stretch the steps of the others?",
        head=("way", *(f"{name}, ms" for name in calm), "p95 over nobody late", "dropped"),
        table=tuple(
            (name, *(f"{ms:.1f}" for ms in of_way.values()), f"{over[name]:.2f}x", f"{dropped[name]:.2%}")
            for name, of_way in at.items()
        ),
        differs=(
            f"{steps} forwards and backwards of one layer on 4 gloo ranks: {ran_on}. Rank 3 is late by 5 "
            "median steps in 10 % of them; times are of the slowest other rank, and all begin together.",
            "The paper profiles 21,000 kernels of NCCL on 32 GPUs; one machine shows no tail of 100 times.",
        ),
        verdict=(
            f"One rank late in 10 % of the steps makes the others' p95 {over['serial, rank 3 late']:.2f} "
            "times as long; with tau at a quarter of a step "
            f"{over['tau 0.25 steps, rank 3 late']:.2f} times, "
            f"and {dropped['tau 0.25 steps, rank 3 late']:.2%} of the choices are dropped.",
            "A missing rank of four has a fourth of the others' choices, 18.75 % of all, and as many of its "
            "own are lost if its packets come late too. Dropped in every tenth step that is 1.9 or 3.75 % of "
            "all choices. A p95 like that of nobody late wants it in half of those steps: 0.94 or 1.9 %.",
        ),
        rows=[row(name, one_way, ran_on, steps) for name, one_way in measured.items()],
        chart=chart.bars(at, "step, ms"),
    )
