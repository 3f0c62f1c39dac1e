"""Which tiles are the fastest, and what does it cost to tell of them? `make gpu-bench NAME=tiles`.

Products of one rank's experts on one Hopper GPU, in turns behind a pause, all ways with the same bits:

- gate and up with SwiGLU, and the gradient of rows through them, in bf16, of one rank of four: in single
  blocks, in pairs and in tiles of 192 rows (kernels/gemm/tall.cuh), by mean rows of an expert;
- both products of rows in fp8, of one rank of two, in single blocks and in pairs: gate and up tell of their
  tiles (kernels/gemm/parts.cuh) and nobody listens ("told"), or down begins in their last wave ("followed").
  Single blocks tell as they are shipped, and pairs do not: gate and up are edited here for either.

`taken`: what the host takes, `taken_else`: what it takes where it has no tall tiles. A table comes last, in
microseconds, with the former marked.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack
from unittest import mock

import torch
from torch import Tensor

from imbrex.bench.experts.timing import summary, time_in_turns
from imbrex.bench.experts.work import choices_received, draw, experts_of
from imbrex.bench.results import check_results, describe_run, write_results
from imbrex.bench.shapes import MODELS, Shape
from imbrex.exchange.plan import count_choices
from imbrex.kernels import jit
from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.ffn.fp8 import BLOCK, Fp8Experts, quantise_experts, quantise_weight
from imbrex.kernels.ffn.glue import COUNTERS, Groups
from imbrex.kernels.gemm.gemm import (
    ALONE,
    SOURCE,
    Beside,
    Epilogue,
    Extras,
    Layout,
    Scales,
    Tiling,
    begins_behind,
    launch_gemm,
)
from imbrex.kernels.gemm.tiling import PAIRED, PAIRED_STAGED, SHARED, STAGED, TALL, Reading, choose_tiling

RESULTS = Path(__file__).parent / "results" / "tiles.json"
QUESTION = "Which tiles are the fastest for the experts' products, and what does it cost to tell of them?"
DEVICE, FORWARD, REPEATS = "cuda", Layout.FORWARD, 20
TALL_SHAPES = {
    "deepseek-v3": MODELS["deepseek-v3"],
    "glm-4.5": Shape(hidden_size=5120, intermediate_size=1536, num_experts=160, top_k=8),
    "qwen3-30b-a3b": MODELS["qwen3-30b-a3b"],
}
MEANS, DRAWS, RANKS, FP8_RANKS = (112, 128, 144, 160, 170, 192, 200, 256), ("balanced", "uniform"), 4, 2
TILES = {"single blocks": SHARED, "pairs": PAIRED, "tall": TALL}
PRODUCTS = {"gate_up": (FORWARD, Epilogue.SWIGLU), "rows_gradient": (Layout.DGRAD, Epilogue.PLAIN)}
FP8_ROWS = {
    "qwen2-moe": (2048, 4096),
    "qwen3-30b-a3b": (4096, 8192),
    "phi3.5-moe": (4096, 16384),
    "deepseek-v3": (8192, 16384),
    "mixtral": (4096, 16384),
}
"""Rows of a rank, by model. Mixtral's take pairs, and the more of Phi-3.5's and of DeepSeek-V3's."""
TELLS = "!(C::kFp8 && C::kCluster > 1)"
"""In gemm/gemm.cu, which kernels of gate and up tell."""
Row = dict[str, Any]


class Way(NamedTuple):
    """Both products in fp8: in pairs or not; whether gate and up tell, and down begins in their last wave."""

    pairs: bool
    tells: bool = False
    follows: bool = False

    @property
    def first(self) -> Beside:
        """The kernel of gate and up."""
        return ALONE._replace(file=(*ALONE.file, ("TELLS", int(self.tells))), key=(-3, int(self.tells)))


