"""The cost of one rank's experts: imbrex's kernels, torch, and torch compiled, doing the same in turns.

All of them get the same weights, rows and counts. Times are CUDA events around one call, behind a pause that
lets the host run ahead, so that launch overheads of Python do not count for anybody.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.bench.experts import rival
from imbrex.bench.experts.work import Work, draw
from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.ffn.ffn import ffn
from imbrex.kernels.ffn.fp8 import ffn_fp8, quantise_experts, quantise_rows, why_not_fp8
from imbrex.kernels.ffn.fp8_tokens import ffn_tokens_fp8
from imbrex.kernels.ffn.glue import plan_groups
from imbrex.kernels.ffn.tokens import ffn_tokens
from imbrex.kernels.gemm.gemm import Epilogue, Layout, launch_gemm
from imbrex.kernels.gemm.portable import launch_portable, portable_products
from imbrex.kernels.gemm.tiling import Reading, choose_tiling
from imbrex.kernels.jit import cuda_binding, cuda_ok
from imbrex.observe.clock import PAUSE_CYCLES, device_microseconds

OPS = ("grouped_gemm", "ffn", "ffn_unpermuted", "ffn_training", "decode")
FP8_IMPLS = ("imbrex-fp8", "imbrex-fp8-rows")
"""Rows quantised in the call, and rows that come as fp8, as a dispatch with the codec `fp8` delivers them."""
PORTABLE = "imbrex-portable"
"""The products without wgmma, as a GPU without it runs them: code for compute capability 8.0."""
IMPLS = ("imbrex", *FP8_IMPLS, PORTABLE, "torch", "torch-compiled")
Call = Callable[[], Any]
RIDGE = 183
"""Operations that a dense bf16 product does while one byte is copied: 783 TFLOP/s over 4.27 TB/s."""
STEP_PAUSE = 4 * PAUSE_CYCLES
"""Two milliseconds: the host takes up to 0.7 for a forward and backward."""
DENSE_SIDE = 8192
COPY_BYTES = 1 << 31


def token_calls(work: Work) -> dict[str, Call]:
    """Calls from tokens in their own order to their weighted sums; torch takes its fastest way here."""
    x, weights = work.x_TD, (work.gate_up_eGD, work.down_eDF)
    order = work.source_R, work.position_TK, work.weights_TK
    ways = rival.ways_to_sum(work)
    tried = {name: functools.partial(way, *inputs) for name, (way, inputs) in ways.items()}
    times = time_in_turns(tried, repeats=3, warmup=1)
    way, inputs = ways[min(times, key=lambda name: min(times[name]))]
    calls: dict[str, Call] = {
        "imbrex": lambda: ffn_tokens(x, *weights, work.counts_e, *order),
        "torch": lambda: way(*inputs),
        "torch-compiled": lambda: rival.compiled(way)(*inputs),
    }
    if why_not_fp8(work.down_eDF.shape[1], work.down_eDF.shape[2]) is None:
        experts = quantise_experts(*weights)
        calls["imbrex-fp8"] = lambda: ffn_tokens_fp8(x, experts, work.counts_e, *order)
    return calls


def portably(call: Call) -> Call:
    """A call with its products by mma.sync."""

    def ours() -> None:
        with portable_products("compute_80"):
            call()

    return ours


def calls_of(op: str, work: Work) -> dict[str, Call]:
    """The calls to time, by implementation."""
    weights = (work.gate_up_eGD, work.down_eDF)
    if op == "ffn_unpermuted":
        return token_calls(work)
    rows_RD = work.x_TD[work.source_R]
    if op == "ffn_training":
        d_y = torch.randn_like(rows_RD)
        x, up, down = (t.detach().requires_grad_() for t in (rows_RD, *weights))
        quick, ends_e = rival.compiled(rival.ffn), work.ends_e

        def step(y_RD: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(y_RD, (x, up, down), d_y)

        def ours() -> tuple[Tensor, ...]:
            return step(ffn(x, up, down, work.counts_e))

        return {
            "imbrex": ours,
            PORTABLE: portably(ours),
            "torch": lambda: step(rival.ffn(x, up, down, ends_e)),
            "torch-compiled": lambda: step(quick(x, up, down, ends_e)),
        }
    calls: dict[str, Call] = {
        "imbrex": lambda: ffn(rows_RD, *weights, work.counts_e),
        PORTABLE: portably(lambda: ffn(rows_RD, *weights, work.counts_e)),
        "torch": lambda: rival.ffn(rows_RD, *weights, work.ends_e),
        "torch-compiled": lambda: rival.compiled(rival.ffn)(rows_RD, *weights, work.ends_e),
    }
    if why_not_fp8(work.down_eDF.shape[1], work.down_eDF.shape[2]) is None:
        experts = quantise_experts(*weights)
        _, values_RD, scales_RB = quantise_rows(rows_RD, work.counts_e)
        calls["imbrex-fp8"] = lambda: ffn_fp8(rows_RD, experts, work.counts_e)
        calls["imbrex-fp8-rows"] = lambda: ffn_fp8(values_RD, experts, work.counts_e, scales_RB=scales_RB)
    return calls


def gemm_calls(product: str, work: Work) -> dict[str, Call]:
    """One grouped GEMM alone: `gate_up` or `down`."""
    weight = work.gate_up_eGD if product == "gate_up" else work.down_eDF
    a = work.x_TD[work.source_R] if product == "gate_up" else draw(work.source_R.numel(), weight.shape[2])
    out = a.new_empty(a.shape[0], weight.shape[1])
    groups = plan_groups(work.counts_e)
    sms, shape = multiprocessors(a.get_device()), (out.shape[0], out.shape[1])
    reading: Reading = {"depth": a.shape[1], "tall": True}
    tiling = choose_tiling(
        Layout.FORWARD, Epilogue.PLAIN, a.shape[0], weight.shape[0], shape, sms=sms, **reading
    )

    def ours() -> None:
        launch_gemm(
            Layout.FORWARD,
            a,
            weight,
            groups.ends_e,
            out,
            groups.counter,
            tiling=tiling,
            epilogue=Epilogue.PLAIN,
        )

    portable = portably(lambda: launch_portable(Layout.FORWARD, a, weight, groups.ends_e, out))
    return {"imbrex": ours, PORTABLE: portable, "torch": lambda: F.grouped_mm(a, weight.mT, offs=work.ends_e)}


def flops_of(op: str, work: Work) -> float:
    """Multiply-adds counted twice; a third for each of the forward and the two gradients."""
    inner = work.source_R.numel() * work.down_eDF.shape[1] * work.down_eDF.shape[2]
    return 6.0 * inner * (3 if op == "ffn_training" else 1)


def weight_bytes(work: Work, value_bytes: int) -> int:
    """Bytes of the weights of the experts that have rows."""
    # host sync: once a case, outside what is timed
    live = int((work.counts_e > 0).sum().item())
    return live * value_bytes * 3 * work.down_eDF.shape[1] * work.down_eDF.shape[2]


def dense_call() -> Call:
    a, b = (torch.randn(DENSE_SIDE, DENSE_SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: torch.mm(a, b)


def copy_call() -> Call:
    source = torch.randint(255, (COPY_BYTES,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def time_in_turns(
    calls: dict[str, Call], *, repeats: int, warmup: int, pause_cycles: int = PAUSE_CYCLES
) -> dict[str, list[float]]:
    """Microseconds of every call, all of them once a round, each behind a pause of the device."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-warmup, repeats):
        for name, call in calls.items():
            elapsed = device_microseconds(call, pause_cycles)
            if turn >= 0:
                times[name].append(elapsed)
    return times


