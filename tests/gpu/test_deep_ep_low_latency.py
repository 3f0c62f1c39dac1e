"""DeepEP's low-latency calls over NVLink: the bits of the same calls over NCCL's all-to-all, no host
synchronisation, and a CUDA graph of both calls that follows new tokens and choices at every replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from imbrex.adapters.deep_ep import Buffer
from tests.gpu.gpus import RANKS, worlds
from tests.ranks.pool import Pool, Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(RANKS < 2, reason="NVLink needs two GPUs"),
]
E, K, D, MOST = 32, 4, 512, 64
TOKENS = (40, 0, 33, 64)
WAYS = {"bf16": {"use_fp8": False}, "fp8": {}, "exponents": {"round_scale": True, "use_ue8m0": True}}


def draw(ranks: Ranks, seed: int = 0, tokens: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(17 * seed + ranks.rank)
    count = TOKENS[(ranks.rank + seed) % 4] if tokens is None else tokens
    x_TD = torch.randn(count, D, generator=make).bfloat16()
    ids_TK = torch.rand(count, E, generator=make).argsort(1)[:, :K]
    ids_TK[torch.rand(count, K, generator=make) < 0.3] = -1
    weights_TK = torch.rand(count, K, generator=make)
    return x_TD.to(ranks.device), ids_TK.to(ranks.device), weights_TK.to(ranks.device)


def call(buffer: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, options: Any) -> list[Tensor]:
    """The sums; counts, rows and scales with zeros where nothing was written; the handle."""
    rows, counts, handle, _, _ = buffer.low_latency_dispatch(x_TD, ids_TK, MOST, E, **options)
    parts = [rows] if isinstance(rows, Tensor) else list(rows)
    there = torch.arange(parts[0].shape[1], device=x_TD.device) < counts[:, None]
    wide = [torch.where(there[..., None], part.double(), 0.0) for part in parts]
    # Unequal rows of every expert, as experts make them; those that nobody wrote are no numbers.
    made = torch.where(there[..., None], wide[0] * 0.5 + 1, float("nan")).bfloat16()
    y_TD, _, _ = buffer.low_latency_combine(made, ids_TK, weights_TK, handle)
    info, ranges, *_ = handle
    return [y_TD, counts, *wide, torch.where(there, info, 0), ranges]


def run_both(ranks: Ranks, options: dict[str, Any]) -> list[str]:
    ours, theirs = Buffer(ranks.group, low_latency_mode=True), Buffer(ranks.group, transport="alltoall")
    wrong = [] if ours._backend.transport.name == "nvlink" else ["not over NVLink"]
    for seed in range(4):
        found = [call(buffer, *draw(ranks, seed), options) for buffer in (ours, theirs)]
        for place, (a, b) in enumerate(zip(*found, strict=True)):
            wrong += [] if torch.equal(a, b) else [f"rank {ranks.rank}, seed {seed}, part {place}"]
    return wrong


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", worlds())
def test_the_same_bits_as_all_to_all(nccl: Pool, world: int, way: str) -> None:
    assert [wrong for found in nccl.run(world, run_both, WAYS[way]) for wrong in found] == []


def run_captured(ranks: Ranks, options: dict[str, Any]) -> list[bool]:
    """Whether replays with new inputs give what calls outside of a graph give; those do not synchronise."""
    buffer: Any = Buffer(ranks.group, low_latency_mode=True)
    x_TD, ids_TK, weights_TK = draw(ranks, 0, MOST)
    call(buffer, x_TD, ids_TK, weights_TK, options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x_TD, ids_TK, MOST, E, return_recv_hook=True, **options
        )
        hook()
        made = buffer.get_next_low_latency_combine_buffer(handle)
        buffer.low_latency_combine(made, ids_TK, weights_TK, handle, zero_copy=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(x_TD, ids_TK, MOST, E, **options)
        part = rows if isinstance(rows, Tensor) else rows[0]
        sums, _, _ = buffer.low_latency_combine(part.bfloat16(), ids_TK, weights_TK, handle)
    same = []
    for seed in range(1, 5):
        for place, value in zip((x_TD, ids_TK, weights_TK), draw(ranks, seed, MOST), strict=True):
            place.copy_(value)
        graph.replay()
        there = torch.arange(part.shape[1], device=x_TD.device) < counts[:, None]
        replayed = sums.clone(), counts.clone(), torch.where(there[..., None], part.float(), 0.0)
        rows_now, counts_now, handle_now, _, _ = buffer.low_latency_dispatch(x_TD, ids_TK, MOST, E, **options)
        part_now = rows_now if isinstance(rows_now, Tensor) else rows_now[0]
        sums_now, _, _ = buffer.low_latency_combine(part_now.bfloat16(), ids_TK, weights_TK, handle_now)
        now = sums_now, counts_now, torch.where(there[..., None], part_now.float(), 0.0)
        same.append(all(torch.equal(a, b) for a, b in zip(replayed, now, strict=True)))
    buffer._backend.transport.check(synchronize=True)
    return same


@pytest.mark.parametrize("way", ["bf16", "fp8"])
def test_a_graph_follows_new_tokens(nccl: Pool, way: str) -> None:
    assert nccl.run(worlds()[-1], run_captured, WAYS[way]) == [[True] * 4] * worlds()[-1]
