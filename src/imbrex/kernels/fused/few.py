"""Dispatch of a small batch and its experts in one launch: the host's side of `fused/few.cu`.

In place of `NvlinkExchange.dispatch_small` and `ffn.both.run_both`, with their bits. Peers need not know:
they see the same words, tokens and flags. Not the default: its present ways were timed on one GPU alone,
where they gain up to 10 % (docs/nvlink.md).
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


class How(NamedTuple):
    """How a launch goes about it, which changes no bit. threads: of a block, 256, 512 or 640, all of which
    route; more leave too few registers for those that multiply. into_l2: steps of a block's first tile whose
    weights are asked into L2 while rows are placed, behind those that it has room for. fences: for the copy
    engine, 1: those that place rows and who waits for them; 0: the former alone, 2: the latter, which is
    enough.

    early: steps of its first tile whose weights a block asks for at once, 0: all that it has room for. pace:
    nanoseconds from one further step to the next, until rows are placed; 0: none until then, and none into
    L2. late: a tile is drawn when all of the one before has been asked for, 1: a block's second one, 2: all;
    0: as the one before begins.

    aside: a warp that asks for nothing says that a block has dispatched. quick: blocks take their tickets
    before their last tile is stored. stored: sums right behind begin when all blocks have said that their
    results are, and do not wait for the launch to end. parts: in which a row is placed, each by a warp, of
    which there are fewer than in a dispatch alone; 0: as many as there."""

    threads: int = 512
    into_l2: int = 8
    fences: int = 2
    early: int = 2
    pace: int = 600
    late: int = 2
    aside: int = 1
    quick: int = 1
    stored: int = 0
    parts: int = 0


PLAIN = How(into_l2=0, fences=1, early=0, pace=0, late=0, aside=0, quick=0)
"""The way without all that."""
BEST = ((16, 32, How()), (lay.SMALL_TOKENS, lay.MAX_BLOCKS, How()))
"""Up to so many tokens a rank: multiprocessors that dispatch, at most, and the way. The fastest of what was
timed on one H100 with 1, 4, 16 and 128 tokens (docs/LOG.md, 2026-11-28, "the one kernel is faster"), or
within 1 % of it. 32 or more, with which as many push as with all (`lay.small_pushers`): peers wait for it."""


class Computed(NamedTuple):
    """Experts' results, weighted, [L, row_capacity, D], the routing of their rows and its groups. behind: for
    a combine right behind (`Sums`)."""

    out: Tensor
    routed: Routed
    groups: RowGroups
    behind: int


def few_variant(*, local_ranks: int = 1, how: How = How()) -> Variant:  # noqa: B008 (immutable)
    """The kernel for so many ranks a launch."""
    both, routes = both_variant(weighted=True), (("ROUTE_THREADS", how.threads), ("ROUTE_FIRST", 0))
    ways = ("INTO_L2", how.into_l2), ("FENCES", how.fences), ("EARLY", how.early), ("PACE", how.pace)
    ends = ("LATE_DRAWS", how.late), ("TOLD_ASIDE", how.aside), ("QUICK_ENDS", how.quick)
    more = ("LOCAL_RANKS", local_ranks), *ways, *ends, *routes
    return replace(both, source=SOURCE, entry=ENTRY, defines=(*both.defines, *more))


def shipped_variants() -> list[Variant]:
    return [*dict.fromkeys(few_variant(how=how) for _, _, how in BEST), REDUCE_BEHIND]


def best_way(tokens: int, sms: int) -> tuple[int, How]:
    """The multiprocessors that dispatch, of `sms` at most, and the way, where the rank with most has so many
    tokens."""
    limit, how = next((limit, how) for up_to, limit, how in BEST if tokens <= up_to)
    return min(sms, limit), how


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
    *,
    how: How = How(),  # noqa: B008 (immutable)
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
    behind = run_few(exchange, small, experts, (act, out), how=how)
    return Computed(out, small.routed, groups, behind)


def run_few(
    exchange: NvlinkExchange,
    small: SmallCall,
    experts: Sequence[Weights],
    memory: tuple[Tensor, Tensor],
    *,
    how: How = How(),  # noqa: B008 (immutable)
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
    small.args.parts = how.parts or small.args.parts
    block = blocks, how.threads, max(small.shared, shared_bytes(len(down_eDF)))
    variant, maps = few_variant(local_ranks=ranks, how=how), _maps(small, experts, act, out)
    exchange.launch_small(variant, block, small, [args, maps])
    check_products(out.get_device())
    return args.movers + (how.stored * blocks << 16)


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
    "PLAIN",
    "SOURCE",
    "How",
    "best_way",
    "dispatch_and_experts",
    "few_variant",
    "run_few",
    "shipped_variants",
    "why_not_few",
]