def summary(times: list[float]) -> dict[str, float]:
    return {
        "median_us": round(statistics.median(times), 1),
        "min_us": round(min(times), 1),
        "max_us": round(max(times), 1),
        "n": len(times),
    }


def count_launches(call: Call) -> int:
    """Kernels, copies and fills that one call puts on the device: nodes of a CUDA graph captured from it.

    A profiler would give the same number after a second, and slow down what is timed later.
    """
    driver = cuda_binding("driver")
    graph = capture(call)
    handle = driver.CUgraph(graph.raw_cuda_graph())
    _, number = cuda_ok(driver.cuGraphGetNodes(handle), "counting nodes")
    nodes, _ = cuda_ok(driver.cuGraphGetNodes(handle, number), "reading nodes")
    kinds = [cuda_ok(driver.cuGraphNodeGetType(node), "asking what a node is") for node in nodes]
    work = driver.CUgraphNodeType
    launched = (
        work.CU_GRAPH_NODE_TYPE_KERNEL,
        work.CU_GRAPH_NODE_TYPE_MEMCPY,
        work.CU_GRAPH_NODE_TYPE_MEMSET,
    )
    return sum(kind in launched for kind in kinds)


def peak_mib(call: Call) -> float:
    """Device memory that one call needs beyond what is there before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The graph of `call`, which runs nothing; its memory is free when the graph is gone.

    Unlike `torch.cuda.graph` it keeps the allocator's free blocks, so that what is timed later finds them.
    """
    graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
