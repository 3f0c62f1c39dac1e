"""What do dispatch, experts and sums of a small batch take beside reading the weights of the experts hit?

    PYTHONPATH=src python benchmarks/decode_one.py [--fp8] [--one-kernel 64,32] [--stamps]

One GPU has what a rank of two has: half of the experts and the tokens of both ranks, so nothing crosses and
no choice is made. Captured, one after the other with two sets of weights in turns, so that none is found in
L2; all ways in turns, in one process. Microseconds of a layer; `read_us`: the weights alone, at a copy's
rate. `--fp8`: the same experts in fp8 as well, in one launch, or in three that quantise rows and multiply.
`--one-kernel`: dispatch and both products in one kernel as well (`kernels.fused.few`), with so many
multiprocessors that dispatch before they compute, 0: as a layer has it (`dispatching_sms`).
`--stamps`: times nothing; prints when the blocks of a layer's kernels come where (`imbrex.bench.stamps`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from decode import read_us
from torch import Tensor

from imbrex.bench import stamps
from imbrex.bench.ceilings import copy_tbps
from imbrex.bench.results import describe_run, write_results
from imbrex.bench.shapes import MODELS, Shape
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.exchange.groups import empty_groups
from imbrex.kernels.exchange.launches import Sums
from imbrex.kernels.exchange.variants import REDUCE, REDUCE_BEHIND, SMALL
from imbrex.kernels.ffn import both
from imbrex.kernels.ffn.ffn import run_experts
from imbrex.kernels.ffn.fp8 import Fp8Experts, ffn_fp8, quantise_experts
from imbrex.kernels.ffn.glue import COUNTERS, Groups
from imbrex.kernels.fused.few import dispatch_and_experts, dispatching_sms, few_variant
from imbrex.kernels.heap import VirtualHeap
from imbrex.kernels.jit import Variant, load
from imbrex.kernels.routing.routed import Routed
from imbrex.placement import contiguous
from imbrex.transport.nvlink import room_for

RESULTS = Path(__file__).parent / "results" / "decode_one.json"
QUESTION = "How long do dispatch, experts and sums of a small batch take on one GPU?"


class OneKernel(NamedTuple):
    """One kernel that dispatches and computes. sms: multiprocessors that dispatch, 0: as a layer has it."""

    sms: int


Way = bool | OneKernel
"""Whether one launch computes both products; or one kernel that dispatches as well."""
CALLS, RANKS, PAUSE, SMS_HOME = 8, 2, 200_000, 96
WAYS: dict[str, Way] = {"one launch": True, "two launches": False}
FP8_WAYS: dict[str, Way] = {"fp8, one launch": True, "fp8, three launches": False}
Weights = tuple[Tensor, Tensor] | Fp8Experts
Inputs = tuple[Tensor, Tensor, Tensor]


class Layer:
    """Dispatch to sums of one way, captured."""

    def __init__(self, shape: Shape, inputs: Inputs, way: Way, load: Callable[..., Any] = load) -> None:
        self.shape, self.inputs = shape, inputs
        self.slots, tokens = shape.num_experts // RANKS, len(inputs[0]) // RANKS
        ships = isinstance(way, OneKernel) and not way.sms
        self.way: Way = OneKernel(dispatching_sms(tokens, lay.SMALL_SMS)) if ships else way
        self.expected = tokens * shape.top_k
        room = RANKS * room_for(tokens)
        size = lay.Shape(
            ranks=1,
            max_tokens=room,
            choices=shape.top_k,
            experts=self.slots,
            most_slots=self.slots,
            row_bytes=2 * shape.hidden_size,
            alignment=1,
            row_capacity=room * shape.top_k,
            token_capacity=1,
        )
        placement = contiguous(self.slots, 1)
        self.exchange = NvlinkExchange(
            lambda nbytes: VirtualHeap(1, nbytes, "cuda"), placement, size, load=load
        )
        self.y_TD = torch.empty_like(inputs[0])

    def call(self, weights: Weights) -> None:
        way = self.way
        sums: Sums = {"weighted": False}
        if isinstance(way, OneKernel):
            out_RD, routed, sums["behind"] = self._in_one(weights, way.sms)
        else:
            out_RD, routed = self._rows(weights)
        self.exchange.combine(out_RD, routed, num_sms=SMS_HOME, out=self.y_TD, **sums)

    def _in_one(self, weights: Any, sms: int) -> tuple[Tensor, Routed, int]:
        done = dispatch_and_experts(self.exchange, (*self.inputs, None), [weights], sms)
        return done.out[0], done.routed, done.behind

    def _rows(self, weights: Weights) -> tuple[Tensor, Routed]:
        exchange, room = self.exchange, self.exchange.shape.row_capacity
        groups = empty_groups(1, room, self.slots, COUNTERS, exchange.device)
        rows_1RD, routed = exchange.dispatch_small(*self.inputs, groups=groups)
        how = {"expected": self.expected, "hits": groups.hits, "one_launch": self.way}
        plan = Groups(groups.plan, **how)
        if isinstance(weights, Fp8Experts):
            more = {"weights_R": groups.weights, "groups": plan}
            return ffn_fp8(rows_1RD[0], weights, groups.counts, **more), routed
        return run_experts(rows_1RD[0], *weights, plan, groups.weights), routed

    def capture(self, weights: list[Weights]) -> None:
        for pair in weights:
            self.call(pair)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(CALLS):
                self.call(weights[i % 2])
        for _ in range(3):
            self.graph.replay()
        self.exchange.check(synchronize=True)

    def time(self) -> float:
        """Microseconds of a layer, in a replay that the host has queued before it begins."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(PAUSE)
        begin.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1000 / CALLS


