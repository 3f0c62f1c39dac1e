"""ScheMoE's table 7: the step of a model of x layers in the ways of Tutel, FasterMoE and ScheMoE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from imbrex.reproduce import chart
from imbrex.reproduce.frame import Finding, Options, timed_rows
from imbrex.reproduce.layers import Timed, Way, Work, read, settings
from imbrex.reproduce.stage import Network, RanOn, on_ranks
from imbrex.reproduce.table_1 import PAPER as MOVED

PAPER = {
    12: {"tutel": 497, "fastermoe": 506, "schemoe": 454},
    16: {"tutel": 623, "fastermoe": 640, "schemoe": 552},
    20: {"tutel": 769, "fastermoe": 845, "schemoe": 658},
    24: {"tutel": 864, "fastermoe": 1003, "schemoe": 774},
}
"""Milliseconds of a step."""
WAYS = {
    "serial": Way(),
    "megatron": Way(schedule="megatron"),
    "tutel": Way(transport="2dh", schedule="tutel"),
    "fastermoe": Way(schedule="fastermoe"),
    "schemoe": Way(transport="pipe", codec="int8", schedule="optsche-2"),
}
"""Emulations: other systems' orders and exchanges made of our own parts."""
EMULATED = (
    "`serial` is imbrex without overlap, which alone says what moving takes. All other ways are emulations "
    "made of our own parts, dropless: `megatron` without overlap, `tutel` "
    "stage-major over 2DH in 1, 2, 4 or 8 chunks by a measurement, `fastermoe` two chunks by source rank, "
    "`schemoe` its order (Eq. 12) in two chunks over Pipe-A2A with int8 in place of ZFP."
)
LAYERS_FOR = 6
WORK = Work(tokens=1024, width=256, inner=256, experts=4, top_k=1, sequence=32)
NETWORK = Network(nodes=2, ranks_per_node=2, inter="300mbit")
"""The network at whose rate moving takes the paper's share of a step (table 1)."""
ROUNDS = 5


def find(options: Options) -> Finding:
    rounds = options.rounds or (20 if options.full else ROUNDS)
    rows: list[dict[str, Any]] = []
    runs: dict[int, dict[str, Timed]] = {}
    ran_on = RanOn(network=NETWORK)
    for layers in PAPER if options.full else (12, 24):
        work = replace(WORK, layers=layers // LAYERS_FOR)
        measured, ran_on = on_ranks("layers", settings(WAYS, work, rounds=rounds), NETWORK)
        runs[layers] = read(measured)
        rows += timed_rows("model", runs[layers], asdict(work) | ran_on.case, rounds=rounds)
    ratios = {name: [_gain(of, name) for of in runs.values()] for name in ("tutel", "fastermoe", "megatron")}
    return Finding(
        title="ScheMoE, table 7: step time of a model of x layers",
        question="Which system's way is fastest?",
        head=("x, paper / here", "way", "paper, ms", "ScheMoE faster, paper", "here, ms", "faster, here"),
        table=tuple(_line(layers, name, of) for layers, of in runs.items() for name in WAYS),
        differs=(
            f"The network: {ran_on}; the paper has 32 GPUs, 8 nodes, 100 Gb/s.",
            f"{WORK.tokens} tokens a rank of width {WORK.width} in place of 4216 of 512, a sixth of the "
            "layers; forward and backward without an optimizer.",
            EMULATED,
        ),
        verdict=(
            share_of_moving(runs),
            "ScheMoE's way here, times faster than "
            + ", ".join(f"{name} {min(r):.2f} to {max(r):.2f}" for name, r in ratios.items())
            + " (paper: Tutel 1.09 to 1.17, FasterMoE 1.11 to 1.30).",
            "The paper's gains come with ZFP switched on, its rivals' without any codec: what of them is "
            "bytes and what order is table 10's to say.",
        ),
        rows=rows,
        chart=chart.bars(
            {
                f"{layers} layers": {name: 1e3 * times.step for name, times in of.items()}
                for layers, of in runs.items()
            },
            "step, ms",
        ),
    )


def share_of_moving(runs: Mapping[int, Mapping[str, Timed]]) -> str:
    """The communication's share of a serial step, here and in the paper; other shares give other gains."""
    here = [of["serial"].moving / of["serial"].step for of in runs.values()]
    there = [moved / step for layers, (moved, step) in MOVED.items() if layers in runs]
    words = f"Moving takes {min(here):.0%} to {max(here):.0%} of a step without overlap here"
    paper = f"{min(there):.0%} to {max(there):.0%} in the paper's table 1"
    if min(there) - 0.05 <= min(here) and max(here) <= max(there) + 0.05:
        return f"{words}, {paper}: the same share."
    return f"{words}, {paper}: another share, so the gains are of another case than the paper's."


def _gain(of: dict[str, Timed], name: str) -> float:
    return of[name].step / of["schemoe"].step


def _line(layers: int, name: str, of: dict[str, Timed]) -> tuple[str, ...]:
    paper = PAPER[layers].get(name)
    return (
        f"{layers} / {layers // LAYERS_FOR}",
        name,
        f"{paper}" if paper else "not there",
        f"{paper / PAPER[layers]['schemoe']:.2f}x" if paper else "",
        f"{1e3 * of[name].step:.0f}",
        f"{_gain(of, name):.2f}x",
    )
