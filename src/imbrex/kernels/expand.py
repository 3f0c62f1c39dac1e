"""Rows of the fp8 codec, received once, to bf16 expert-major rows, on the host's side of `expand.cu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from imbrex.kernels import jit
from imbrex.kernels.routed import Routed

EXPAND = jit.Variant(source="expand.cu", entry="expand_fp8")
BLOCKS, THREADS = 1056, 256


def shipped_variants() -> list[jit.Variant]:
    return [EXPAND]


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
