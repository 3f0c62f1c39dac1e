"""A warning, not a codec to train with: bytes without rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from imbrex.codec.cast import as_bytes, from_bytes, passing, saturated


class Int8Truncated:
    """value = low + floor((x - low) * 255 / (high - low)) * (high - low) / 255, a float32 low and high a row.

    ScheMoE's released compressor does this. Flooring moves every value down by half a step on average. A
    small language model trained with it in both directions lost 0.025 nats, and nothing where only the
    forward was floored (`benchmarks/convergence.py`): the harm is in the gradients. D + 8 bytes a row. A row
    that holds NaN or an infinity becomes NaN.
    """

    name = "int8-truncated"

    def nbytes(self, width: int, dtype: torch.dtype) -> int:
        return width + 8

    def encode(self, rows_ND: Tensor, dtype: torch.dtype) -> Tensor:
        rows = rows_ND.double()  # the span of float32 rows may be no float32
        if rows.shape[1] == 0:
            return as_bytes(rows.new_zeros(rows.shape[0], 2, dtype=torch.float32))
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        finite = torch.isfinite(low) & torch.isfinite(high)
        low, high = torch.where(finite, low, torch.nan), torch.where(finite, high, torch.nan)
        span = high - low
        steps = (rows - low) / torch.where(span > 0, span, 1) * 255
        codes = torch.where(span > 0, steps, 0.0).floor().clamp(0, 255).to(torch.uint8)
        return torch.cat([codes, as_bytes(torch.cat([low, high], 1).float())], 1)

    def decode(self, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        ends = from_bytes(encoded_NB[:, width:], 2, torch.float32).double()
        low, span = ends[:, :1], ends[:, 1:] - ends[:, :1]
        return saturated(low + encoded_NB[:, :width].double() * (span / 255), dtype)

    def error_bound(self, amax: float, dtype: torch.dtype) -> float:
        return amax * (2 / 255 * 1.001) + passing(amax, dtype)