def make_weights(shape: Shape) -> tuple[Tensor, Tensor]:
    experts, width, inner = shape.num_experts // RANKS, shape.hidden_size, shape.intermediate_size
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    up, down = torch.empty(experts, 2 * inner, width, **kind), torch.empty(experts, width, inner, **kind)
    return up.normal_(0.0, 0.02), down.normal_(0.0, 0.02)


def ways_in_one(given: str) -> dict[str, Way]:
    """The ways of one kernel that `--one-kernel` names."""
    numbers = given.split(",") if given else []
    return {f"one kernel, {sms} dispatch": OneKernel(int(sms)) for sms in numbers}


def make_inputs(shape: Shape, count: int) -> tuple[Inputs, int]:
    """Tokens of both ranks, their ids and weights, and how many experts of this one they hit."""
    draw = torch.Generator().manual_seed(1000 + count)
    ids = torch.rand(RANKS * count, shape.num_experts, generator=draw).topk(shape.top_k).indices
    ids[ids >= shape.num_experts // RANKS] = -1  # of the other rank
    x_TD = torch.randn(RANKS * count, shape.hidden_size, generator=draw).bfloat16().cuda()
    weights = torch.rand(ids.shape, generator=draw).cuda()
    return (x_TD, ids.cuda(), weights), len(ids[ids >= 0].unique())


def launches(way: Way) -> dict[str, Variant]:
    """The kernels of a way that have stamps, in order."""
    if isinstance(way, OneKernel):
        return {"dispatch and experts": few_variant(), "sums": REDUCE_BEHIND}
    return {"dispatch": SMALL, "experts": both.both_variant(weighted=True), "sums": REDUCE[False]}


def show_stamps(model: str, tokens: list[int], repeats: int, in_one: dict[str, Way]) -> None:
    """Print when blocks come where in the last layer of a graph, in medians of its replays."""
    shape = MODELS[model]
    weights: list[Weights] = [make_weights(shape) for _ in range(2)]
    with mock.patch.object(both, "load", stamps.load):
        for count in tokens:
            inputs, hit = make_inputs(shape, count)
            for name, way in ({"one launch": True} | in_one).items():
                layer = Layer(shape, inputs, way, stamps.load)
                layer.capture(weights)
                print(f"\n{model}, {count} tokens, {hit} experts hit, {name}: ", end="")
                stamp_layer(layer, repeats)


def stamp_layer(layer: Layer, repeats: int) -> None:
    kernels = launches(layer.way)
    spans, words = [], []
    for _ in range(repeats):
        spans.append(layer.time())
        words.append(stamps.read_stamps([*kernels.values()]))
    tick = min(stamps.tick_of(replay) for replay in words)
    print(f"{statistics.median(spans):.1f} us a layer, ticks of {tick} ns; blocks, first, median, last")
    replays = [stamps.times_of(replay) for replay in words]
    for number, kernel in enumerate(kernels):
        print_stamps(kernel, [times[number] for times in replays], layer.way)


def print_stamps(kernel: str, replays: list[Tensor], way: Way) -> None:
    """A table of a kernel's stamps; of one kernel, those blocks apart that do not dispatch."""
    parts = {kernel: slice(None)}
    if isinstance(way, OneKernel) and kernel != "sums":
        parts = {f"{kernel}: those that dispatch": slice(way.sms), "the others": slice(way.sms, None)}
    for words, blocks in parts.items():
        print(f"  {words}")
        for line in stamps.summarise([times[blocks] for times in replays]):
            print(f"    {line}", flush=True)


def measure(
    model: str, tokens: list[int], repeats: int, fp8: bool, in_one: dict[str, Way]
) -> list[dict[str, Any]]:
    shape, rows = MODELS[model], []
    weights, tbps = [make_weights(shape) for _ in range(2)], copy_tbps()
    sets: list[tuple[dict[str, Way], list[Weights]]] = [(WAYS | in_one, [*weights])]
    if fp8:
        sets.append((FP8_WAYS, [quantise_experts(*pair) for pair in weights]))
    for count in tokens:
        inputs, hit = make_inputs(shape, count)
        layers: dict[str, Layer] = {}
        for ways, experts in sets:
            for name, way in ways.items():
                layers[name] = Layer(shape, inputs, way)
                layers[name].capture(experts)
        times: dict[str, list[float]] = {way: [] for way in layers}
        for _ in range(repeats):
            for way, layer in layers.items():
                times[way].append(layer.time())
        for ways, _ in sets:
            first, *others = (layers[way].y_TD for way in ways)
            assert all(torch.equal(first, y_TD) for y_TD in others), ways
        for way, spans in times.items():
            row = {"op": "decode", "impl": way, "case": {"model": model, "T": count, "W": RANKS}}
            whole = read_us(shape, hit, tbps)
            row |= {"experts_hit": hit, "read_us": round(whole / 2, 1) if way in FP8_WAYS else whole}
            row["n"] = repeats
            row["copy_tbps"] = round(tbps, 2)
            found = {"median_us": statistics.median(spans), "min_us": min(spans), "max_us": max(spans)}
            rows.append(row | {name: round(span, 1) for name, span in found.items()})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--models", default="qwen3-30b-a3b,qwen2-moe,deepseek-v3")
    ask.add_argument("--tokens", default="1,4,16,128", help="of each of two ranks")
    ask.add_argument("--repeats", type=int, default=21)
    ask.add_argument("--fp8", action="store_true", help="experts in fp8 as well")
    ask.add_argument(
        "--one-kernel", default="", help="multiprocessors that dispatch, 0: as in a layer; 0,64,32"
    )
    ask.add_argument("--stamps", action="store_true", help="print when blocks come where, and time nothing")
    ask.add_argument("--out", type=Path, default=RESULTS)
    given = ask.parse_args()
    tokens = [int(count) for count in given.tokens.split(",")]
    if given.stamps:
        for model in given.models.split(","):
            show_stamps(model, tokens, given.repeats, ways_in_one(given.one_kernel))
        return
    command = f"python benchmarks/decode_one.py --models {given.models} --tokens {given.tokens}"
    command += " --fp8" * given.fp8 + f" --one-kernel {given.one_kernel}" * bool(given.one_kernel)
    run, rows = describe_run(command), []
    for model in given.models.split(","):
        rows += measure(model, tokens, given.repeats, given.fp8, ways_in_one(given.one_kernel))
        write_results(given.out, QUESTION, run, rows)  # what there is, if time runs out


if __name__ == "__main__":
    main()
