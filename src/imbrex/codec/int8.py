"""Rows as signed bytes with one float32 scale a row."""

from __future__ import annotations

import torch
from torch import Tensor

from imbrex.codec.cast import as_bytes, from_bytes


class Int8:
    """Symmetric, rounded to nearest: value = q * amax / 127, with |q| <= 127.

    D + 4 bytes a row. A row of zeros stays zero. A row that holds NaN or an infinity becomes all NaN.
    """

    name = "int8"

    def nbytes(self, width: int, dtype: torch.dtype) -> int:
        return width + 4

    def encode(self, rows_ND: Tensor, dtype: torch.dtype) -> Tensor:
        rows = rows_ND.float()
        if rows.shape[1] == 0:
            return as_bytes(rows.new_zeros(rows.shape[0], 1))
        scale_N1 = rows.abs().amax(1, keepdim=True) / 127
        scale_N1 = torch.where(torch.isfinite(scale_N1), scale_N1, torch.nan)
        quantised = (
            (rows / torch.where(scale_N1 == 0, 1, scale_N1)).nan_to_num(0, 0, 0).round().clamp(-127, 127)
        )
        return torch.cat([as_bytes(quantised.to(torch.int8)), as_bytes(scale_N1)], 1)

    def decode(self, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        scale_N1 = from_bytes(encoded_NB[:, width:], 1, torch.float32)
        return (from_bytes(encoded_NB[:, :width], width, torch.int8) * scale_N1).to(dtype)

    def error_bound(self, amax: float, dtype: torch.dtype) -> float:
        return amax * (0.5 / 127 * 1.0001 + torch.finfo(dtype).eps / 2)
