"""Down with others' rows first, and the sums home: one launch in place of the last product and a combine.

Bits and protocol are those of `launch_gemm` and of `NvlinkExchange.combine`: a rank that cannot take this way
takes those two, and its peers need not know. `fused/others_first.cu` says who sums when.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

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
from imbrex.kernels.gemm.tiling import SHARED
from imbrex.kernels.jit import ByValue, Variant
from imbrex.kernels.routing.routed import Routed
from imbrex.kernels.structs import struct

SOURCE, ENTRY = "fused/others_first.cu", "others_first"
OTHERS_FIRST = struct(SOURCE, "OthersFirst")
MOST_LOCAL = OTHERS_FIRST.ends.size // 8
EPILOGUES = (Epilogue.PLAIN, Epilogue.WEIGHTED)
TILE_ROWS, TILE_COLUMNS = SHARED.block_m, SHARED.block_n
LESS_DEPTH = 2048
"""Width F from which experts' weights, which are read twice, take longer than what sums gain."""


def first_variant(epilogue: Epilogue, local_ranks: int = 1) -> Variant:
    """The kernel for so many ranks a launch."""
    variant = gemm_variant(Layout.FORWARD, epilogue, SHARED)
    defines = (*variant.defines, ("LOCAL_RANKS", local_ranks))
    return replace(variant, source=SOURCE, entry=ENTRY, defines=defines)


def shipped_variants() -> list[Variant]:
    return [first_variant(epilogue) for epilogue in EPILOGUES]


def why_not_first(product: Any) -> str | None:
    """Why a product that experts have left is not computed with others' rows first, or `None`."""
    if not isinstance(product, LeftProduct) or product.is_empty:
        return "the experts have not left a product of imbrex's own kernels"
    if product.own_e2 is None:
        return "nobody has looked for the own rows of every expert"
    if not product.tiles:
        return "the product that makes its rows does not tell of them"
    inner = product.act_RF.shape[1]
    if inner >= LESS_DEPTH:
        return f"weights of experts of width {inner}, not less than {LESS_DEPTH}, would be read twice"
    if product.tiling() != SHARED:
        return "the product is cut into other tiles"
    return None


def experts_last(rows: float, experts: int, width: int, blocks: int) -> int:
    """How many experts of `rows` own rows each have an own tile for every block between them."""
    tiles = max(0.5, rows / TILE_ROWS - 0.5) * -(-width // TILE_COLUMNS)  # the one with others' rows is none
    return min(experts, math.ceil(blocks / tiles))


def others_first(
    exchange: NvlinkExchange,
    rows: Tensor,
    routed: Routed,
    products: Sequence[LeftProduct],
    out: Tensor,
    *,
    first: int,
    last: int | None = None,
    blocks: int | None = None,
    **sums: Any,
) -> None:
    """Queue every local rank's product, which makes its `rows`, and `exchange.combine(rows, routed, out=out,
    **sums)`.

    rows [L, row_capacity, D] bf16; out [T, D] ([L, max_tokens, D] with virtual ranks), contiguous. A `Groups`
    is used once.
    first: blocks of each rank that sum others' tokens while the others multiply, all but one at most. last:
    experts whose own tiles come last; `None`: all, or, with no such blocks, those of `experts_last`. blocks:
    of each rank; `None`: as many as fit. None of them changes a bit.
    """
    assert len(products) == exchange.local_ranks <= MOST_LOCAL
    variant = first_variant(products[0].epilogue, exchange.local_ranks)
    blocks = blocks or exchange.most_blocks(variant, (1, SHARED.threads, SHARED.smem))
    maps = b"".join(_maps(product, SHARED) for product in products)
    experts = len(products[0].down_eDF)
    last = experts if last is None and first else last
    if last is None:
        own = routed.max_tokens * exchange.shape.choices / (experts * exchange.shape.ranks)
        last = experts_last(own, experts, rows.shape[-1], blocks)
    exchange.combine_beside(
        variant,
        (blocks, SHARED.threads, SHARED.smem, 1),
        [_args(products, rows, min(first, blocks - 1), min(last, experts)), ByValue(maps)],
        rows,
        routed,
        out=out,
        **sums,
    )
    check_products(rows.get_device())


def _args(products: Sequence[LeftProduct], rows: Tensor, first_blocks: int, last: int) -> ctypes.Structure:
    """`fused::OthersFirst`: the products of all local ranks."""
    first = products[0]
    return OTHERS_FIRST(
        ends=_addresses([product.groups.ends_e for product in products]),
        own=_addresses([product.own_e2 for product in products]),
        counter=_addresses([product.groups.other_counter for product in products]),
        written=_addresses([product.groups.written for product in products]),
        weights=_addresses([product.weights_R for product in products]),
        progress=_addresses([product.groups.progress for product in products]),
        bounds=_addresses([product.groups.bounds for product in products]),
        status=products_status(rows.get_device()),
        experts=first.groups.ends_e.numel(),
        columns=rows.shape[-1],
        k=first.act_RF.shape[1],
        first_blocks=first_blocks,
        last=last,
        tiles=first.tiles,
    )


def _maps(product: LeftProduct, tiling: Tiling) -> bytes:
    """`fused::Maps` of a rank."""
    a = ragged_map(product.act_RF, 64, tiling.box_m)
    b = stacked_map(product.down_eDF, 64, tiling.block_n)
    return b"".join(bytes(part.raw) for part in (a, a, b, b, ragged_map(product.out_RD, 64, 64)))


def _addresses(tensors: Sequence[Tensor | None]) -> Any:
    return (ctypes.c_void_p * MOST_LOCAL)(*(None if t is None else t.data_ptr() for t in tensors))
