"""Comet's figures 12, 13 and 14: one layer over ways to divide the GPUs here, over experts and over skew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from imbrex.bench.exchange.clock import run_ranks
from imbrex.bench.layer.race import PAUSE_CYCLES, time_in_turns
from imbrex.bench.shapes import MODELS, Shape
from imbrex.bench.skew import make_routing
from imbrex.contracts import Routing
from imbrex.exchange.exchange import Exchange
from imbrex.experts.experts import Shard
from imbrex.overlap import Fused, Serial
from imbrex.placement import contiguous
from imbrex.reproduce import chart
from imbrex.reproduce.comet_figure_8 import draw_experts
from imbrex.reproduce.frame import RESULTS, Finding, Options, count_gpus, or_committed, spread_of

MIXTRAL = MODELS["mixtral"]
WAYS = NCCL, SERIAL, FUSED = "over NCCL", "serial", "fused"
DEVIATIONS = ("uniform", "std:0.01", "std:0.02", "std:0.032", "std:0.04", "std:0.05")
OURS = (
    "Ours: {source}; forwards with Mixtral's widths, all ways in turns. Over NCCL is our own all-to-all with "
    "torch's grouped products, which stands for the paper's rivals; none of their code runs. Serial and "
    "fused are our kernels over NVLink."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One bar group of a figure. tokens: of all ranks; tensor: ranks that share an expert."""

    name: str
    tokens: int
    shape: Shape = MIXTRAL
    tensor: int = 1
    skew: str = "uniform"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure's question and text (paper, and gain where it has one), what it lacks here, and its cases on
    so many GPUs."""

    number: int
    about: str
    question: str
    paper: str
    gain: str
    blank: str
    cases: Callable[[int], Sequence[Case]]


def parallelism(options: Options) -> Finding:
    """Figure 12."""

    def cases(world: int) -> list[Case]:
        ways = [tensor for tensor in (1, 2, 4, 8) if world % tensor == 0]
        return [Case(name=f"EP {world // tp} x TP {tp}", tokens=8192, tensor=tp) for tp in ways]

    figure = Figure(
        number=12,
        about="ways to divide the ranks",
        question="Does a layer take longer the more ranks share an expert?",
        paper="the rivals take longer with more TP and Comet does not; its text has no number",
        gain="",
        blank="The paper divides 8 GPUs; EP x TP of 8 is blank on fewer.",
        cases=cases,
    )
    return find(options, figure)


def structures(options: Options) -> Finding:
    """Figure 13."""
    sizes = ((8, 2), (8, 4), (16, 2), (16, 4), (32, 4))
    shapes = [replace(MIXTRAL, num_experts=experts, top_k=top_k) for experts, top_k in sizes]
    cases = [Case(name=f"E {s.num_experts}, top-{s.top_k}", tokens=16384, shape=s) for s in shapes]
    figure = Figure(
        number=13,
        about="experts and choices",
        question="How long does a layer of other numbers of experts and choices take?",
        paper="Comet is 1.16 to 1.83 times as fast as its rivals",
        gain="1.16 to 1.83",
        blank="The paper has EP 8, which is blank on fewer GPUs.",
        cases=lambda world: cases,
    )
    return find(options, figure)


def skewed(options: Options) -> Finding:
    """Figure 14, left."""
    figure = Figure(
        number=14,
        about="skew",
        question="What does an uneven load cost, and does what is hidden stay?",
        paper="its text has no number for the left; on L20s Comet is 1.19 to 1.46 times as fast",
        gain="1.19 to 1.46 (L20)",
        blank="The right half, on L20s with 25 GB/s between them, is blank: no such machine. So is EP 8 on "
        "fewer GPUs.",
        cases=lambda world: [Case(name=skew, tokens=8192, skew=skew) for skew in DEVIATIONS],
    )
    return find(options, figure)


def find(options: Options, figure: Figure) -> Finding:
    """Measure a figure of layers or, where there are no two GPUs, take what is committed of it."""
    name = f"comet-figure-{figure.number}"
    world = count_gpus()
    rows = measure(figure.cases(world), world, options.rounds or 20) if world else []
    results, where = or_committed(rows, f"{world} Hopper GPUs of this machine", RESULTS / f"{name}.json")
    world = world or max((row["case"]["W"] for row in results), default=0)
    times = times_of(figure.cases(world or 8), world, results)
    gains = [of[NCCL] / of[FUSED] for of in times.values() if of]
    span = f"Fused is {min(gains, default=0):.2f} to {max(gains, default=0):.2f} times as fast as over NCCL."
    blank = "Nothing of it was measured; comet-figures-10-14 simulates it."
    return Finding(
        title=f"Comet, figure {figure.number}: one layer over {figure.about}",
        question=figure.question,
        head=("case", "M", *(f"{way}, ms" for way in WAYS), f"{NCCL} / {FUSED}", f"{SERIAL} / {FUSED}"),
        table=(
            ("Comet, 8 H800", "", "", "", "", figure.gain, ""),
            *(_line(case, of) for case, of in times.items()),
        ),
        differs=(OURS.format(source=where), figure.blank),
        verdict=(f"The paper: {figure.paper}.", span if gains else blank),
        rows=rows,
        chart=chart.bars(
            {case.name: {way: us / 1e3 for way, us in of.items()} for case, of in times.items()}, "ms"
        ),
    )


def times_of(
    cases: Sequence[Case], world: int, rows: Sequence[Mapping[str, Any]]
) -> dict[Case, dict[str, float]]:
    """Median microseconds by way, of every case; none of one that no row is of."""
    return {
        case: {row["impl"]: row["median_us"] for row in rows if row["case"] == describe(case, world)}
        for case in cases
    }


def _line(case: Case, of: Mapping[str, float]) -> tuple[str, ...]:
    if not of:
        return case.name, str(case.tokens), "", "", "", "", ""
    times = (f"{of[way] / 1e3:.2f}" for way in WAYS)
    over = (f"{of[way] / of[FUSED]:.2f}" for way in (NCCL, SERIAL))
    return case.name, str(case.tokens), *times, *over


def describe(case: Case, world: int) -> dict[str, Any]:
    """The case of a row of the result file."""
    shape = case.shape
    layer = {"D": shape.hidden_size, "F": shape.intermediate_size, "E": shape.num_experts, "K": shape.top_k}
    return {**layer, "M": case.tokens, "W": world, "TP": case.tensor, "skew": case.skew}


def measure(cases: Sequence[Case], world: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of a forward of every case, by way."""
    return run_ranks(_measure, world, cases, rounds)


