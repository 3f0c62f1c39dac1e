"""Rows of the fp8 codec, received once, to expert-major rows, on the host's side of `expand.cu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels import jit
from imbrex.kernels.routed import Routed

EXPAND, EXPAND_ROWS = (
    jit.Variant(source="expand.cu", entry=entry) for entry in ("expand_fp8", "expand_fp8_rows")
)
BLOCKS, THREADS = 1056, 256
BLOCK = 128
"""Values that share a scale."""


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
    _launch(load(EXPAND, x_TD.device), received_MB, x_TD, routed, rank, rows_RD)
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
    own tokens are what the codec would have written, to the bit."""
    rows_RD = x_TD.new_empty(num_rows, x_TD.shape[1], dtype=torch.float8_e4m3fn)
    scales_RB = x_TD.new_empty(num_rows, x_TD.shape[1] // BLOCK, dtype=torch.float32)
    _launch(load(EXPAND_ROWS, x_TD.device), received_MB, x_TD, routed, rank, rows_RD, scales_RB)
    return rows_RD, scales_RB


def _launch(
    kernel: Any, received_MB: Tensor, x_TD: Tensor, routed: Routed, rank: int, *results: Tensor
) -> None:
    _, ranks, most, choices = routed.position_LWTK.shape
    blocks = BLOCKS if x_TD.is_cuda else 2
    args = [
        *(received_MB, x_TD, routed.position_LWTK, routed.recv_row_LWT, routed.tokens_LW),
        *(ranks, rank, most, choices, x_TD.shape[1], received_MB.stride(-2), *results, blocks),
    ]
    kernel.launch(grid=blocks, block=THREADS, args=args)
