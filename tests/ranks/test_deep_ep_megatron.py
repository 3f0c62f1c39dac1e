"""The calls that Megatron-Core's flex dispatcher makes of deep_ep and of HybridEPBuffer, recorded from its
`fused_a2a.py`, forward and backward, against dense experts in float64."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.adapters import deep_ep as doors
from tests.ranks.layer_jobs import coefficients
from tests.ranks.pool import Pool, Ranks

E, K, D, WIDTH, PAD = 8, 3, 16, 12, 4
TOKENS = (5, 0, 3, 8)


def draw(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, ids (some dropped, as by a capacity) and weights of a rank."""
    drawn = torch.Generator().manual_seed(rank)
    tokens = TOKENS[rank]
    x_TD = torch.randn(tokens, D, generator=drawn)
    ids_TK = torch.rand(tokens, E, generator=drawn).argsort(1)[:, :K]
    ids_TK[torch.rand(tokens, K, generator=drawn) < 0.2] = -1
    return x_TD, ids_TK, torch.rand(tokens, K, generator=drawn)


def draw_experts() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(99)
    return torch.randn(E, D, WIDTH, generator=drawn) / 4, torch.randn(E, WIDTH, D, generator=drawn) / 4


def one_expert(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.silu(x @ up) @ down


def reference(world: int) -> dict[str, Any]:
    up_EDF, down_EFD = (w.double().requires_grad_() for w in draw_experts())
    found: dict[str, Any] = {"y": [], "x": [], "weights": []}
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(world):
        x_TD, ids_TK, weights_TK = draw(rank)
        x_TD, weights_TK = x_TD.double().requires_grad_(), weights_TK.double().requires_grad_()
        y_TD = torch.zeros_like(x_TD)
        for expert in range(E):
            weight_T = torch.where(ids_TK == expert, weights_TK, 0).sum(1)
            y_TD = y_TD + weight_T[:, None] * one_expert(x_TD, up_EDF[expert], down_EFD[expert])
        total = total + (y_TD * coefficients(y_TD)).sum()
        found["y"].append(y_TD.detach())
        found["x"].append(x_TD)
        found["weights"].append(weights_TK)
    total.backward()
    found["x"] = [x.grad for x in found["x"]]
    found["weights"] = [w.grad for w in found["weights"]]
    assert up_EDF.grad is not None
    assert down_EFD.grad is not None
    return found | {"up": up_EDF.grad, "down": down_EFD.grad}


def imported(name: str) -> Any:
    """A module as Megatron imports it."""
    doors.install()
    return importlib.import_module(name)


def now() -> Any:
    utils = imported("deep_ep.utils")
    return utils.EventOverlap(utils.EventHandle())


class LegacyDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, probs, num_experts, buffer):
        options: dict[str, Any] = {"async_finish": True, "allocate_on_comm_stream": True}
        previous = now()
        per_rank, per_rdma, per_expert, in_rank, event = buffer.get_dispatch_layout(
            ids, num_experts, previous_event=previous, **options
        )
        rows, row_ids, row_probs, counts, handle, after = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=probs,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            **options,
        )
        after.current_stream_wait()
        ctx.buffer, ctx.handle, ctx.options = buffer, handle, options
        return rows, row_ids, row_probs, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx, *grads):
        d_rows, _, d_probs = grads[:3]
        d_x, d_weights, after = ctx.buffer.combine(
            d_rows.contiguous(),
            ctx.handle,
            topk_weights=d_probs.float(),
            previous_event=now(),
            **ctx.options,
        )
        after.current_stream_wait()
        return d_x, None, d_weights, None, None


class LegacyCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, handle, buffer):
        ctx.buffer, ctx.handle = buffer, handle
        y, _, after = buffer.combine(rows, handle=handle, async_finish=True, allocate_on_comm_stream=True)
        after.current_stream_wait()
        return y

    @staticmethod
    def backward(ctx, *grads):
        d_rows, _, _, _, _, after = ctx.buffer.dispatch(
            grads[0].contiguous(), handle=ctx.handle, async_finish=True, allocate_on_comm_stream=True
        )
        after.current_stream_wait()
        return d_rows, None, None


