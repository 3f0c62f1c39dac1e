"""Compact rows with the own tokens in their place, and where expert-major rows come from, in a launch each:
the host's side of `rows/compact.cu`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels import jit
from imbrex.kernels.routing.routed import Routed
from imbrex.kernels.structs import struct

PLACE = jit.Variant(source="rows/compact.cu", entry="place_compact")
INDEX = jit.Variant(source="rows/compact.cu", entry="index_rows")
Compact = struct("rows/compact.cu", "Compact")
THREADS, SHARED_BYTES = 1024, 4 * 33
INDEX_THREADS, INDEX_BLOCKS = 256, 264


def shipped_variants() -> list[jit.Variant]:
    return [PLACE, INDEX]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Where a token's one row on this rank is, by source rank, then token.

    routed: the routing with that row as the position of a token's first choice, the others -1: what `pull`
        and `combine` take. source_R: int64; which token of its rank a row is, -1 past the rows that there
        are; source_int_R the same, int32. place_TW: int32; the number of an own token among those for a rank,
        or -1. received: int32 [1].
    sums: int32 [W * W + 2 W]: rows that ranks 0 to r send to every rank, those that this one sends, zeros.
    """

    routed: Routed
    source_R: Tensor
    source_int_R: Tensor
    place_TW: Tensor
    received: Tensor
    sums: Tensor


def place_compact(
    routed: Routed,
    traffic_WW: Tensor,
    rank: int,
    num_tokens: int,
    num_rows: int,
    *,
    load: Callable[..., Any] = jit.load,
) -> Placed:
    """Places compact rows. traffic_WW: int32; tokens that every rank has for every other, as `route` wrote
    them. num_rows: of `source_R`."""
    _, ranks, max_tokens, choices = routed.position_LWTK.shape
    device = traffic_WW.device
    placed = Placed(
        routed=routed.with_position(torch.empty_like(routed.position_LWTK)),
        source_R=torch.empty(num_rows, dtype=torch.int64, device=device),
        source_int_R=torch.empty(num_rows, dtype=torch.int32, device=device),
        place_TW=torch.empty(num_tokens, ranks, dtype=torch.int32, device=device),
        received=torch.empty(1, dtype=torch.int32, device=device),
        sums=torch.empty(ranks * ranks + 2 * ranks, dtype=torch.int32, device=device),
    )
    args = Compact(
        recv_row=routed.addresses.recv_row_LWT,
        send_row=routed.addresses.send_row_LTW,
        traffic=traffic_WW,
        position=placed.routed.position_LWTK,
        source=placed.source_R,
        place=placed.place_TW,
        received=placed.received,
        source_int=placed.source_int_R,
        sums=placed.sums,
        ranks=ranks,
        me=rank,
        max_tokens=max_tokens,
        choices=choices,
        rows=num_rows,
        tokens=num_tokens,
    )
    blocks = ranks * -(-max_tokens // THREADS)
    load(PLACE, device).launch(grid=blocks, block=THREADS, smem=SHARED_BYTES, args=[args])
    return placed


def index_rows(
    position: Tensor, weights: Tensor, num_rows: int, *, load: Callable[..., Any] = jit.load
) -> tuple[Tensor, Tensor]:
    """Inverts positions. position, weights: int32 and float32 [1, W, T, K]; row and gate weight of every
    choice.

    Returns of every row the token among those of all ranks, int64 [num_rows], and the weight, float32; of
    padding -1 and 0.
    """
    source_R = torch.full((num_rows,), -1, dtype=torch.int64, device=position.device)
    weights_R = torch.zeros(num_rows, dtype=torch.float32, device=position.device)
    blocks = INDEX_BLOCKS if position.is_cuda else 2
    args = [position, weights, position.numel(), position.shape[-1], num_rows, source_R, weights_R, blocks]
    load(INDEX, position.device).launch(grid=blocks, block=INDEX_THREADS, args=args)
    return source_R, weights_R
