"""Arguments of the routing kernel."""

from __future__ import annotations

import ctypes
from typing import TypedDict

import torch
from torch import Tensor

from imbrex.contracts import Placement
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.routing.routed import Routed, Tables


class Choosing(TypedDict, total=False):
    """How a call of an exchange routes.

    tally: int32 [L, W, S]; choices of every rank for every slot are added to it. tables: of another placement
    of as many experts in the same slots; layers share a heap. balanced: replicas are chosen by the loads of
    this batch, as `split_balanced`; else in equal parts. traffic: int32 [L, W, W]; how many tokens of every
    rank every rank wants, its own included, is written to it (`route` alone).
    """

    tally: Tensor | None
    tables: Tables
    balanced: bool
    traffic: Tensor | None


def route_args(
    made: tuple[lay.Shape, Placement, int],
    ids: Tensor,
    weights: Tensor,
    tokens: Tensor | None,
    routed: Routed,
    at: tuple[int, int, int],
    tables: Tables,
    choosing: Choosing,
) -> ctypes.Structure:
    """The struct of the routing kernel.

    made: what the exchange was made for, and the slots for replicas. at: where ids, scratch and token counts
    lie in the heap. tables: those of `choosing`, or the exchange's own.
    """
    shape, placement, room = made
    most, to = routed.max_tokens, routed.addresses
    _check_choices(shape, ids, weights, tokens, most)
    return lay.Route(
        ids=ids,
        weights=weights,
        tokens=tokens,
        first_replica=tables[0],
        replica_slots=tables[1],
        rank_offsets=tables[2],
        position=to.position_LWTK,
        all_weights=to.weights_LWTK,
        recv_row=to.recv_row_LWT,
        send_row=to.send_row_LTW,
        counts=to.counts_Le,
        totals=to.totals_L4,
        all_tokens=to.tokens_LW,
        tally=choosing.get("tally"),
        traffic=choosing.get("traffic"),
        ids_at=at[0],
        counts_at=at[1],
        tokens_at=at[2],
        num_tokens=ids.shape[-2],
        max_tokens=most,
        choices=shape.choices,
        experts=shape.experts,
        most_slots=shape.most_slots,
        alignment=shape.alignment,
        row_capacity=shape.row_capacity,
        token_capacity=shape.token_capacity,
        tensor=shape.tensor,
        replicated=room > 0,
        slots=placement.num_slots,
        room=room if choosing.get("balanced") else 0,
    )


def _check_choices(shape: lay.Shape, ids: Tensor, weights: Tensor, tokens: Tensor | None, most: int) -> None:
    if tokens is None and (ids.shape[-1] != shape.choices or ids.shape[-2] > most):
        raise ValueError(
            f"exchange: ids of shape {tuple(ids.shape)}; here there is room for at most {most} tokens of "
            f"{shape.choices} choices"
        )
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    assert ids.is_contiguous()
    assert weights.is_contiguous()


def check_shape(placement: Placement, shape: lay.Shape, *, moves: bool) -> None:
    """ValueError where the kernels cannot serve. moves: rows, not only routing."""
    if placement.num_ranks * shape.tensor != shape.ranks or placement.num_experts != shape.experts:
        raise ValueError(
            f"exchange: a placement of {placement.num_experts} experts on {placement.num_ranks} ranks for "
            f"a shape of "
            f"{shape.experts} experts on {shape.ranks}"
        )
    if shape.choices > 32 or shape.row_bytes % 16:
        raise ValueError("exchange: at most 32 choices a token, and rows of a multiple of 16 bytes")
    if shape.ranks > (lay.MOST_RANKS if moves else lay.MAX_RANKS):
        raise ValueError(
            f"exchange: {shape.ranks} ranks; at most {lay.MOST_RANKS} exchange rows, {lay.MAX_RANKS} route "
            "(compact=False, expert=False)"
        )
