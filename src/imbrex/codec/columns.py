"""Encoded rows with the bytes of further columns behind them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from imbrex.codec.cast import as_bytes, from_bytes, wide
from imbrex.contracts import Codec


def write(values: list[Tensor], codec: Codec, dtype: torch.dtype) -> Tensor:
    """Encode rows, float32 or `dtype`, and put the bytes of further columns behind each."""
    encoded = codec.encode(values[0], dtype)
    if len(values) == 1:
        return encoded
    pieces = [encoded, *map(as_bytes, values[1:])]
    words = [wide(piece) for piece in pieces]
    alike = len({piece.dtype for piece in words}) == 1
    return torch.cat(words if alike else pieces, 1).view(torch.uint8)


def add_encoded(
    codec: Codec, width: int, dtype: torch.dtype, pieces: Sequence[tuple[Tensor, Tensor]], num_rows: int
) -> Tensor:
    """Rows of `write`, and the float32 columns behind them, summed by target row in the order of the pieces;
    a piece names a target once. Zero rows where nothing is added."""
    nbytes = codec.nbytes(width, dtype)
    tail = (pieces[0][0].shape[1] - nbytes) // 4
    sums = torch.zeros(num_rows, width + tail, dtype=torch.float32, device=pieces[0][0].device)
    for encoded, target in pieces:
        values = codec.decode(encoded[:, :nbytes], width, dtype).float()
        scalars = from_bytes(encoded[:, nbytes:], tail, torch.float32)
        sums.index_add_(0, target, torch.cat([values, scalars], 1))
    return write([sums[:, :width], *([sums[:, width:]] if tail else [])], codec, dtype)
