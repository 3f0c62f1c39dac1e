"""ScheMoE's table 1: the share of the all-to-all in a step, by number of layers."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from imbrex.reproduce import chart
from imbrex.reproduce.frame import Finding, Options, timed_rows
from imbrex.reproduce.layers import Timed, Way, Work, read, settings
from imbrex.reproduce.stage import Network, RanOn, on_ranks

PAPER = {12: (252.6, 497.1), 16: (324.8, 623.0), 20: (419.3, 768.9), 24: (507.4, 863.6)}
"""Milliseconds of all-to-all and of a step, by layers."""
LAYERS_FOR = 4
"""Layers of the paper for one here."""
WORK = Work(tokens=1024, width=256, inner=256, experts=4, top_k=1, sequence=32)
NETWORK = Network(nodes=2, ranks_per_node=2, inter="300mbit")
ROUNDS = 7


def find(options: Options) -> Finding:
    rounds = options.rounds or (20 if options.full else ROUNDS)
    rows: list[dict[str, Any]] = []
    times_of: dict[int, Timed] = {}
    ran_on = RanOn(network=NETWORK)
    for layers in PAPER:
        work = replace(WORK, layers=layers // LAYERS_FOR)
        measured, ran_on = on_ranks("layers", settings({"serial": Way()}, work, rounds=rounds), NETWORK)
        timed = read(measured)
        times_of[layers] = timed["serial"]
        rows += timed_rows("share", timed, asdict(work) | ran_on.case, rounds=rounds)
    return Finding(
        title="ScheMoE, table 1: the share of the all-to-all in a step",
        question="What share of a step is the all-to-all?",
        head=("layers, paper / here", "paper, ms", "paper", "here, ms", "here"),
        table=tuple(_line(layers, times) for layers, times in times_of.items()),
        differs=(
            f"The network: {ran_on}; the paper has 32 GPUs, 8 nodes, 100 Gb/s.",
            f"{WORK.tokens} tokens a rank of width {WORK.width} in place of 4216 of 512, a quarter of the "
            "layers; forward and backward without an optimizer. Moving counts planning and copies to the "
            "experts' rows, and waiting for slower ranks.",
            "The share is a choice of network and sizes: at twice the rate the moving halves.",
        ),
        verdict=(_growth(), _spread(times_of)),
        rows=rows,
        chart=chart.bars(
            {
                f"{layers}": {"paper": 100 * moved / step, "here": 100 * _share(times_of[layers])}
                for layers, (moved, step) in PAPER.items()
            },
            "share of the all-to-all, %",
        ),
    )


def _share(one: Timed) -> float:
    return one.moving / one.step


def _line(layers: int, one: Timed) -> tuple[str, ...]:
    moved, step = PAPER[layers]
    return (
        f"{layers} / {layers // LAYERS_FOR}",
        f"{moved} of {step}",
        f"{moved / step:.1%}",
        f"{1e3 * one.moving:.0f} of {1e3 * one.step:.0f}",
        f"{_share(one):.1%}",
    )


def _growth() -> str:
    """The cost of a layer by the paper's own figures."""
    moved = ", ".join(f"{a / layers:.1f}" for layers, (a, _) in PAPER.items())
    rest = ", ".join(f"{(step - a) / layers:.1f}" for layers, (a, step) in PAPER.items())
    return (
        f"In the paper a layer moves for {moved} ms and does all else in {rest} ms, for 12 to 24 layers: the "
        "layers are alike, so the share can grow only because something outside of them is paid once a step; "
        "from 20 to 24 layers all else grows by 1.7 ms a layer, after 12.9 before, which layers alike cannot."
    )


def _spread(timed: dict[int, Timed]) -> str:
    shares = [_share(times) for times in timed.values()]
    return f"Here the share is {min(shares):.0%} to {max(shares):.0%}: layers alike, nothing outside of them."
