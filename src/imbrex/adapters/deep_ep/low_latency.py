"""DeepEP's low-latency calls: tokens to a block of rows for every local expert, and their weighted sums home.

Semantics: deepseek-ai/DeepEP, `deep_ep/buffers/legacy.py`, over one NVLink domain or any process group. The
rows of local expert e stand in `recv_x[e]`, from its first row on, by source rank, then token; the rows
behind them are not written. Example: 2 ranks of at most 4 tokens, 4 experts; rank 0's tokens want [0, 3] and
[0, 1], rank 1's one token wants [1, 0]. On rank 0 `recv_x` is [2, 8, D] and `recv_count` [3, 2]: expert 0 has
rank 0's tokens 0 and 1 and rank 1's token 0, expert 1 rank 0's token 1 and rank 1's token 0.

Data flow over NVLink: a kernel routes, torch moves its positions into the blocks, a kernel pulls tokens from
where they are to where they are returned; no copy, and no word with the host. On the way back a kernel takes
the weights to the experts' ranks, which DeepEP brings rows home for, and another sums: in float32 on every
rank, rounded to bfloat16 to cross, in float32 at home. Nothing is left for a receive hook to do.
A CUDA graph can capture both calls, behind one that was not captured, which makes the heap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from imbrex.adapters.deep_ep import events
from imbrex.adapters.deep_ep.backend import (
    MOST_TOKENS,
    Backend,
    dispatch_of,
    heard_by_all,
    kind_of_rows,
    why_not_stats,
    why_not_whole,
)
from imbrex.adapters.deep_ep.events import EventOverlap
from imbrex.adapters.deep_ep.hybrid_arrival import find_problem
from imbrex.adapters.deep_ep.hybrid_handle import BufferConfig, Inputs, Record
from imbrex.exchange import plan

Rows = Tensor | tuple[Tensor, Tensor]
Hook = Callable[[], None] | None
BLOCK, PACKED, LARGEST = 128, 4, 448.0
"""Values that share a scale; scales in an int32; the largest e4m3."""
LEAST = 1e-4
"""The least largest value of a block, which DeepEP takes for smaller ones."""
WHOLE = "pass the handle that low_latency_dispatch returned, whole"


class LowLatencyHandle(tuple):
    """The handle of a low-latency dispatch, with DeepEP's five fields: the token of every row on its source
    rank int32 [e, W * M], where the rows of every source begin (high word) and how many they are (low word)
    int64 [e, W], `num_max_dispatch_tokens_per_rank`, D, E. The first two are made when they are looked at."""

    record: Record
    backend: Backend
    rows: Tensor | None
    """The rows of `get_next_low_latency_combine_buffer`."""
    _where: tuple[Tensor, Tensor] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._where = self._where or _where(self.record, self.backend)
        return iter((*self._where, *tuple.__getitem__(self, slice(2, 5))))

    def __getitem__(self, at: Any) -> Any:
        return tuple(iter(self))[at]


def _where(record: Record, backend: Backend) -> tuple[Tensor, Tensor]:
    """The first two fields of a handle: the source token of every row, and by slot where the rows of each
    rank begin and how many they are."""
    permutation, slots, world = record.permutation, record.config.num_of_experts_per_rank, backend.world_size
    assert permutation is not None
    # Rows of no token are told by the last entry.
    room, position_NK = permutation.num_rows // slots, permutation.position_NK.long()
    owner_N, token_N = backend.origins(record.route)
    source_R, _ = permutation.index(torch.zeros_like(position_NK, dtype=torch.float32))
    token_R = torch.cat([token_N, token_N.new_zeros(1)])[source_R]
    key_NK = torch.where(position_NK < 0, -1, position_NK // room * world + owner_N[:, None])
    counts_eW = plan.count_choices(key_NK, slots * world).view(slots, world).long()
    begin_eW = counts_eW.cumsum(1) - counts_eW
    return token_R.int().view(slots, room), begin_eW << 32 | counts_eW


class LowLatency:
    """The low-latency calls of `Buffer`. Rows are bfloat16, a token's experts are all different."""

    _backend: Backend
    group_size: int
    rank: int

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of the tokens and sums that a heap has room for, twice; nothing is allocated by it."""
        return num_max_dispatch_tokens_per_rank * hidden * 2 * 2 * max(2, num_ranks)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing is left over by other calls."""

    @heard_by_all
    @torch.no_grad()
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, LowLatencyHandle, EventOverlap, Hook]:
        """Tokens to the experts that want them; e local experts, at most M tokens a rank.

        x: bfloat16 [T, D]. topk_idx: int64 [T, K]; -1 drops a choice. num_max_dispatch_tokens_per_rank: M,
            the same on every rank.
        cumulative_local_expert_recv_stats: int32 [e]; the counts are added to it.
        dispatch_wait_recv_cost_stats: taken, and nothing is added: calls do not wait for rows of one rank.
        use_fp8: rows cross as float8 e4m3 with a float32 scale for 128 values. round_scale: scales are powers
            of two. use_ue8m0: scales are their exponents, four in an int32; D is a multiple of 512.

        Returns rows bfloat16 [e, W * M, D], or float8 and scales [e, W * M, D / 128] with the rows side by
        side in memory (int32 [e, W * M, D / 512] of `use_ue8m0`); int32 [e], how many there are; the handle;
        the event; with `return_recv_hook` a hook, which has nothing left to do. Raises ValueError on every
        rank where one rank's input is wrong.
        """
        limit, call, inputs = num_max_dispatch_tokens_per_rank, "low_latency_dispatch", _inputs(x, topk_idx)
        problem = find_problem(self._backend, inputs, num_experts) or _why_not_dispatch(x, limit)
        problem = problem or why_not_stats(cumulative_local_expert_recv_stats, num_experts // self.group_size)
        problem = problem or _why_not_end(async_finish, return_recv_hook)
        if use_fp8 and not problem:
            problem = _why_not_fp8(x.shape[1], round_scale=round_scale, use_ue8m0=use_ue8m0)
        if use_fp8 and not problem:
            values, scales = quantise(x, round_scale=round_scale, packed=use_ue8m0)
            inputs = replace(inputs, hidden=values, scales=scales)
        per_rank = 0 if problem else num_experts // self.group_size
        config = BufferConfig(
            hidden_dim=x.shape[-1],
            max_num_of_tokens_per_rank=limit,
            num_of_experts_per_rank=per_rank,
            num_of_ranks_per_node=self.group_size,
        )
        settings = {
            "the number of experts": num_experts,
            MOST_TOKENS: limit,
            **kind_of_rows([] if problem else inputs.columns),
        }
        route, choices = self._backend.plan_choices(call, problem, inputs, config, settings)
        record = Record(route=route, choices=choices, config=config)
        blocks = self._backend.blocks(inputs, record, self.group_size * limit)
        counts_e = blocks.permutation.counts_e.int()
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats += counts_e
        handle = LowLatencyHandle((None, None, limit, x.shape[1], num_experts))
        handle.record = replace(blocks.record, permutation=blocks.permutation)
        handle.backend, handle.rows = self._backend, None
        return (
            _shaped(blocks.rows_RD, blocks.scales_RS, per_rank),
            counts_e,
            handle,
            events.end(async_finish),
            _nothing_left if return_recv_hook else None,
        )

    def get_next_low_latency_combine_buffer(self, handle: tuple) -> Tensor:
        """Rows bfloat16 [e, W * M, D] for a program to write into, and to combine with `zero_copy`."""
        handle = _ours(handle, "get_next_low_latency_combine_buffer")
        if handle.rows is None:
            size = _size_of(handle.record)
            device = handle.record.choices.ids_TK.device
            handle.rows = torch.empty(size, dtype=torch.bfloat16, device=device)
        return handle.rows

    @heard_by_all
    @torch.no_grad()
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Hook]:
        """Sums of every token's rows times their weights, in float32, rounded to bfloat16 where they cross.

        x: bfloat16 [e, W * M, D]; rows past the counts are not read. topk_idx: as dispatched. topk_weights:
            float32 [T, K]. use_logfmt: taken; rows are summed before they cross, and cross as bfloat16.
        zero_copy: the rows are those of `get_next_low_latency_combine_buffer(handle)`, whatever x is.
        out: bfloat16 [T, D], where the sums go. combine_wait_recv_cost_stats: as in the dispatch.

        Returns [T, D], the event, and a hook with `return_recv_hook`. Raises ValueError on every rank where
        one rank's input is wrong.
        """
        call = "low_latency_combine"
        if not isinstance(handle, LowLatencyHandle):
            self._backend.meet(call, WHOLE, {})
        own = _ours(handle, call)
        record, inputs = own.record, _inputs(x, topk_idx, topk_weights)
        rows = own.rows if zero_copy else x
        problem = _why_not_combine(rows, inputs, out, record) or _why_not_end(async_finish, return_recv_hook)
        problem = problem or self._backend.wrong_device(rows, topk_idx, topk_weights, out)
        width = {"the width of rows": record.config.hidden_dim}
        settings = {} if problem else width | dispatch_of(record.route)
        flat = x if rows is None or problem else rows.contiguous().view(-1, rows.shape[-1])
        y_TD = self._backend.weigh_home(call, problem, inputs, flat, record, settings)
        y_TD = y_TD if out is None else out.copy_(y_TD)
        return y_TD, events.end(async_finish), _nothing_left if return_recv_hook else None


