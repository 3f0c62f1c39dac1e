"""Rows as packed 4-bit floats with two levels of scales."""

from __future__ import annotations

import torch
from torch import Tensor

from imbrex.codec import blocks
from imbrex.codec.cast import LOST_SCALE, as_bytes, from_bytes, passing, saturated
from imbrex.kernels.codec import codec as kernels

BLOCK = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST, LARGEST_SCALE = 6.0, 448.0
# From these magnitudes on the next value is nearer. A tie goes to the even code: .75, 1.75 and 3.5 go up.
_middles = torch.tensor([0.75, 1.75, 3.5], dtype=torch.float32, device="cpu")
_below = _middles.nextafter(torch.zeros_like(_middles)).tolist()
LIMITS = (0.25, _below[0], 1.25, _below[1], 2.5, _below[2], 5.0)


class Nvfp4:
    """NVFP4: value = e2m1 * e4m3 scale of its 16 values * float32 scale of its row.

    The format's second scale is one a tensor; rows travel apart, so here it is one a row. 8 + 1 bytes every
    16 values, and 4. Zeros stay zero. A row that holds NaN or an infinity becomes NaN.
    Relative L2 error on white noise: 9.5e-2. Both ways it cost a small language model 0.007 nats.
    """

    name = "nvfp4"

    def nbytes(self, width: int, dtype: torch.dtype) -> int:
        return blocks.num_blocks(width, BLOCK) * (BLOCK // 2 + 1) + 4

    def encode(self, rows_ND: Tensor, dtype: torch.dtype) -> Tensor:
        fused = kernels.encode(self.name, rows_ND, self.nbytes(rows_ND.shape[1], dtype))
        if fused is not None:
            return fused
        num_rows, width = rows_ND.shape
        if width == 0:
            return rows_ND.new_zeros(num_rows, 4, dtype=torch.uint8)
        values = blocks.cut(rows_ND, BLOCK)
        amax = blocks.largest(values)
        row_scale = blocks.over(amax.amax(1, keepdim=True), LARGEST * LARGEST_SCALE)
        target = blocks.divide(blocks.over(amax, LARGEST), row_scale)
        scale = target.clamp(0, LARGEST_SCALE).to(torch.float8_e4m3fn)
        scaled = blocks.divide(values, scale.float() * row_scale)
        limits = torch.tensor(LIMITS, dtype=torch.float32, device=scaled.device)
        codes = torch.bucketize(scaled.abs().contiguous(), limits).to(torch.uint8) | (
            (scaled < 0).to(torch.uint8) << 3
        )
        packed = blocks.pack_nibbles(codes.flatten(1))
        return torch.cat([packed, as_bytes(scale.flatten(1)), as_bytes(row_scale.flatten(1))], 1)

    def decode(self, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        fused = kernels.decode(self.name, encoded_NB, width, dtype)
        if fused is not None:
            return fused
        count = blocks.num_blocks(width, BLOCK)
        packed, scales, row = encoded_NB.split([count * BLOCK // 2, count, 4], 1)
        codes = blocks.unpack_nibbles(packed).long()
        signed_16 = [*MAGNITUDES, *(-m for m in MAGNITUDES)]
        signed = torch.tensor(signed_16, dtype=torch.float32, device=codes.device)
        scale = from_bytes(scales, count, torch.float8_e4m3fn).float() * from_bytes(row, 1, torch.float32)
        return saturated(blocks.join(blocks.cut(signed[codes], BLOCK) * scale[:, :, None], width), dtype)

    def error_bound(self, amax: float, dtype: torch.dtype) -> float:
        # Half the step from 4 to 6 is one scale, and a scale is rounded by up to a sixteenth.
        # A subnormal row's scale is off by up to `LOST_SCALE`; so are a block's largest over 6 and its scale.
        lost = (LARGEST * LARGEST_SCALE + 2 * LARGEST) * LOST_SCALE
        return amax * (1.0625 / LARGEST * 1.0001) + lost + passing(amax, dtype)