WAYS = {
    "single blocks": Way(pairs=False),
    "single blocks, told": Way(pairs=False, tells=True),
    "single blocks, followed": Way(pairs=False, tells=True, follows=True),
    "pairs": Way(pairs=True),
    "pairs, told": Way(pairs=True, tells=True),
}
FP8_TILES = {False: (SHARED, STAGED), True: (PAIRED, PAIRED_STAGED)}


def edited(sources_of: Callable[[jit.Variant], dict[str, str]], variant: jit.Variant) -> dict[str, str]:
    """The sources of a kernel, of which gate and up tell where `TELLS` is defined as 1."""
    sources = sources_of(variant)
    if "TELLS" in dict(variant.defines):
        assert sources[SOURCE].count(TELLS) == 1, f"{SOURCE} says otherwise who tells"
        sources[SOURCE] = sources[SOURCE].replace(TELLS, "TELLS")
    return sources


def make_groups(shape: Shape, ranks: int, rows: int, skew: str) -> Groups:
    """Where rows of the first rank's experts end, their choices drawn as `bench experts` does."""
    counts_e = count_choices(choices_received(shape, ranks, rows, skew), experts_of(shape, ranks))
    assert int(counts_e.sum()) == rows
    return Groups(torch.cat([counts_e.new_zeros(COUNTERS), counts_e.cumsum(0)]).int().to(DEVICE))


def time_ways(
    op: str,
    case: Row,
    calls: dict[str, Callable[[], None]],
    out: Sequence[Tensor],
    marks: dict[str, str | None],
) -> list[Row]:
    """A row for every way. Bits of the last of `out` are the same; all of it is NaN before. marks: by name,
    the way that has this mark."""
    first = None
    for way, call in calls.items():
        for tensor in out:
            tensor.view(torch.uint8).fill_(0xFF)
        call()
        found = out[-1].clone()
        first = found if first is None else first
        assert torch.equal(found, first), f"{op} {case}: {way} has other bits, or no numbers"
    times = time_in_turns(calls, repeats=REPEATS, warmup=2)
    return [
        {"op": op, "impl": way, "case": case, **summary(spent)}
        | {mark: way == marked for mark, marked in marks.items()}
        for way, spent in times.items()
    ]


def choose(
    epilogue: Epilogue,
    rows: int,
    experts: int,
    columns: int,
    layout: Layout = FORWARD,
    **reading: Unpack[Reading],
) -> Tiling:
    """The host's choice."""
    sms = multiprocessors(torch.empty(0, device=DEVICE).get_device())
    return choose_tiling(layout, epilogue, rows, experts, (rows, columns), sms=sms, **reading)


