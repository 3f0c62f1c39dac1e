"""What does a layer cost a step of decoding, and which kernel takes how much of it?
`make gpu-bench NAME=decode` on two GPUs.

Layers over NVLink, one after the other in a CUDA graph that both ranks replay together, two in turns so that
none finds its weights in L2: microseconds a layer, the slowest rank of every replay, and rank 0's kernels of
one, with when they begin and end. Both GPUs begin a replay together, behind a pause in which the hosts queue
it: a model's step is one graph, so a host's launch and its lead over the other's are no part of a layer.
`imbrex` is the default. `imbrex-one-launch` and `imbrex-two-launches` have both products of the experts in
one kernel, or in two, behind a dispatch of its own, and `imbrex-one-kernel` the dispatch in the one, too,
whatever is chosen (`Experts.one_launch`, `Nvlink.one_kernel`). The rival is the same layers over AllGather
and ReduceScatter of NCCL, captured as well: tokens and choices go to everybody, every rank computes its own
experts on them by torch's grouped products, and sums are scattered.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from imbrex import MoEConfig, MoELayer
from imbrex.bench.ceilings import copy_tbps
from imbrex.bench.exchange.clock import run_ranks
from imbrex.bench.results import describe_run, write_results
from imbrex.bench.serve.rivals import GatherScatterMoE
from imbrex.bench.shapes import MODELS, Shape

RESULTS = Path(__file__).parent / "results" / "decode.json"
QUESTION = "How long does a layer take in a step of decoding, and its kernels?"
CALLS = 8
"""Of a graph: what the replay itself costs is spread over them."""
PAUSE = 700_000
"""Cycles, 0.4 ms, in which a host queues a replay."""
WAYS = {
    "imbrex": (None, None),
    "imbrex-one-kernel": (True, None),
    "imbrex-one-launch": (False, True),
    "imbrex-two-launches": (False, False),
}
"""`Nvlink.one_kernel` and `Experts.one_launch` of imbrex's ways."""


def capture(layers: Sequence[Callable[[Tensor], Any]], x_TD: Tensor) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        for call in layers:
            call(x_TD)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(CALLS):
            layers[i % len(layers)](x_TD)
    for _ in range(3):
        graph.replay()
    return graph


def time_calls(graph: torch.cuda.CUDAGraph, repeats: int) -> list[float]:
    """Microseconds a call of every replay, of the slowest rank."""
    spans, together = [], torch.zeros(1, device="cuda")
    for _ in range(repeats):
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(PAUSE)
        dist.all_reduce(together)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) * 1000 / CALLS)
    slowest = torch.tensor(spans, dtype=torch.float64, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def list_kernels(graph: torch.cuda.CUDAGraph) -> list[list[Any]]:
    """Name, begin and end in microseconds of every kernel of a call in the middle of a replay."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    kernels = [event for event in seen.events() or () if str(event.device_type) == "DeviceType.CUDA"]
    kernels.sort(key=lambda event: event.time_range.start)
    count = len(kernels) // CALLS
    one = kernels[CALLS // 2 * count :][:count]
    start = one[0].time_range.start if one else 0.0
    return [
        [event.name[:60], round(event.time_range.start - start, 1), round(event.time_range.end - start, 1)]
        for event in one
    ]


def make_layer(config: MoEConfig, number: int) -> MoELayer:
    """A layer whose weights are drawn on the GPU."""
    kind = {"transport": "nvlink", "device": "meta", "dtype": torch.bfloat16}
    layer = MoELayer(config, dist.group.WORLD, **kind, layer=number).to_empty(device="cuda")
    draw = torch.Generator("cuda").manual_seed(number)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.02, generator=draw)
        for buffer in layer.buffers():
            buffer.zero_()
    return layer


def make_rival(layer: MoELayer, group: dist.ProcessGroup | None) -> GatherScatterMoE:
    """The same layer over NCCL: `layer`'s parameters."""
    rival = GatherScatterMoE(layer.config, group, dtype=torch.bfloat16)
    for mine, given in ((rival.gate, layer.gate), (rival.experts, layer.experts)):
        for name, parameter in given.named_parameters():
            setattr(mine, name, parameter)
        for name, buffer in given.named_buffers():
            setattr(mine, name, buffer)
    return rival


def measure(
    rank: int, world: int, models: list[str], tokens: list[int], repeats: int, rivals: bool
) -> list[dict[str, Any]]:
    rows, tbps = [], copy_tbps()
    for name in models:
        sizes = MODELS[name]
        torch.manual_seed(0)
        config = MoEConfig(**asdict(sizes))
        layers = [make_layer(config, number) for number in range(2)]
        ways: dict[str, Sequence[Any]] = dict.fromkeys(WAYS, layers)
        if rivals:
            ways["nccl-agrs"] = [make_rival(layer, dist.group.WORLD) for layer in layers]
        for count in tokens:
            draw = torch.Generator("cuda").manual_seed(1000 * count + rank)
            shape = count, sizes.hidden_size
            x_TD = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=draw)
            hit = experts_hit(layers[0], x_TD, world)
            weights = {"experts_hit": hit, "read_us": read_us(sizes, hit, tbps), "copy_tbps": round(tbps, 2)}
            for way, modules in ways.items():
                row = {"op": "decode", "impl": way, "case": {"model": name, "T": count, "W": world}}
                row |= weights | {"n": repeats}
                for layer in layers if way in WAYS else ():
                    transport: Any = layer.exchange.transport
                    transport.one_kernel, layer.experts.one_launch = WAYS[way]
                rows.append(row | time_way(modules, x_TD, repeats, timeline=way in WAYS))
                if rank == 0:
                    print(rows[-1], flush=True)
        for layer in layers:
            layer.check(synchronize=True)
            layer.close()
    return rows