def _nothing_left() -> None:
    """A hook that does nothing: rows are there when the stream comes to what follows the call."""


def _inputs(x: Tensor, ids_TK: Tensor, weights_TK: Tensor | None = None) -> Inputs:
    return Inputs(
        hidden=x.contiguous(), scales=None, map_TE=None, probs_TE=None, ids_TK=ids_TK, weights_TK=weights_TK
    )


def _shaped(rows_RD: Tensor, scales_RS: Tensor | None, slots: int) -> Rows:
    rows = rows_RD.view(slots, -1, rows_RD.shape[-1])
    if scales_RS is None:
        return rows
    scales = scales_RS.view(slots, -1, scales_RS.shape[-1])
    return rows, scales.transpose(1, 2).contiguous().transpose(1, 2)


def _size_of(record: Record) -> tuple[int, int, int]:
    slots = record.config.num_of_experts_per_rank
    assert record.permutation is not None
    return slots, record.permutation.num_rows // slots, record.config.hidden_dim


def _ours(handle: tuple, call: str) -> LowLatencyHandle:
    if not isinstance(handle, LowLatencyHandle):
        raise ValueError(f"deep_ep.Buffer.{call}: {WHOLE}")
    return handle


def _why_not_dispatch(x: Tensor, limit: int) -> str:
    if x.dtype != torch.bfloat16:
        return f"x is {x.dtype}; give bfloat16"
    if problem := why_not_whole(MOST_TOKENS, limit, 0):
        return problem
    if len(x) > limit:
        return f"{len(x)} tokens, num_max_dispatch_tokens_per_rank is {limit}; give at most as many"
    return ""