def time_product(op: str, shape: Shape, gate_up_eGD: Tensor, case: Row) -> list[Row]:
    """Gate and up, or the gradient of rows through them, of so many rows an expert in the mean."""
    layout, epilogue = PRODUCTS[op]
    rows = case["mean"] * len(gate_up_eGD)
    groups = make_groups(shape, RANKS, rows, case["skew"])
    widths = shape.hidden_size, shape.intermediate_size
    depth, columns = widths if layout is FORWARD else (2 * widths[1], widths[0])
    a, out = draw(rows, depth, device=DEVICE), torch.empty(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    operands = a, gate_up_eGD, groups.ends_e, out, groups.counter
    calls = {
        way: functools.partial(launch_gemm, layout, *operands, tiling=tiling, epilogue=epilogue)
        for way, tiling in TILES.items()
    }
    sizes, ways = (rows, len(gate_up_eGD), columns), {tiling: way for way, tiling in TILES.items()}
    marks = {
        mark: ways.get(choose(epilogue, *sizes, layout, depth=depth, tall=tall))
        for mark, tall in (("taken", True), ("taken_else", False))
    }
    return time_ways(op, case, calls, [out], marks)


def time_tall(model: str) -> list[Row]:
    shape, rows = TALL_SHAPES[model], []
    experts = experts_of(shape, RANKS)
    gate_up_eGD = draw(experts, 2 * shape.intermediate_size, shape.hidden_size, device=DEVICE)
    for op in PRODUCTS:
        for mean in MEANS:
            for skew in DRAWS:
                case = {"model": model, "experts": experts, "mean": mean, "skew": skew}
                rows += time_product(op, shape, gate_up_eGD, case)
    return rows


def fp8_calls(
    experts: Fp8Experts, groups: Groups, rows: int
) -> tuple[dict[str, Callable[[], None]], list[Tensor]]:
    """A call of both products for every way, and what they write."""
    _, width, inner = experts.down_eDF.shape
    values, blocks = quantise_weight(draw(rows, width, device=DEVICE)[None])
    rows_RD, scales_RB = values[0], blocks[0].repeat_interleave(BLOCK, 0)
    act_RF, act_scales = values.new_empty(rows, inner), blocks.new_empty(rows, inner // BLOCK)
    y_RD = torch.empty(rows, width, device=DEVICE, dtype=torch.bfloat16)
    up = Scales(rows=scales_RB, weights=experts.gate_up_scales, out=act_scales)
    down, unheard = Scales(rows=act_scales, weights=experts.down_scales), torch.zeros_like(groups.progress)

    def both(way: Way) -> None:
        told = groups.progress if way.follows else unheard
        first: Extras = {"scales": up, "beside": way.first, "progress": told if way.tells else None}
        second: Extras = {"scales": down}
        if way.follows:
            second |= {"progress": told, "beside": begins_behind(inner // BLOCK)}
        counter = groups.other_counter if way.follows else groups.counter
        ups = rows_RD, experts.gate_up_eGD, groups.ends_e, act_RF, groups.counter
        downs = act_RF, experts.down_eDF, groups.ends_e, y_RD, counter
        launch_gemm(FORWARD, *ups, tiling=FP8_TILES[way.pairs][0], epilogue=Epilogue.SWIGLU, **first)
        launch_gemm(FORWARD, *downs, tiling=FP8_TILES[way.pairs][1], **second)

    calls = {name: functools.partial(both, way) for name, way in WAYS.items()}
    return calls, [act_RF, act_scales, y_RD]


def time_fp8(model: str) -> list[Row]:
    """Both products in fp8, each way."""
    shape, found = MODELS[model], []
    number, width, inner = experts_of(shape, FP8_RANKS), shape.hidden_size, shape.intermediate_size
    weights = draw(number, 2 * inner, width, device=DEVICE), draw(number, width, inner, device=DEVICE)
    experts = quantise_experts(*weights)
    for rows in FP8_ROWS[model]:
        calls, out = fp8_calls(experts, make_groups(shape, FP8_RANKS, rows, "uniform"), rows)
        chosen = (
            choose(Epilogue.SWIGLU, rows, number, inner, depth=width, fp8=True),
            choose(Epilogue.PLAIN, rows, number, width, depth=inner, fp8=True),
        )
        marks = {"taken": {FP8_TILES[False]: "single blocks, followed", FP8_TILES[True]: "pairs"}.get(chosen)}
        case = {"model": model, "experts": number, "rows": rows, "skew": "uniform"}
        found += time_ways("fp8", case, calls, out, marks)
    return found


def show(rows: Sequence[Row]) -> None:
    """A line a case; what the host takes is marked."""
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(f"{row['op']:14}{' '.join(map(str, row['case'].values())):34}", []).append(row)
    for case, ways in cases.items():
        print(case, *(f"{row['impl']} {row['median_us']:.0f}{'*' * row['taken']}" for row in ways), sep="  ")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=RESULTS)
    given = ask.parse_args()
    check_results(given.out, QUESTION)
    run, rows = describe_run("make gpu-bench NAME=tiles"), []
    with mock.patch.object(jit, "sources_of", functools.partial(edited, jit.sources_of)):
        parts = [functools.partial(time_tall, model) for model in TALL_SHAPES]
        for part in (*parts, *(functools.partial(time_fp8, model) for model in FP8_ROWS)):
            rows += part()
            write_results(given.out, QUESTION, run, rows)  # what there is, if time runs out
    show(rows)


if __name__ == "__main__":
    main()
