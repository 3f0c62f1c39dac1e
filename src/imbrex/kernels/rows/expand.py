"""Rows of the fp8 codec, received once, to expert-major rows, on the host's side of `rows/expand.cu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels import jit
from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.routing.routed import Routed
from imbrex.kernels.structs import struct

EXPAND_ROWS, EXPAND = (
    jit.Variant(source="rows/expand.cu", entry="expand_fp8", defines=(("DECODE", decode),))
    for decode in (0, 1)
)
Expansion = struct("rows/expand.cu", "Expansion")
BLOCK = 128
"""Values that share a scale."""
SLOTS, MOST_WARPS, SHARED_BYTES = 2, 16, 220_000
"""Rows that a warp has under way; most warps of a block, as far as they fit into so much."""


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
    """bf16 [num_rows, D], expert-major; rows past the counts are unset. D is a multiple of 512.

    received_MB: uint8 rows as `Fp8.e4m3` writes them, by compact row, at multiples of 16 bytes. x_TD: bf16,
    the own tokens, which were never written. Decoded to the bit as the codec does.
    """
    rows_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
    _launch(load(EXPAND, x_TD.device), received_MB, x_TD, routed, rank, rows_RD, None)
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
    """Expert-major rows as they crossed: float8_e4m3fn [num_rows, D] and float32 scales [num_rows, D/128].
    The own tokens are what the codec would have written, to the bit."""
    width = x_TD.shape[1]
    rows_RD = x_TD.new_empty(num_rows, width, dtype=torch.float8_e4m3fn)
    scales_RB = x_TD.new_empty(num_rows, width // BLOCK, dtype=torch.float32)
    _launch(load(EXPAND_ROWS, x_TD.device), received_MB, x_TD, routed, rank, rows_RD, scales_RB)
    return rows_RD, scales_RB


def _launch(
    kernel: Any,
    received_MB: Tensor,
    x_TD: Tensor,
    routed: Routed,
    rank: int,
    rows_RD: Tensor,
    scales_RB: Tensor | None,
) -> None:
    _, ranks, max_tokens, choices = routed.position_LWTK.shape
    width = x_TD.shape[1]
    scale_bytes = 4 * (width // BLOCK)
    # A warp's slots, their barriers, and room to quantise in.
    slot = 2 * width + (scale_bytes if scales_RB is None else 0)
    a_warp = SLOTS * (slot + 8) + scale_bytes
    warps = min(MOST_WARPS, SHARED_BYTES // a_warp)
    blocks = multiprocessors(x_TD.get_device()) if x_TD.is_cuda else 2
    args = Expansion(
        received=received_MB,
        x=x_TD,
        position=routed.position_LWTK,
        recv_row=routed.recv_row_LWT,
        tokens=routed.tokens_LW,
        rows=rows_RD,
        scales=scales_RB,
        ranks=ranks,
        me=rank,
        max_tokens=max_tokens,
        choices=choices,
        width=width,
        pitch=received_MB.stride(-2),
        blocks=blocks,
        warps=warps,
    )
    kernel.launch(grid=blocks, block=32 * warps, smem=warps * a_warp, args=[args])
