"""Rows as 8-bit floats with one float32 scale every 128 values."""

from __future__ import annotations

import torch
from torch import Tensor

from imbrex.codec import blocks
from imbrex.codec.cast import LOST_SCALE, as_bytes, from_bytes, passing, saturated
from imbrex.kernels.codec import codec as kernels

BLOCK = 128


class Fp8:
    """value = float8 * amax / largest float8: DeepSeek-V3's rows with e4m3, and e5m2 for more range.

    D + 4 bytes every 128 values. Zeros stay zero. A block that holds NaN or an infinity becomes NaN.
    Relative L2 error on white noise: 2.6e-2 (e4m3), 5.3e-2 (e5m2), at almost any size of block.
    """

    def __init__(self, name: str, wire_dtype: torch.dtype) -> None:
        self.name, self.wire_dtype = name, wire_dtype

    @classmethod
    def e4m3(cls) -> Fp8:
        return cls("fp8", torch.float8_e4m3fn)

    @classmethod
    def e5m2(cls) -> Fp8:
        return cls("fp8-e5m2", torch.float8_e5m2)

    def nbytes(self, width: int, dtype: torch.dtype) -> int:
        return width + 4 * blocks.num_blocks(width, BLOCK)

    def encode(self, rows_ND: Tensor, dtype: torch.dtype) -> Tensor:
        fused = kernels.encode(self.name, rows_ND, self.nbytes(rows_ND.shape[1], dtype))
        if fused is not None:
            return fused
        largest = torch.finfo(self.wire_dtype).max
        values = blocks.cut(rows_ND, BLOCK)
        scale = blocks.over(blocks.largest(values), largest)
        quantised = blocks.divide(values, scale).clamp(-largest, largest).to(self.wire_dtype)
        bits = blocks.join(quantised.view(torch.uint8), rows_ND.shape[1])
        return torch.cat([bits, as_bytes(scale.flatten(1))], 1)

    def decode(self, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        fused = kernels.decode(self.name, encoded_NB, width, dtype)
        if fused is not None:
            return fused
        scale = from_bytes(encoded_NB[:, width:], blocks.num_blocks(width, BLOCK), torch.float32)
        values = from_bytes(encoded_NB[:, :width], width, self.wire_dtype)
        return saturated(blocks.join(blocks.cut(values, BLOCK) * scale[:, :, None], width), dtype)

    def error_bound(self, amax: float, dtype: torch.dtype) -> float:
        limits = torch.finfo(self.wire_dtype)
        # Half the distance between floats next to the largest one: 16 of 448, 4096 of 57344.
        half_step = 2.0 ** (int(limits.max).bit_length() - 1) * limits.eps / 2
        share = amax * (half_step / limits.max * 1.0001)
        return share + limits.max * LOST_SCALE + passing(amax, dtype)
