"""Rows written as they are, or as 16-bit floats."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from imbrex.kernels.codec import codec as kernels


class Identity:
    """Rows in the dtype they have outside. A float32 partial sum of 16-bit rows is rounded once to cross."""

    name = "identity"

    def nbytes(self, width: int, dtype: torch.dtype) -> int:
        return width * dtype.itemsize

    def encode(self, rows_ND: Tensor, dtype: torch.dtype) -> Tensor:
        return as_bytes(rows_ND.to(dtype))

    def decode(self, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return from_bytes(encoded_NB, width, dtype)

    def error_bound(self, amax: float, dtype: torch.dtype) -> float:
        return 0.0 if dtype == torch.float32 else rounding(amax, dtype)


class Cast:
    """Rows as bfloat16 or float16, rounded to nearest. float16 saturates at its largest value, 65504."""

    def __init__(self, name: str, wire_dtype: torch.dtype) -> None:
        self.name = name
        self.wire_dtype = wire_dtype

    @classmethod
    def bf16(cls) -> Cast:
        return cls("bf16", torch.bfloat16)

    @classmethod
    def fp16(cls) -> Cast:
        return cls("fp16", torch.float16)

    def nbytes(self, width: int, dtype: torch.dtype) -> int:
        return width * 2

    def encode(self, rows_ND: Tensor, dtype: torch.dtype) -> Tensor:
        fused = kernels.encode(self.name, rows_ND, self.nbytes(rows_ND.shape[1], dtype))
        return as_bytes(saturated(rows_ND, self.wire_dtype)) if fused is None else fused

    def decode(self, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        fused = kernels.decode(self.name, encoded_NB, width, dtype)
        if fused is not None:
            return fused
        return saturated(from_bytes(encoded_NB, width, self.wire_dtype), dtype)

    def error_bound(self, amax: float, dtype: torch.dtype) -> float:
        saturation = amax - torch.finfo(self.wire_dtype).max
        return max(saturation, rounding(amax, self.wire_dtype) + passing(amax, dtype))


LOST_SCALE = 2.0**-150
"""Half of the distance between the smallest floats: how far a float32 scale may be off that is subnormal."""


def passing(amax: float, dtype: torch.dtype) -> float:
    """The largest error of converting a value of at most `amax` to float32, in which codecs compute, and then
    to `dtype`."""
    return rounding(amax, torch.float32) + rounding(amax, dtype)


def rounding(amax: float, dtype: torch.dtype) -> float:
    """The largest error of rounding a value of at most `amax` to `dtype`, subnormal ones included."""
    limits = torch.finfo(dtype)
    return max(amax, limits.smallest_normal) * limits.eps / 2


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values as `dtype`; values too large for it become its largest one, and NaN stays NaN."""
    if values.dtype.itemsize < 4:
        if torch.finfo(values.dtype).max <= torch.finfo(dtype).max:
            return values.to(dtype)
        # A limit is rounded to the dtype of what it limits: 65504 is no bfloat16.
        values = values.float()
    largest = min(torch.finfo(dtype).max, torch.finfo(values.dtype).max)
    return values.clamp(-largest, largest).to(dtype)


def as_bytes(rows_ND: Tensor) -> Tensor:
    """Rows to uint8 [N, bytes of a row], without a copy where they are contiguous."""
    n, width = rows_ND.shape
    # One value is contiguous whatever its stride, but only stride 1 can be viewed as bytes.
    dense = (
        rows_ND.contiguous()
        if rows_ND.stride(-1) == 1
        else rows_ND.clone(memory_format=torch.contiguous_format)
    )
    return dense.view(torch.uint8).view(n, width * rows_ND.dtype.itemsize)


def from_bytes(encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `as_bytes`: uint8 [N, bytes] to `dtype` [N, width]."""
    dense = wide(encoded_NB).contiguous().view(torch.uint8)
    if dense.storage_offset() % dtype.itemsize:
        dense = dense.clone()
    return dense.view(-1).view(dtype).view(encoded_NB.shape[0], width)


def wide(rows_NB: Tensor) -> Tensor:
    """A view of the rows as the widest integers that fit them, since torch copies value by value on a GPU."""
    size = rows_NB.element_size()
    # Sizes are powers of two: what divides all three divides their bits together.
    offset = cast("int", rows_NB.storage_offset())
    together = (rows_NB.shape[1] | rows_NB.stride(0) | offset) * size
    for dtype in (torch.int64, torch.int32):
        if size < dtype.itemsize and together % dtype.itemsize == 0 and rows_NB.stride(1) == 1:
            return rows_NB.view(dtype)
    return rows_NB


def pick_rows(rows_NB: Tensor, index: Tensor) -> Tensor:
    """Copies of rows, of any dtype: `rows_NB[index]`."""
    # Of whole rows: on a CPU, indexing by a tensor takes four times as long.
    return wide(rows_NB).index_select(0, index).view(rows_NB.dtype)