def time_way(layers: Sequence[Any], x_TD: Tensor, repeats: int, *, timeline: bool) -> dict[str, Any]:
    """The times of a captured layer, in microseconds, and its kernels, or how many there are."""
    with torch.no_grad():
        graph = capture(layers, x_TD)
        spans, kernels = time_calls(graph, repeats), list_kernels(graph)
    times = {"median_us": statistics.median(spans), "min_us": min(spans), "max_us": max(spans)}
    found: dict[str, Any] = {name: round(time, 1) for name, time in times.items()}
    return found | ({"kernels": kernels} if timeline else {"launches": len(kernels)})


def experts_hit(module: Any, x_TD: Tensor, world: int) -> int:
    """Experts of the rank with most that some rank's tokens want."""
    with torch.no_grad():
        ids_TK = module.gate(x_TD).ids_TK
    wanted_E = torch.zeros(module.config.num_experts, device=x_TD.device)
    wanted_E[ids_TK.flatten()] = 1
    dist.all_reduce(wanted_E, op=dist.ReduceOp.MAX)
    return int(wanted_E.view(world, -1).sum(1).max())


def read_us(sizes: Shape, hit: int, tbps: float) -> float:
    """Microseconds to read the bf16 weights of so many experts at this card's rate."""
    return round(6 * sizes.hidden_size * sizes.intermediate_size * hit / tbps / 1e6, 1)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--models", default="qwen3-30b-a3b,qwen2-moe,deepseek-v3")
    ask.add_argument("--tokens", default="1,4,16,128", help="of a rank")
    ask.add_argument("--repeats", type=int, default=20)
    ask.add_argument("--no-rivals", action="store_true")
    ask.add_argument("--out", type=Path, default=RESULTS)
    given = ask.parse_args()
    models, tokens = given.models.split(","), [int(count) for count in given.tokens.split(",")]
    command = f"python benchmarks/decode.py --models {given.models} --tokens {given.tokens}"
    run, rows = describe_run(command, gpus=2), []
    for model in models:
        rows += run_ranks(measure, 2, [model], tokens, given.repeats, not given.no_rivals)
        write_results(given.out, QUESTION, run, rows)  # what there is, if time runs out


if __name__ == "__main__":
    main()
