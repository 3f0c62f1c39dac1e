"""Bytes of the fullest rank: experts, rows that a backward keeps, and what one layer at work holds besides.

A layer at work holds its rows before and after the experts, and beside them whichever is more: the experts'
activations, or what the exchange has in hand. With T tokens a rank, of which N leave and M come, over bytes
that is in a combine the float32 sums of T + M tokens, those that go and come, and the result. Over NVLink it
is a heap, and rows have room for all that could come. Two tiers have both: A tokens come to a pool of
P = T + A, and to the exchange inside the node the pool is its batch, by bytes or by kernels.

Layers on gloo ranks are measured beside it, with loads as uneven as they go (`tests/ranks/test_memory.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from imbrex.simulate import traffic
from imbrex.simulate.request import Request, World
from imbrex.simulate.run import FEW_FUSED, Layout, kernels_inside, parse_schedule

SPARED = 200 << 20
"""Bytes of rows for which a host asks how many there are, where a backward keeps them."""
SPARED_BY_ALL = 1 << 30
"""Bytes of all layers' rows together for which it does (both: `exchange/nvlink_fit`)."""
CHUNKS_LATE = 1.5
"""Chunks whose dispatch a schedule holds until the end, beside gloo layers of one, two and four chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tokens:
    """The tokens of the fullest rank, at worst. own: its batch. going, coming: to and from other ranks. away,
    here: to and from other nodes. inner_going, inner_coming: of the pool, to and from ranks of its node."""

    own: float
    going: float
    coming: float
    away: float
    here: float
    inner_going: float
    inner_coming: float

    @property
    def pool(self) -> float:
        return self.own + self.here


class _Hands(NamedTuple):
    """Numbers of rows that an exchange holds at once. moved: those that cross. again: copies of them. summed:
    tokens for which it sums. late: rows of a dispatch that a schedule of chunks keeps until its combine."""

    moved: float
    again: float
    summed: float
    late: float


def memory_of(request: Request, world: World, layout: Layout, fullest: float = 1.0) -> float:
    """Bytes of the fullest rank, which has so many times the mean's rows: of experts and of rows."""
    return memory_of_experts(request, layout) + memory_of_rows(request, world, layout, fullest)


def memory_of_experts(request: Request, layout: Layout) -> float:
    """Bytes of the experts of a rank with the most, with all that training keeps of a parameter."""
    shape = request.shape
    slots = math.ceil((shape.experts + layout.replicas) / layout.ep)
    parameters = slots * shape.parameters / shape.experts / layout.tp * request.layers
    # bf16 weights and gradients, fp32 weights and two moments of Adam.
    return parameters * (shape.value_bytes * 2 + 12 if request.training else shape.value_bytes)


def memory_of_rows(request: Request, world: World, layout: Layout, fullest: float = 1.0) -> float:
    """Bytes of the fullest rank's rows: those that the backwards of all layers need, those of one layer at
    work, and what its exchange has in hand."""
    shape = request.shape
    rows, inner = most_rows(request, world, layout, fullest), shape.inner // layout.tp
    values = rows * (shape.width + 3 * inner)
    if world.is_processor:
        values += rows * (shape.width + inner)  # results that are weighted later, and products of two factors
    row_bytes = shape.width * shape.value_bytes
    in_hand = _in_hand(request, world, layout, rows, fullest) * row_bytes
    heap = _heap(request, world, layout, fullest) * row_bytes
    at_work = 2 * rows * row_bytes + max(3 * rows * inner * shape.value_bytes, in_hand) + heap
    return at_work + request.training * request.layers * values * shape.value_bytes


def most_rows(request: Request, world: World, layout: Layout, fullest: float = 1.0) -> float:
    """Rows that the fullest rank has memory for: as many as come, or where kernels move them as many as
    could, wherever its host does not ask (`imbrex.transport.Nvlink(exact_rows=None)`)."""
    shape = request.shape
    coming = request.tokens * shape.top_k * layout.tp * fullest
    ranks, batch = _by_kernels(request, world, layout, fullest)
    if ranks == 1:
        return coming
    slots = math.ceil((shape.experts + layout.replicas) / layout.ep)
    limit = ranks * batch * min(shape.top_k, slots)
    spared = limit * (ranks - 1) // ranks * shape.width * shape.value_bytes
    many = spared >= SPARED or spared * request.layers >= SPARED_BY_ALL
    asks = request.training and layout.schedule == "serial" and batch > FEW_FUSED and many
    return coming if asks else limit


