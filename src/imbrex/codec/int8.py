"""Rows as signed bytes with one float32 scale a row, or one every so many values."""

from __future__ import annotations

import torch
from torch import Tensor

from imbrex.codec import blocks
from imbrex.codec.cast import LOST_SCALE, as_bytes, from_bytes, passing, saturated
from imbrex.kernels.codec import codec as kernels


class Int8:
    """Symmetric bytes, rounded to nearest: value = q * amax / 127, with |q| <= 127.

    block: values that share a scale; 0 is the whole row. D + 4 bytes a row, or D + 4 a block. Zeros stay
    zero. What shares a scale with NaN or an infinity becomes NaN.
    Relative L2 error on white noise: 7.9e-3 a row of 1024, 6.5e-3 a block of 128.
    """

    def __init__(self, block: int = 0) -> None:
        self.block = block
        self.name = f"int8-{block}" if block else "int8"

    def _scales(self, width: int) -> int:
        return blocks.num_blocks(width, self.block or width) if width else 0

    def nbytes(self, width: int, dtype: torch.dtype) -> int:
        return width + 4 * self._scales(width)

    def encode(self, rows_ND: Tensor, dtype: torch.dtype) -> Tensor:
        fused = kernels.encode(self.name, rows_ND, self.nbytes(rows_ND.shape[1], dtype))
        if fused is not None:
            return fused
        num_rows, width = rows_ND.shape
        if width == 0:
            return rows_ND.new_zeros(num_rows, 0, dtype=torch.uint8)
        values = blocks.cut(rows_ND, self.block or width)
        scale = blocks.over(blocks.largest(values), 127)
        quantised = blocks.divide(values, scale).round_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([as_bytes(blocks.join(quantised, width)), as_bytes(scale.flatten(1))], 1)

    def decode(self, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        fused = kernels.decode(self.name, encoded_NB, width, dtype)
        if fused is not None:
            return fused
        if width == 0:
            return encoded_NB.new_zeros(encoded_NB.shape[0], 0, dtype=dtype)
        scale = from_bytes(encoded_NB[:, width:], self._scales(width), torch.float32)
        values = blocks.cut(from_bytes(encoded_NB[:, :width], width, torch.int8), self.block or width)
        return saturated(blocks.join(values * scale[:, :, None], width), dtype)

    def error_bound(self, amax: float, dtype: torch.dtype) -> float:
        return amax * (0.5 / 127 * 1.0001) + 127 * LOST_SCALE + passing(amax, dtype)
