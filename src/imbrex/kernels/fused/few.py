"""Dispatch of a small batch and its experts in one launch: the host's side of `fused/few.cu`.

In place of `NvlinkExchange.dispatch_small` and `ffn.both.run_both`, with their bits, where it is the faster
way (`why_slower`), or asked for: `Nvlink(one_kernel=True)`. Peers need not know: they see the same words,
tokens and flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.exchange.groups import RowGroups, empty_groups
from imbrex.kernels.exchange.launches import SmallCall
from imbrex.kernels.exchange.variants import REDUCE_BEHIND
from imbrex.kernels.ffn.both import BOTH, MOST_EXPERTS, both_maps, both_variant, shared_bytes
from imbrex.kernels.ffn.glue import COUNTERS
from imbrex.kernels.gemm.gemm import check_products, products_status
from imbrex.kernels.jit import ByValue, KernelError, Variant
from imbrex.kernels.routing.routed import Routed
from imbrex.kernels.structs import struct

SOURCE, ENTRY = "fused/few.cu", "dispatch_and_experts"
FEW = struct(SOURCE, "Few")
Weights = tuple[Tensor, Tensor]
MOST_LOCAL = 4
"""Ranks of a launch, each with six tensor maps among its arguments."""
STATIC_BYTES = 1024
"""Bytes of shared memory that the kernel has besides what a launch asks for, at most."""
THREADS = 512
"""Threads of a block, all of which route: more leave too few registers for those that multiply."""
DISPATCHING, DISPATCHING_TOKENS = 32, 16
"""Multiprocessors that dispatch, up to so many tokens of a rank: so more begin with weights. As many push as
of any larger number (`lay.small_pushers`), since peers wait for those. With more tokens all that a dispatch
alone takes place rows (docs/LOG.md, 2026-11-28, "the one kernel is faster")."""
MOST_TOKENS, MOST_READ = 2, 512 << 20
"""Tokens of a rank, and bytes of weights to read, up to which one launch is faster."""


class Computed(NamedTuple):
    """Experts' results, weighted, [L, row_capacity, D], the routing of their rows and its groups. behind: for
    a combine right behind (`Sums`)."""

    out: Tensor
    routed: Routed
    groups: RowGroups
    behind: int


def few_variant(*, local_ranks: int = 1) -> Variant:
    """The kernel for so many ranks a launch."""
    both, routes = both_variant(weighted=True), (("ROUTE_THREADS", THREADS), ("ROUTE_FIRST", 0))
    return replace(
        both, source=SOURCE, entry=ENTRY, defines=(*both.defines, ("LOCAL_RANKS", local_ranks), *routes)
    )


def shipped_variants() -> list[Variant]:
    return [few_variant(), REDUCE_BEHIND]


def dispatching_sms(tokens: int, sms: int) -> int:
    """The multiprocessors that dispatch, of `sms` at most, where the rank with most has so many tokens."""
    return min(sms, DISPATCHING) if tokens <= DISPATCHING_TOKENS else sms


def why_slower(tokens: int, rows: int, sizes: Sequence[int]) -> str | None:
    """Why a dispatch of its own is faster, or `None`. tokens, rows: of the rank with most, and of a rank in
    the mean. sizes: its experts, D and F.

    Captured layers on two H200: 3 to 6 % less with 1 and 2 tokens a rank of Qwen3 and with 1 of Qwen2-MoE;
    from 4 on 2 % less to 3 % more; of DeepSeek-V3 1 % more with 1 (docs/LOG.md, 2026-11-28, "the one kernel
    on two GPUs").
    """
    experts, width, inner = sizes
    if tokens > MOST_TOKENS:
        return f"one kernel is faster up to {MOST_TOKENS} tokens a rank only"
    if 6 * width * inner * min(rows, experts) > MOST_READ:
        return f"one kernel is faster up to {MOST_READ >> 20} MiB of weights only"
    return None


def why_not_few(exchange: NvlinkExchange, small: SmallCall, experts: int) -> str | None:
    """Why one launch does not do this dispatch and compute so many experts of a rank, or `None`."""
    blocks = exchange.most_blocks() // exchange.local_ranks
    if small.sms > blocks:
        return f"a rank has {blocks} multiprocessors, and is to dispatch on {small.sms}"
    if experts > MOST_EXPERTS:
        return f"a rank has {experts} experts, {MOST_EXPERTS} at most"
    if max(small.shared, shared_bytes(experts)) > lay.SHARED_BYTES - STATIC_BYTES:
        return "routing, or a list of the experts, does not fit a block's shared memory"
    return None


def dispatch_and_experts(
    exchange: NvlinkExchange,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    experts: Sequence[Weights],
    num_sms: int = lay.SMALL_SMS,
) -> Computed:
    """Queue a small dispatch of `inputs`, (x, ids, weights, tokens) as `dispatch_small` takes them, and the
    experts of its rows. Arguments are those of `run_few`; KernelError where `why_not_few` says why."""
    x, ranks, (_, down_eDF) = inputs[0], exchange.local_ranks, experts[0]
    slots, _, inner = down_eDF.shape
    room = exchange.shape.row_capacity
    groups = empty_groups(ranks, room, slots, COUNTERS, x.device)
    small = exchange.small_call(inputs, num_sms, groups, None, {})
    why = why_not_few(exchange, small, slots)
    if why is not None:
        raise KernelError(f"one launch for dispatch and experts: {why}; take two")
    act, out = x.new_empty(ranks, room, inner), torch.empty_like(small.rows)
    behind = run_few(exchange, small, experts, (act, out))
    return Computed(out, small.routed, groups, behind)


def run_few(
    exchange: NvlinkExchange,
    small: SmallCall,
    experts: Sequence[Weights],
    memory: tuple[Tensor, Tensor],
) -> int:
    """Queue a small dispatch, with the groups of its rows, and their experts; returns `behind` for a combine
    right behind. All contiguous bf16.

    experts: gate_up_eGD and down_eDF of every local rank, of as many experts each. memory: act [L, R, F] and
    the results [L, R, D], of at most as many rows as the dispatch has room for. Multiprocessors that do not
    dispatch begin with weights, the others compute when they have dispatched.
    """
    (act, out), ranks, (_, down_eDF) = memory, exchange.local_ranks, experts[0]
    blocks = exchange.most_blocks() // ranks
    assert len(experts) == ranks <= MOST_LOCAL
    assert small.sms <= blocks, "every block has a multiprocessor: they wait for each other"
    assert out.shape[1] <= small.rows.shape[1]
    args = _few_args(small, out, tuple(down_eDF.shape))
    block = blocks, THREADS, max(small.shared, shared_bytes(len(down_eDF)))
    variant, maps = few_variant(local_ranks=ranks), _maps(small, experts, act, out)
    exchange.launch_small(variant, block, small, [args, maps])
    check_products(out.get_device())
    return args.movers


def _few_args(small: SmallCall, out: Tensor, sizes: tuple[int, ...]) -> Any:
    """`fused::Few`; the kernel sets what differs among the launch's ranks. sizes: experts, D and F."""
    none = dict.fromkeys(("hits", "weights", "counter", "rows", "act", "up_scales", "down_scales"))
    experts, width, inner = sizes
    status = products_status(out.get_device())
    stride = out.stride(0) * out.element_size()
    return FEW(
        both=BOTH(**none, status=status, experts=experts, width=width, inner=inner),
        result=out,
        stride=stride,
        result_bytes=stride,
        movers=small.sms - small.args.pushers,
    )


def _maps(small: SmallCall, experts: Sequence[Weights], act_LRF: Tensor, out_LRD: Tensor) -> ByValue:
    """`fused::FewMaps`."""
    each = zip(small.rows[:, : out_LRD.shape[1]], experts, act_LRF, out_LRD, strict=True)
    return ByValue(b"".join(bytes(both_maps(rows, *two, act, out).raw) for rows, two, act, out in each))


__all__ = [
    "MOST_TOKENS",
    "SOURCE",
    "dispatch_and_experts",
    "dispatching_sms",
    "few_variant",
    "run_few",
    "shipped_variants",
    "why_not_few",
    "why_slower",
]
