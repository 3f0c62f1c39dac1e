"""What the routing kernel is given."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from imbrex.contracts import Placement
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.routed import Routed, Tables


def address_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def route_args(
    shape: lay.Shape,
    placement: Placement,
    room: int,
    ids: Tensor,
    weights: Tensor,
    tokens: Tensor | None,
    routed: Routed,
    at: tuple[int, int, int],
    tally: Tensor | None,
    tables: Tables,
    *,
    balanced: bool,
    traffic: Tensor | None = None,
) -> ctypes.Structure:
    """`at`: where ids, scratch and token counts lie in the heap."""
    most = routed.position_LWTK.shape[2]
    if tokens is None and (ids.shape[-1] != shape.choices or ids.shape[-2] > most):
        raise ValueError(
            f"exchange: ids of shape {tuple(ids.shape)}; here there is room for at most {most} tokens of "
            f"{shape.choices} choices"
        )
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    return lay.Route(
        *map(address_of, (ids, weights, tokens, *tables)),
        *map(address_of, (routed.position_LWTK, routed.weights_LWTK, routed.recv_row_LWT)),
        *map(address_of, (routed.send_row_LTW, routed.counts_Le, routed.totals_L4, routed.tokens_LW)),
        *(address_of(tally), address_of(traffic), *at),
        *(ids.shape[-2], most, shape.choices, shape.experts, shape.most_slots, shape.alignment),
        *(shape.row_capacity, shape.token_capacity, shape.tensor, room > 0, placement.num_slots),
        room if balanced else 0,
    )


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
