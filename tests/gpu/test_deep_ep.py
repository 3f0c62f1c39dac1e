"""Both DeepEP buffers over NVLink against the same buffers over NCCL's all-to-all, to the bit; and that
nothing on the hot path waits for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.adapters.deep_ep import Buffer, HybridEPBuffer, indices_to_map
from tests.gpu.gpus import RANKS, worlds
from tests.ranks.pool import Pool, Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(RANKS < 2, reason="NVLink needs two GPUs"),
]
E, K, D, PAD = 32, 4, 256, 16
TOKENS = (70, 0, 33, 128)
ROOM = 4 * 128


def draw(ranks: Ranks, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Integer-valued tokens, so that sums are exact; choices with -1; weights."""
    make = torch.Generator().manual_seed(17 * seed + ranks.rank)
    tokens = TOKENS[(ranks.rank + seed) % 4]
    x_TD = torch.randint(-8, 9, (tokens, D), generator=make).bfloat16()
    ids_TK = torch.rand(tokens, E, generator=make).argsort(1)[:, :K]
    ids_TK[torch.rand(tokens, K, generator=make) < 0.3] = -1
    weights_TK = torch.rand(tokens, K, generator=make)
    return x_TD.to(ranks.device), ids_TK.to(ranks.device), weights_TK.to(ranks.device)


def legacy_calls(
    buffer: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, wide: bool = False
) -> list[Any]:
    """Returns of all calls. wide: sums of float32 rows, too."""
    per_rank, _, per_expert, wanted, _ = buffer.get_dispatch_layout(ids_TK, E)
    layout = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": wanted,
        "num_tokens_per_expert": per_expert,
        "topk_idx": ids_TK,
        "topk_weights": weights_TK,
    }
    rows, ids, weights, counts, handle, _ = buffer.dispatch(x_TD, **layout, expert_alignment=8)
    fp8 = x_TD.to(torch.float8_e4m3fn), x_TD[:, :2].float()
    (values, scales), *_ = buffer.dispatch(fp8, **layout, num_worst_tokens=ROOM)
    again = buffer.dispatch(2 * x_TD, handle=handle)[0]
    chosen = buffer.dispatch(x_TD, handle=handle, topk_idx=ids_TK, topk_weights=2 * weights_TK)[:4]
    summed = buffer.combine(rows, handle, topk_weights=weights)[:2]
    biased = buffer.combine(rows, handle, bias=x_TD)[0]
    sums = [buffer.combine(rows.float(), handle)[0]] if wide else []
    parts = values.float(), scales, again, *chosen, *summed, biased
    return [rows, ids, weights, counts, *handle, *parts, *sums]


