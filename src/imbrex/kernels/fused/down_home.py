"""Down and the sums home: one launch in place of the experts' last product and a combine.

Bits and protocol are those of `launch_gemm` and of `NvlinkExchange.combine` with the same `pieces`: a rank
that cannot take this way takes those two, and its peers need not know. `fused/down_home.cu` says who sums
when.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.ffn.ffn import LeftProduct
from imbrex.kernels.gemm.gemm import (
    Epilogue,
    Layout,
    Tiling,
    check_products,
    gemm_variant,
    products_status,
    ragged_map,
    stacked_map,
)
from imbrex.kernels.gemm.tiling import gemm_choices
from imbrex.kernels.jit import ByValue, Variant
from imbrex.kernels.routing.routed import Routed
from imbrex.kernels.structs import struct

SOURCE, ENTRY = "fused/down_home.cu", "down_and_sums"
DOWN = struct(SOURCE, "Down")
MOST_LOCAL, MOST_PARTS = DOWN.ends.size // 8, DOWN.slice_end.size // 4
EPILOGUES = (Epilogue.PLAIN, Epilogue.WEIGHTED)
TILE = 256
"""Columns that parts are multiples of: of the widest tile."""
PIECE = 8
"""Tokens that a warp draws at once."""
MOST_TERMS = 32
"""Choices and ranks whose terms a warp can hold: a lane each."""


LEAST_DEPTH, LEAST_TOKENS = 4096, 4096
"""Width F of experts, and tokens of a rank, from which a layer gains from sums beside down."""


class Cut(NamedTuple):
    """How the result's columns are cut. parts: of all of them, summed apart, each of as many tiles. slices:
    ends, in parts, of what is computed together."""

    parts: int
    slices: tuple[int, ...]


def cut_of(width: int, parts: int = MOST_PARTS) -> Cut:
    """Cuts rows of `width` values into at most `parts` parts of two tiles or more. A slice is half of what is
    left, rounded down: the last one's sums have nothing beside them, and one of all would have none.

    Example: 7168 values are 28 tiles, 7 parts of 4; 3 of them are computed first, then 2, 1 and 1.
    """
    tiles = -(-width // TILE)
    each = max(2, -(-tiles // min(parts, MOST_PARTS)))
    parts, ends = -(-tiles // each), [0]
    while ends[-1] < parts:
        ends.append(ends[-1] + max(1, (parts - ends[-1]) // 2))
    return Cut(parts=parts, slices=tuple(ends[1:]))


def pieces_of(cut: Cut, tokens: int = PIECE) -> tuple[int, int, int]:
    """`pieces` of a combine whose flags are those of this kernel."""
    return tokens, cut.parts, lay.combine_pieces(lay.SMALL_TOKENS + 1)[2]


class How(NamedTuple):
    """How a launch goes about it, which changes no bit. cut, piece (tokens that a warp draws at once): the
    same on all ranks. blocks: of each rank; `None`: as many as fit. beside: idle warps sum beside the
    product."""

    cut: Cut | None = None
    piece: int = PIECE
    blocks: int | None = None
    beside: bool = True


def down_variant(epilogue: Epilogue, tiling: Tiling, local_ranks: int = 1) -> Variant:
    """The kernel for so many ranks a launch."""
    variant = gemm_variant(Layout.FORWARD, epilogue, tiling)
    defines = (*variant.defines, ("LOCAL_RANKS", local_ranks))
    return replace(variant, source=SOURCE, entry=ENTRY, defines=defines)


def shipped_variants() -> list[Variant]:
    """One for every way that down is cut and stored."""
    choices = [c for c in gemm_choices() if c.layout is Layout.FORWARD and c.epilogue in EPILOGUES]
    return [down_variant(choice.epilogue, choice.tiling) for choice in choices if not choice.tiling.is_tall]


def why_not_sums(tokens: int, width: int, inner: int, choices: int, ranks: int) -> str | None:
    """Why sums of a call with at most `tokens` tokens a rank do not go home beside the product of experts of
    width `inner`, or `None`; the same on all ranks."""
    if tokens < LEAST_TOKENS:
        return f"{tokens} tokens a rank are fewer than {LEAST_TOKENS}: sums beside take longer than behind"
    if choices + ranks > MOST_TERMS:
        return f"{choices} choices and {ranks} ranks are more than {MOST_TERMS} terms of a sum"
    if cut_of(width).parts < 2:
        return f"rows of {width} values have no two parts of {2 * TILE}"
    if inner < LEAST_DEPTH:
        return f"products of {inner} values are shorter than what sums take beside them, {LEAST_DEPTH}"
    return None


def down_and_sums(
    exchange: NvlinkExchange,
    rows: Tensor,
    routed: Routed,
    products: Sequence[LeftProduct],
    out: Tensor,
    *,
    weighted: bool = False,
    addend: Tensor | None = None,
    how: How = How(),  # noqa: B008 (immutable)
) -> None:
    """Queue every local rank's product, which makes its `rows`, and `exchange.combine(rows, routed,
    weighted=weighted, addend=addend, out=out, pieces=pieces_of(how.cut, how.piece))`.

    rows [L, row_capacity, D] bf16; out [T, D] ([L, max_tokens, D] with virtual ranks), contiguous. A `Groups`
    is used once.
    """
    assert len(products) == exchange.local_ranks <= MOST_LOCAL
    tiling, cut = products[0].tiling(), how.cut or cut_of(rows.shape[-1])
    variant = down_variant(products[0].epilogue, tiling, exchange.local_ranks)
    blocks = how.blocks or exchange.most_blocks(variant, (tiling.cluster, tiling.threads, tiling.smem))
    maps = b"".join(_maps(product, tiling) for product in products)
    exchange.combine_beside(
        variant,
        (blocks, tiling.threads, tiling.smem, tiling.cluster),
        [_down_args(products, rows, cut, beside=how.beside), ByValue(maps)],
        rows,
        routed,
        out=out,
        weighted=weighted,
        addend=addend,
        pieces=pieces_of(cut, how.piece),
    )
    check_products(rows.get_device())


def _down_args(products: Sequence[LeftProduct], rows: Tensor, cut: Cut, *, beside: bool) -> ctypes.Structure:
    """`fused::Down`: the products of all local ranks, and the order of their columns."""
    first = products[0]
    return DOWN(
        ends=_addresses([product.groups.ends_e for product in products]),
        counter=_addresses([product.groups.counter for product in products]),
        written=_addresses([product.groups.written for product in products]),
        weights=_addresses([product.weights_R for product in products]),
        status=products_status(rows.get_device()),
        experts=first.groups.ends_e.numel(),
        columns=rows.shape[-1],
        k=first.act_RF.shape[1],
        slices=len(cut.slices),
        slice_end=(ctypes.c_int32 * MOST_PARTS)(*cut.slices),
        beside=beside,
    )


def _maps(product: LeftProduct, tiling: Tiling) -> bytes:
    """`fused::DownMaps` of a rank."""
    a, b, out = product.act_RF, product.down_eDF, product.out_RD
    maps = (
        ragged_map(a, 64, tiling.box_m),
        stacked_map(b, 64, tiling.block_n // tiling.cluster),
        ragged_map(out, 64, 64),
    )
    return b"".join(bytes(part.raw) for part in maps)


def _addresses(tensors: Sequence[Tensor | None]) -> Any:
    return (ctypes.c_void_p * MOST_LOCAL)(*(None if t is None else t.data_ptr() for t in tensors))