def _by_kernels(request: Request, world: World, layout: Layout, fullest: float) -> tuple[int, float]:
    """The number of ranks among which kernels move rows, one if bytes are moved, and the tokens of each."""
    if layout.transport == "nvlink":
        return layout.group, request.tokens
    if layout.transport == "tiered" and _kernels_inside(request, world):
        return world.fabric.node, _tokens(request, world, layout, fullest).pool
    return 1, request.tokens


def _kernels_inside(request: Request, world: World) -> bool:
    return kernels_inside(world.profile, request.shape, world.fabric.node)


def _heap(request: Request, world: World, layout: Layout, fullest: float) -> float:
    """The number of rows in the kernels' heap: two for every staged token, and two for its sums on each other
    rank."""
    ranks, batch = _by_kernels(request, world, layout, fullest)
    return (2 * ranks + 1) * batch if ranks > 1 else 0.0


def _in_hand(request: Request, world: World, layout: Layout, rows: float, fullest: float) -> float:
    """The most rows of the model's width that an exchange over bytes holds at once. In a backward these are
    the result, its gradient and the gradient as it is sent, without the sums of a forward."""
    if layout.transport == "nvlink":
        return 0.0
    of, sums = _tokens(request, world, layout, fullest), 4 / request.shape.value_bytes
    hands = (
        _hands_of_tiers(request, world, of, sums)
        if layout.transport == "tiered"
        else _hands(world, layout, of)
    )
    if request.training:
        at_once = 3 * of.own + hands.moved + hands.again
    else:
        # A processor's experts make their results one by one, and then put them together.
        together = rows if world.is_processor else 0.0
        at_once = sums * hands.summed + max(hands.moved + hands.again + sums * of.own, together)
    if layout.schedule == "serial":
        return at_once
    return at_once + hands.late * min(1.0, CHUNKS_LATE / parse_schedule(layout.schedule)[1])


def _hands(world: World, layout: Layout, of: _Tokens) -> _Hands:
    """The rows that an exchange among all ranks holds."""
    moved = of.going + of.coming
    again = {
        "hierarchical": of.away + of.here,
        "allgather": of.coming,
        "2dh": moved,
        # gloo's messages are one all-to-all (`transport/pipe.py`).
        "pipe": 0.0 if world.is_processor else moved,
    }.get(layout.transport, 0.0)
    late = of.own + moved + (again if layout.transport == "2dh" else 0.0)
    return _Hands(moved=moved, again=again, summed=of.own + of.coming, late=late)


def _hands_of_tiers(request: Request, world: World, of: _Tokens, sums: float) -> _Hands:
    """The rows that the exchange between nodes holds, and the one inside them unless its kernels have a
    heap."""
    moved, pool = of.away + of.here, of.own + of.here
    if _kernels_inside(request, world):
        return _Hands(moved=moved, again=2 * pool, summed=0.0, late=of.own + moved + pool)
    moved += of.inner_going + of.inner_coming
    late = of.own + moved + 2 * pool
    return _Hands(moved=moved, again=sums * pool, summed=pool + of.inner_coming, late=late)


def _tokens(request: Request, world: World, layout: Layout, fullest: float) -> _Tokens:
    """The tokens that move: as many leave as by choices without a preference, and `fullest` times as many
    come, at most all that there are."""
    shape, group, own = request.shape, layout.group, float(request.tokens)
    crowd = traffic.Crowd(
        ranks=group, tensor=layout.tp, experts=shape.experts, top_k=shape.top_k, tokens=own, row_bytes=1
    )
    node = min(group, world.fabric.node)
    nodes = group / node
    to_rank, to_node = (own * traffic.share_reached(crowd, ranks) for ranks in (1, node))
    if layout.transport == "allgather":
        to_rank = own
    away, inner = to_node * (nodes - 1), nodes * to_rank * (node - 1)
    here = min(fullest * away, (nodes - 1) * own)
    return _Tokens(
        own=own,
        going=to_rank * (group - 1),
        coming=min(fullest * to_rank * (group - 1), (group - 1) * own),
        away=away,
        here=here,
        inner_going=inner,
        inner_coming=min(fullest * inner, (node - 1) * (own + here)),
    )


__all__ = ["memory_of", "memory_of_experts", "memory_of_rows", "most_rows"]
