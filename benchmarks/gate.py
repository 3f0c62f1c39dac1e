"""Who makes the logits of a small batch the fastest? `make gpu-bench NAME=gate`, on one GPU.

A layer's gate without gradients, its logits and its choice, in us of the GPU: as many gates as a model has
layers and more, one behind the other in a CUDA graph, each with its own tokens and weights, so that L2 holds
few of them. And in us of the host: one gate of a call that nothing waits for. `taken` marks the product that
a layer takes for so many tokens; all choose the same experts but where logits differ by rounding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from imbrex.bench.results import describe_run, write_results
from imbrex.bench.shapes import MODELS
from imbrex.kernels.gate import logits
from imbrex.router.router import Router

RESULTS = Path(__file__).parent / "results" / "gate.json"
QUESTION = "Who makes the logits of a small batch the fastest, a kernel of imbrex's or the library?"
LIMITS = {"kernel": 1 << 40, "library": 0}
"""`MOST_PRODUCTS` with which every gate takes imbrex's kernel, or none."""
GATES, PAUSE, SAME = 96, 400_000, 0.99


def time_graph(gates: list[Router], tokens: list[Tensor], repeats: int) -> list[float]:
    """Microseconds of a gate, in replays that the host has queued before they begin."""
    for gate, x_TD in zip(gates, tokens, strict=True):
        gate(x_TD)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for gate, x_TD in zip(gates, tokens, strict=True):
            gate(x_TD)
    spans = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(PAUSE)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        spans.append(1000 * begin.elapsed_time(end) / len(gates))
    return spans


def time_host(call: Callable[[], Any], repeats: int) -> float:
    spent = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        spent.append(1e6 * (time.perf_counter() - start))
    return statistics.median(spent)


def measure(model: str, counts: list[int], repeats: int) -> list[dict[str, Any]]:
    shape, rows = MODELS[model], []
    sizes = shape.hidden_size, shape.num_experts, shape.top_k
    gates = [Router(*sizes, device="cuda", dtype=torch.bfloat16) for _ in range(GATES)]
    for count in counts:
        taken = "kernel" if count * sizes[0] * sizes[1] <= logits.MOST_PRODUCTS else "library"
        tokens = [torch.randn(count, sizes[0], device="cuda", dtype=torch.bfloat16) for _ in gates]
        wanted = gates[0](tokens[0]).ids_TK
        for impl, most in LIMITS.items():
            with mock.patch.object(logits, "MOST_PRODUCTS", most):
                same = (gates[0](tokens[0]).ids_TK == wanted).float().mean()
                assert float(same) > SAME, (model, count, impl, float(same))
                spans = time_graph(gates, tokens, repeats)
                host = time_host(lambda: gates[0](tokens[0]), 10 * repeats)  # noqa: B023
            row = {"op": "gate", "impl": impl, "case": {"model": model, "T": count}, "taken": impl == taken}
            times = {"median_us": statistics.median(spans), "min_us": min(spans), "max_us": max(spans)}
            times["host_us"] = host
            rows.append(row | {"n": repeats} | {name: round(value, 2) for name, value in times.items()})
            print(rows[-1], flush=True)
    return rows


@torch.no_grad()
def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--models", default="qwen3-30b-a3b,qwen2-moe,deepseek-v3,mixtral")
    ask.add_argument("--tokens", default="1,8,16,32,64,80,96,128,256,512")
    ask.add_argument("--repeats", type=int, default=15)
    ask.add_argument("--out", type=Path, default=RESULTS)
    given = ask.parse_args()
    run, rows = describe_run("make gpu-bench NAME=gate"), []
    for model in given.models.split(","):
        rows += measure(model, [int(count) for count in given.tokens.split(",")], given.repeats)
    write_results(given.out, QUESTION, run, rows)


if __name__ == "__main__":
    main()