def _measure(rank: int, world: int, cases: Sequence[Case], rounds: int) -> list[dict[str, Any]]:
    return [
        {"op": "forward", "impl": way, "case": describe(case, world), **spread_of(times)}
        for case in cases
        for way, times in _time(rank, world, case, rounds).items()
    ]


def _time(rank: int, world: int, case: Case, rounds: int) -> dict[str, list[float]]:
    shape, tensor = case.shape, case.tensor
    placement = contiguous(shape.num_experts, world // tensor)
    shard = Shard(rank=rank % tensor, size=tensor)
    nvlink, nccl = (
        Exchange(
            *(placement, shape.hidden_size, shape.top_k),
            group=dist.group.WORLD,
            transport=transport,
            tensor_parallel=tensor,
        )
        for transport in ("nvlink", "alltoall")
    )
    slots = placement.local(rank // tensor)
    ours, torchs = (draw_experts(shape, slots, shard, by) for by in ("kernels", "grouped"))
    drawn = make_routing(case.skew, shape, case.tokens // world, rank=rank)
    routing = Routing(ids_TK=drawn.ids_TK.cuda(), weights_TK=drawn.weights_TK.cuda())
    x_TD = torch.randn(case.tokens // world, shape.hidden_size, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        calls = {
            NCCL: partial(Serial().run, x_TD, routing, nccl, torchs, None),
            SERIAL: partial(Serial().run, x_TD, routing, nvlink, ours, None),
            FUSED: partial(Fused().run, x_TD, routing, nvlink, ours, None),
        }
        times = time_in_turns(calls, PAUSE_CYCLES["forward"], repeats=rounds)
    torch.cuda.synchronize()
    nvlink.transport.close()  # type: ignore[attr-defined]
    nvlink.close()
    del calls, ours, torchs
    torch.cuda.empty_cache()
    return times


__all__ = ["measure", "parallelism", "skewed", "structures"]