def make_legacy_buffer(group: Any, width: int):
    Buffer = imported("deep_ep").Buffer
    num_nvl_bytes = num_rdma_bytes = 0
    for config in (Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size())):
        num_nvl_bytes = max(config.get_nvl_buffer_size_hint(width * 4, group.size()), num_nvl_bytes)
        num_rdma_bytes = max(config.get_rdma_buffer_size_hint(width * 4, group.size()), num_rdma_bytes)
    buffer = Buffer(group, num_nvl_bytes, num_rdma_bytes)
    assert (buffer.group, buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (group, num_nvl_bytes, 0)
    assert num_nvl_bytes > 0
    Buffer.set_num_sms(20)
    return buffer


def local_experts(ranks: Ranks) -> tuple[Tensor, Tensor]:
    per_rank = E // ranks.world_size
    mine = slice(ranks.rank * per_rank, (ranks.rank + 1) * per_rank)
    up, down = (w[mine].clone().requires_grad_() for w in draw_experts())
    return up, down


def run_legacy(ranks: Ranks) -> dict[str, Any]:
    buffer = make_legacy_buffer(ranks.group, D)
    x_TD, ids_TK, weights_TK = draw(ranks.rank)
    x_TD.requires_grad_()
    weights_TK.requires_grad_()
    up_eDF, down_eFD = local_experts(ranks)
    rows, row_ids, row_probs, counts, handle = LegacyDispatch.apply(x_TD, ids_TK, weights_TK, E, buffer)
    assert counts.tolist() == [int((row_ids == e).sum()) for e in range(len(up_eDF))]
    out = torch.zeros_like(rows)
    for expert in range(len(up_eDF)):
        here = row_ids == expert
        mine = here.any(1).nonzero().squeeze(1)
        prob = torch.where(here, row_probs, 0)[mine].sum(1)
        out = out.index_add(0, mine, prob[:, None] * one_expert(rows[mine], up_eDF[expert], down_eFD[expert]))
    y_TD = LegacyCombine.apply(out, handle, buffer)
    (y_TD * coefficients(y_TD)).sum().backward()
    return {
        "y": y_TD.detach(),
        "x": x_TD.grad,
        "weights": weights_TK.grad,
        "up": up_eDF.grad,
        "down": down_eFD.grad,
    }


class HybridDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, routing_map, probs, per_rank, buffer, budget):
        rows, row_probs, scales, counts, handle = buffer.dispatch_with_permute(
            hidden=x,
            routing_map=routing_map,
            probs=probs,
            scaling_factor=None,
            num_of_experts_per_rank=per_rank,
            pad_multiple=PAD,
            num_permuted_tokens=budget,
            non_blocking=budget is not None,
            fuse_permute_dispatch=True,
        )
        assert scales is None
        ctx.buffer, ctx.handle = buffer, handle
        return rows, row_probs, counts, handle

    @staticmethod
    def backward(ctx, *grads):
        d_x, d_probs = ctx.buffer.combine_with_unpermute(
            hidden=grads[0], probs=grads[1], handle=ctx.handle, pad_multiple=PAD, fuse_unpermute_combine=True
        )
        return d_x, None, d_probs, None, None, None


class HybridCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, handle, buffer, count):
        y, _ = buffer.combine_with_unpermute(
            hidden=rows, handle=handle, pad_multiple=PAD, fuse_unpermute_combine=True
        )
        ctx.buffer, ctx.handle, ctx.count = buffer, handle, count
        return y

    @staticmethod
    def backward(ctx, *grads):
        d_rows, *_ = ctx.buffer.dispatch_with_permute(
            hidden=grads[0],
            scaling_factor=None,
            handle=ctx.handle,
            pad_multiple=PAD,
            num_permuted_tokens=ctx.count,
            fuse_permute_dispatch=True,
        )
        return d_rows, None, None, None


def run_hybrid(ranks: Ranks, budget: int | None) -> dict[str, Any]:
    HybridEPBuffer = imported("deep_ep").HybridEPBuffer
    assert "fuse_permute_dispatch" in inspect.signature(HybridEPBuffer.dispatch_with_permute).parameters
    x_TD, ids_TK, weights_TK = draw(ranks.rank)
    per_rank = E // ranks.world_size
    buffer = HybridEPBuffer(
        group=ranks.group,
        hidden_dim=D,
        max_num_of_tokens_per_rank=len(x_TD),
        num_local_experts=per_rank,
        use_fp8=False,
        num_sms_dispatch_api=16,
        num_sms_combine_api=16,
    )
    x_TD.requires_grad_()
    weights_TK.requires_grad_()
    spare_TK = torch.where(ids_TK < 0, E, ids_TK)
    map_TE = torch.zeros(len(x_TD), E + 1, dtype=torch.bool).scatter(1, spare_TK, True)[:, :E]
    probs_TE = torch.zeros(len(x_TD), E + 1).scatter(1, spare_TK, weights_TK)[:, :E]
    up_eDF, down_eFD = local_experts(ranks)
    rows, row_probs, counts, handle = HybridDispatch.apply(x_TD, map_TE, probs_TE, per_rank, buffer, budget)
    over_budget = torch.zeros(1, dtype=torch.bool) | (handle[-1] != 0)
    assert not over_budget
    counts = counts.to(torch.int64)
    assert len(rows) == (counts.sum() if budget is None else budget)
    parts = rows.split([*counts.tolist(), len(rows) - int(counts.sum())])
    outputs = [one_expert(part, up_eDF[e], down_eFD[e]) for e, part in enumerate(parts[:per_rank])]
    out = torch.cat([*outputs, parts[-1]]) * row_probs[:, None]
    y_TD = HybridCombine.apply(out, handle, buffer, counts.sum() if budget is None else budget)
    (y_TD * coefficients(y_TD)).sum().backward()
    return {
        "y": y_TD.detach(),
        "x": x_TD.grad,
        "weights": weights_TK.grad,
        "up": up_eDF.grad,
        "down": down_eFD.grad,
    }


def compare(results: list[dict[str, Any]], world: int) -> None:
    expected = reference(world)
    for rank, result in enumerate(results):
        for name in ("y", "x", "weights"):
            torch.testing.assert_close(result[name].double(), expected[name][rank], rtol=1e-5, atol=1e-5)
    for name in ("up", "down"):
        together = torch.cat([result[name] for result in results]).double()
        torch.testing.assert_close(together, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_the_deepep_back_end(pool: Pool, world: int) -> None:
    compare(pool.run(world, run_legacy), world)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("budget", [None, 96], ids=["blocking", "static budget"])
def test_the_hybridep_back_end(pool: Pool, world: int, budget: int | None) -> None:
    compare(pool.run(world, run_hybrid, budget), world)


def test_both_back_ends_give_the_same_bits_twice(pool: Pool) -> None:
    for job, arguments in ((run_legacy, ()), (run_hybrid, (None,))):
        first, second = (pool.run(4, job, *arguments) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