def _why_not_end(asynchronous: bool, hook: bool) -> str:
    return "async_finish and return_recv_hook; give one of them" if asynchronous and hook else ""


def _why_not_fp8(width: int, *, round_scale: bool, use_ue8m0: bool) -> str:
    if use_ue8m0 and not round_scale:
        return "use_ue8m0 without round_scale; exponents are of rounded scales, so give both"
    multiple = BLOCK * PACKED if use_ue8m0 else BLOCK
    return f"rows of {width} values; fp8 takes a multiple of {multiple}" if width % multiple else ""


def _why_not_combine(rows: Tensor | None, inputs: Inputs, out: Tensor | None, record: Record) -> str:
    if rows is None:
        return "zero_copy, but no rows were asked for; write into get_next_low_latency_combine_buffer(handle)"
    if tuple(rows.shape) != _size_of(record) or rows.dtype != torch.bfloat16:
        return f"x is {rows.dtype} {list(rows.shape)}; give bfloat16 {list(_size_of(record))}"
    ids_TK, weights_TK, tokens = inputs.ids_TK, inputs.weights_TK, record.route.num_tokens
    assert ids_TK is not None
    assert weights_TK is not None
    if ids_TK.dim() != 2 or len(ids_TK) != tokens or ids_TK.shape != weights_TK.shape:
        shapes = list(ids_TK.shape), list(weights_TK.shape)
        return f"topk_idx and topk_weights are {shapes[0]} and {shapes[1]}; give [{tokens}, K]"
    # On a GPU a look at values would be a host synchronisation.
    if ids_TK.device.type == record.choices.ids_TK.device.type == "cpu":
        same_TKK = ids_TK[:, :, None] == record.choices.ids_TK[:, None]
        if bool((~same_TKK.any(2) & (ids_TK != -1)).any()):
            return "topk_idx has experts that the dispatch did not have; give its topk_idx again"
    shape = [tokens, rows.shape[-1]]
    if out is not None and (list(out.shape) != shape or out.dtype != torch.bfloat16):
        return f"out is {out.dtype} {list(out.shape)}; give bfloat16 {shape}"
    return ""


def quantise(x_TD: Tensor, *, round_scale: bool, packed: bool) -> tuple[Tensor, Tensor]:
    """Rows as float8 e4m3, and a scale for every 128 values: float32 [T, D / 128], or exponents, four in an
    int32. Value = float8 * scale; scale = largest / 448, at least that of 1e-4."""
    blocks = x_TD.float().unflatten(1, (-1, BLOCK))
    scale = blocks.abs().amax(2, keepdim=True).clamp(min=LEAST) * (1 / LARGEST)
    inverse = scale.reciprocal()
    if round_scale:
        # The bits of a float32: its exponent, one higher where a fraction is left.
        bits = scale.view(torch.int32)
        exponent = (bits >> 23) + (bits & 0x7FFFFF != 0).int()
        scale, inverse = (exponent << 23).view(torch.float32), ((254 - exponent) << 23).view(torch.float32)
        if packed:
            values = (blocks * inverse).to(torch.float8_e4m3fn).flatten(1)
            return values, exponent[..., 0].to(torch.uint8).view(torch.int32)
    return (blocks * inverse).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).flatten(1), scale[..., 0]
