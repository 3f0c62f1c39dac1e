"""Rows as packed signed 4-bit integers with one bfloat16 scale every 32 values."""

from __future__ import annotations

import torch
from torch import Tensor

from imbrex.codec import blocks
from imbrex.codec.cast import as_bytes, from_bytes, passing, saturated
from imbrex.kernels.codec import codec as kernels

BLOCK = 32


class Int4:
    """Symmetric integers, rounded to nearest: value = q * scale, |q| <= 7.

    scale = amax / 7, rounded up to bfloat16.

    16 + 2 bytes every 32 values. Zeros stay zero. A block that holds NaN or an infinity becomes NaN.
    Relative L2 error on white noise: 9.7e-2.
    """

    name = "int4"

    def nbytes(self, width: int, dtype: torch.dtype) -> int:
        return blocks.num_blocks(width, BLOCK) * (BLOCK // 2 + 2)

    def encode(self, rows_ND: Tensor, dtype: torch.dtype) -> Tensor:
        fused = kernels.encode(self.name, rows_ND, self.nbytes(rows_ND.shape[1], dtype))
        if fused is not None:
            return fused
        values = blocks.cut(rows_ND, BLOCK)
        scale = round_up_bf16(blocks.over(blocks.largest(values), 7))
        quantised = blocks.divide(values, scale.float()).round().clamp(-7, 7)
        codes = (quantised + 8).to(torch.uint8).flatten(1)
        return torch.cat([blocks.pack_nibbles(codes), as_bytes(scale.flatten(1))], 1)

    def decode(self, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        fused = kernels.decode(self.name, encoded_NB, width, dtype)
        if fused is not None:
            return fused
        count = blocks.num_blocks(width, BLOCK)
        packed = encoded_NB[:, : count * BLOCK // 2]
        scale = from_bytes(encoded_NB[:, count * BLOCK // 2 :], count, torch.bfloat16)
        values = blocks.cut(blocks.unpack_nibbles(packed).float() - 8, BLOCK)
        return saturated(blocks.join(values * scale.float()[:, :, None], width), dtype)

    def error_bound(self, amax: float, dtype: torch.dtype) -> float:
        # Subnormal bfloat16 scales are 2^-133 apart, and a float32 one that is lost costs far less.
        return amax * ((1 + 2**-7) / 14 * 1.0001) + 2.0**-133 + passing(amax, dtype)


def round_up_bf16(positive: Tensor) -> Tensor:
    """The smallest bfloat16 that is not below a float32 >= 0. NaN stays NaN."""
    # Devices write NaN in their own ways; here it is 0x7fc0.
    bits = (positive.contiguous().view(torch.int32) & 0x7FFFFFFF).clamp(max=0x7FC00000)
    return ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
