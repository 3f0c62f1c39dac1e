"""Rows of the fp8 codec, received once, to expert-major rows: the host's side of `expand.cu` and
`expand_rows.cu`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels import jit
from imbrex.kernels.experts_gemm import multiprocessors
from imbrex.kernels.routed import Routed

EXPAND = jit.Variant(source="expand.cu", entry="expand_fp8")
EXPAND_ROWS = jit.Variant(source="expand_rows.cu", entry="expand_fp8_rows")
BLOCKS, THREADS = 1056, 256
BLOCK = 128
"""Values that share a scale."""
SLOTS, MOST_WARPS, SHARED_BYTES = 2, 16, 220_000
"""Rows under way for a warp of `expand_rows.cu`; most warps of a block, as far as they fit into so much."""


def shipped_variants() -> list[jit.Variant]:
    return [EXPAND, EXPAND_ROWS]


def expand_fp8(
    received_MB: Tensor,
    x_TD: Tensor,
    routed: Routed,
    rank: int,
    num_rows: int,
    *,
    load: Callable[..., Any] = jit.load,
) -> Tensor:
    """bf16 [num_rows, D], expert-major; rows past the counts are unset.

    received_MB: uint8 rows as `Fp8.e4m3` writes them, by compact row, at multiples of 16 bytes. x_TD: bf16,
    the own tokens, which were never written. Decoded to the bit as the codec does.
    """
    rows_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
    _, ranks, most, choices = routed.position_LWTK.shape
    blocks = BLOCKS if x_TD.is_cuda else 2
    args = [
        *(received_MB, x_TD, routed.position_LWTK, routed.recv_row_LWT, routed.tokens_LW),
        *(ranks, rank, most, choices, x_TD.shape[1], received_MB.stride(-2), rows_RD, blocks),
    ]
    load(EXPAND, x_TD.device).launch(grid=blocks, block=THREADS, args=args)
    return rows_RD


def expand_fp8_rows(
    received_MB: Tensor,
    x_TD: Tensor,
    routed: Routed,
    rank: int,
    num_rows: int,
    *,
    load: Callable[..., Any] = jit.load,
) -> tuple[Tensor, Tensor]:
    """The same rows as they crossed: float8_e4m3fn [num_rows, D] and float32 scales [num_rows, D/128]. The
    own tokens are what the codec would have written, to the bit. D is a multiple of 512."""
    width = x_TD.shape[1]
    rows_RD = x_TD.new_empty(num_rows, width, dtype=torch.float8_e4m3fn)
    scales_RB = x_TD.new_empty(num_rows, width // BLOCK, dtype=torch.float32)
    _, ranks, most, choices = routed.position_LWTK.shape
    a_warp = SLOTS * (2 * width + 8) + 4 * (width // BLOCK)
    warps, blocks = min(MOST_WARPS, SHARED_BYTES // a_warp), 2
    if x_TD.is_cuda:
        blocks = multiprocessors(x_TD.get_device())
    where = received_MB, x_TD, routed.position_LWTK, routed.recv_row_LWT, routed.tokens_LW, rows_RD, scales_RB
    sizes = ranks, rank, most, choices, width, received_MB.stride(-2), blocks, warps
    packed = struct.pack("<7Q8i", *(tensor.data_ptr() for tensor in where), *sizes)
    load(EXPAND_ROWS, x_TD.device).launch(
        grid=blocks, block=32 * warps, smem=warps * a_warp, args=[jit.ByValue(packed)]
    )
    return rows_RD, scales_RB