def hybrid_calls(buffer: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> list[Any]:
    map_TE, probs_TE = indices_to_map(ids_TK, weights_TK, len(ids_TK), E)
    assert probs_TE is not None
    rows, probs, _, handle = buffer.dispatch(x_TD, routing_map=map_TE, probs=probs_TE)
    found = [rows, probs, handle[3], handle[4], *buffer.combine(rows, probs, handle)]
    routing = {"topk_idx": ids_TK, "topk_weights": weights_TK, "num_of_experts": E}
    for sizes in (
        {"pad_multiple": PAD},
        {"pad_multiple": PAD, "num_permuted_tokens": 1024, "non_blocking": True},
        {"num_permuted_tokens": 40},
    ):
        major, row_probs, _, counts, handle = buffer.dispatch_with_permute(
            hidden=x_TD, **routing, **sizes, scaling_factor=x_TD[:, :1].float()
        )
        found += [major, row_probs, counts, handle[-1]]
        found += buffer.combine_with_unpermute(hidden=major, probs=row_probs, handle=handle)
        again = buffer.dispatch_with_permute(hidden=-x_TD, handle=handle, probs=2 * probs_TE)
        found += again[:2]
    return found


def run_both(ranks: Ranks, calls: Callable[..., list[Any]], make: Callable[..., Any]) -> list[str]:
    """What differs between NVLink and all-to-all, over changing tokens."""
    ours, theirs = (make(ranks, transport) for transport in ("nvlink", "alltoall"))
    wrong = []
    for seed in range(4):
        inputs = draw(ranks, seed)
        for place, (a, b) in enumerate(zip(calls(ours, *inputs), calls(theirs, *inputs), strict=True)):
            same = torch.equal(a.cpu(), b.cpu()) if isinstance(a, Tensor) else a == b
            wrong += [] if same else [f"rank {ranks.rank}, seed {seed}, return {place}: {a} for {b}"]
    return wrong


def make_legacy(ranks: Ranks, transport: str) -> Buffer:
    return Buffer(ranks.group, transport=transport)


def make_hybrid(ranks: Ranks, transport: str) -> HybridEPBuffer:
    return HybridEPBuffer(ranks.group, D, 128, E // ranks.world_size, transport=transport)


@pytest.mark.parametrize("world", worlds())
@pytest.mark.parametrize(
    ("calls", "make"), [(legacy_calls, make_legacy), (hybrid_calls, make_hybrid)], ids=["legacy", "hybrid"]
)
def test_the_same_bits_as_all_to_all(
    nccl: Pool, world: int, calls: Callable[..., list[Any]], make: Callable[..., Any]
) -> None:
    assert [wrong for found in nccl.run(world, run_both, calls, make) for wrong in found] == []


def run_over_gloo(ranks: Ranks) -> list[str]:
    """What differs where the group is gloo's and the rows are on GPUs, as in vLLM; sums of float32, too."""
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup)
    ours, theirs = Buffer(gloo), make_legacy(ranks, "alltoall")
    wrong = [] if ours._backend.transport.name == "nvlink" else ["not over NVLink"]
    for seed in range(2):
        inputs = draw(ranks, seed)
        found = [legacy_calls(buffer, *inputs, wide=True) for buffer in (ours, theirs)]
        for place, (a, b) in enumerate(zip(*found, strict=True)):
            same = torch.equal(a.cpu(), b.cpu()) if isinstance(a, Tensor) else a == b
            wrong += [] if same else [f"rank {ranks.rank}, seed {seed}, return {place}: {a} for {b}"]
    return wrong


def test_a_group_of_gloo_moves_rows_over_nvlink(nccl: Pool) -> None:
    assert [wrong for found in nccl.run(2, run_over_gloo) for wrong in found] == []


def run_hot(ranks: Ranks) -> None:
    legacy: Any = make_legacy(ranks, "auto")
    hybrid: Any = make_hybrid(ranks, "auto")

    def step(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        per_rank, _, per_expert, wanted, _ = legacy.get_dispatch_layout(ids_TK, E)
        rows, _, weights, _, handle, _ = legacy.dispatch(
            x_TD,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=wanted,
            num_tokens_per_expert=per_expert,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            num_worst_tokens=ROOM,
        )
        legacy.combine(rows, handle, topk_weights=weights)
        legacy.dispatch(x_TD, handle=handle)
        major, probs, _, _, handle = hybrid.dispatch_with_permute(
            hidden=x_TD,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            num_of_experts=E,
            num_permuted_tokens=1024,
            pad_multiple=PAD,
            non_blocking=True,
        )
        hybrid.combine_with_unpermute(hidden=major, probs=probs, handle=handle)
        hybrid.dispatch_with_permute(hidden=x_TD, handle=handle, num_permuted_tokens=1024, non_blocking=True)

    for seed in range(4):  # heaps are as large as they will be
        step(*draw(ranks, seed))
    inputs = [draw(ranks, seed) for seed in range(4)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for given in inputs:
            step(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_no_host_synchronisation_on_the_hot_path(nccl: Pool) -> None:
    nccl.run(worlds()[-1], run_hot)
