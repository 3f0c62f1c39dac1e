"""Rows cut into blocks that share a scale."""

from __future__ import annotations

import torch
from torch import Tensor


def cut(rows_ND: Tensor, block: int) -> Tensor:
    """float32 [N, blocks, block]; the last block is filled up with zeros. A row of no values has no block.
    Where nothing is filled up or cast it is a view of the rows."""
    num_rows, width = rows_ND.shape
    count = num_blocks(width, block)
    values, missing = rows_ND.float(), count * block - width
    # Padding copies, even by nothing.
    padded = torch.nn.functional.pad(values, [0, missing]) if missing else values
    return padded.reshape(num_rows, count, block)


def num_blocks(width: int, block: int) -> int:
    """Blocks of `block` values in a row of `width`, the last one perhaps not full."""
    return -(-width // block)


def join(values_NBb: Tensor, width: int) -> Tensor:
    """The inverse of `cut`: [N, width]."""
    return values_NBb.flatten(1)[:, :width]


def largest(blocks_NBb: Tensor) -> Tensor:
    """The largest magnitude of every block, [N, blocks, 1]; NaN where it holds NaN or an infinity."""
    amax = blocks_NBb.abs().amax(2, keepdim=True)
    return torch.where(torch.isfinite(amax), amax, torch.nan)


def over(amax_NB1: Tensor, number: float) -> Tensor:
    """amax / number, rounded once. A GPU multiplies by the rounded reciprocal of a plain number instead."""
    return amax_NB1 / amax_NB1.new_full((1,), number)


def divide(blocks_NBb: Tensor, scale_NB1: Tensor) -> Tensor:
    """Blocks over their scales, a tensor of its own; 0 where the scale is 0 or not a number."""
    usable = (scale_NB1 > 0) & torch.isfinite(scale_NB1)
    quotient = blocks_NBb / torch.where(usable, scale_NB1, 1)
    # On a CPU, choosing takes five times as long as dividing, and asking the scales costs nothing.
    if usable.device.type == "cpu" and bool(usable.all()):
        return quotient
    return torch.where(usable, quotient, 0.0)


def pack_nibbles(codes_ND: Tensor) -> Tensor:
    """Two values in 0..15 a byte, the even one in the low half: uint8 [N, D] to [N, D / 2]; D is even."""
    return codes_ND[:, 0::2] | (codes_ND[:, 1::2] << 4)


def unpack_nibbles(packed_NB: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`."""
    return torch.stack([packed_NB & 15, packed_NB >> 4], 2).flatten(1)
