"""ZFP at a fixed rate: rows as transformed blocks of 4 or 4 x 4 values, cut off at a number of bits.

The format is that of the zfp library (Lindstrom 2014, "Fixed-Rate Compressed Floating-Point Arrays"), bit for
bit. A block's bits, the lowest of a byte first: 1 if it is not all zero, the 8-bit exponent of its largest
magnitude, then planes of the transformed values from the top one down; see `zfp_planes`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from imbrex.codec import zfp_planes
from imbrex.codec.cast import passing
from imbrex.kernels.codec import codec as kernels

HEADER_BITS, NEGABINARY, BIAS = 9, 0xAAAAAAAA, 127
SEQUENCY = (0, 1, 4, 5, 2, 8, 6, 9, 3, 12, 10, 7, 13, 11, 14, 15)
"""The order in which a 4 x 4 block's coefficients are coded: by the sum of their frequencies."""


class Zfp:
    """ZFP at `rate` bits a value.

    dimensions: 1, a block is 4 values that follow each other; 2, 16 of them, taken as 4 x 4: a row of D
    values is the zfp array [D / 4, 4]. Rows travel apart, so no block spans two tokens.

    Bytes a row: D * rate / 8, D filled up to whole blocks by zfp's rule. Zeros stay zero. A block that holds
    NaN or an infinity, which zfp leaves undefined, becomes NaN (exponent 0, which zfp never writes).
    Relative L2 error on white noise: 1.8e-2 at rate 8 in 2-D, 5.5e-2 in 1-D; on smooth rows far less.
    """

    def __init__(self, dimensions: int, rate: int) -> None:
        if dimensions not in (1, 2) or not 4 <= rate <= 16:
            raise ValueError(
                f"codec: zfp with {dimensions} dimensions at rate {rate}; use 1 or 2, and 4 to 16"
            )
        self.dimensions, self.rate, self.size = dimensions, rate, 4**dimensions
        self.budget = self.size * rate
        self.name = f"zfp{dimensions}d-{rate}"

    def nbytes(self, width: int, dtype: torch.dtype) -> int:
        return -(-width // self.size * self.budget // 8)

    def encode(self, rows_ND: Tensor, dtype: torch.dtype) -> Tensor:
        fused = kernels.encode(self.name, rows_ND, self.nbytes(rows_ND.shape[1], dtype))
        if fused is not None:
            return fused
        num_rows, width = rows_ND.shape
        blocks_Bn = fill_up(rows_ND.float(), self.dimensions).reshape(-1, self.size)
        amax_B = blocks_Bn.abs().amax(1)
        finite_B = torch.isfinite(amax_B)
        exponent_B = torch.frexp(torch.where(finite_B, amax_B, 0)).exponent.long().clamp(min=1 - BIAS)
        safe_Bn = torch.where(finite_B[:, None], blocks_Bn, 0).double()
        fixed_Bn = (safe_Bn * power_of_two(30 - exponent_B)[:, None]).trunc().long()
        coefficients_Bn = transform(fixed_Bn, self.dimensions)
        if self.dimensions == 2:
            coefficients_Bn = coefficients_Bn[:, list(SEQUENCY)]
        unsigned_Bn = ((coefficients_Bn + NEGABINARY) & 0xFFFFFFFF) ^ NEGABINARY
        header_B = torch.where(finite_B, 1 + 2 * (exponent_B + BIAS), 1)
        header_B = torch.where(amax_B == 0, 0, header_B)
        unsigned_Bn = torch.where((amax_B == 0)[:, None], 0, unsigned_Bn)
        words_BW = zfp_planes.write(unsigned_Bn, header_B, HEADER_BITS, self.budget)
        return zfp_planes.to_bytes(words_BW, self.budget, num_rows, -(-width // self.size))

    def decode(self, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        fused = kernels.decode(self.name, encoded_NB, width, dtype)
        if fused is not None:
            return fused
        count = -(-width // self.size)
        words_BW = zfp_planes.from_bytes(encoded_NB, self.budget, count)
        header_B = words_BW[:, 0] & ((1 << HEADER_BITS) - 1)
        unsigned_Bn = zfp_planes.read(words_BW, HEADER_BITS, self.budget, self.size)
        if self.dimensions == 2:
            unsigned_Bn = unsigned_Bn[
                :, torch.tensor(SEQUENCY, dtype=torch.int64, device=words_BW.device).argsort()
            ]
        fixed_Bn = signed32((unsigned_Bn ^ NEGABINARY) - NEGABINARY)
        values_Bn = untransform(fixed_Bn, self.dimensions).double()
        exponent_B = (header_B >> 1) - BIAS
        values_Bn = values_Bn * power_of_two(exponent_B - 30)[:, None]
        values_Bn = torch.where((header_B & 1 == 0)[:, None], 0.0, values_Bn)
        values_Bn = torch.where((header_B == 1)[:, None], torch.nan, values_Bn)
        rows_ND = values_Bn.view(encoded_NB.shape[0], -(-width // self.size) * self.size)[:, :width]
        limit = min(torch.finfo(torch.float32).max, torch.finfo(dtype).max)
        return rows_ND.clamp(-limit, limit).to(torch.float32).to(dtype)

    def error_bound(self, amax: float, dtype: torch.dtype) -> float:
        """The bound of the worst block there is, about seventy times what white noise has at rate 8 in 2-D.

        All values of a block can be significant in the first plane, which then takes 2 n bits less one, and
        each further plane n; what the planes left out hold is at most 2/3 of the last plane's unit in every
        coefficient, and the inverse transform multiplies by up to 15/4 a dimension.
        """
        planes = max(0, (self.budget - HEADER_BITS) // self.size - 1)
        error = 2 / 3 * 2.0 ** (32 - planes) * (15 / 4) ** self.dimensions
        # Beyond 2^30 the decoder's 32-bit integers may wrap; whatever it then gives is below 2^31.
        units = error + 64 if error < 2**30 else 2.0**31 + 2**30
        tiny = math.ldexp(1, -126)
        return 2 * max(amax, tiny) * units / 2**30 + passing(amax, dtype)


def fill_up(rows_ND: Tensor, dimensions: int) -> Tensor:
    """Rows to whole blocks by zfp's rule for a short line of four: a becomes aaaa, ab abba, abc abca."""
    width = rows_ND.shape[1]
    across = torch.arange(-(-width // 4) * 4, device=rows_ND.device)
    across = torch.where(across < width, across, _filler(across, width))
    if dimensions == 1:
        return rows_ND[:, across]
    lines = len(across) // 4
    down = torch.arange(-(-lines // 4) * 4, device=rows_ND.device)
    down = torch.where(down < lines, down, _filler(down, lines))
    return rows_ND[:, across.view(lines, 4)[down].flatten()]


def _filler(index: torch.Tensor, length: int) -> Tensor:
    """The source of each value past the end: the value before it, and in the last place the line's first."""
    first = index // 4 * 4
    return torch.where(index % 4 == 3, first, (first + max(length % 4, 1) - 1).clamp(max=max(length - 1, 0)))


def power_of_two(exponent: Tensor) -> Tensor:
    """2 ** exponent, exactly: float64 of int64 in -1022..1023."""
    return ((exponent + 1023) << 52).view(torch.float64)


def signed32(wide: Tensor) -> Tensor:
    """Wrap int64 to the range of int32."""
    return ((wide + 2**31) & 0xFFFFFFFF) - 2**31


def transform(fixed_Bn: Tensor, dimensions: int) -> Tensor:
    """zfp's forward lifting, along every dimension, the last one first."""
    shape = fixed_Bn.shape
    lines = fixed_Bn.view(-1, *[4] * dimensions)
    for axis in range(dimensions, 0, -1):
        lines = torch.stack(_lift(*lines.unbind(axis)), axis)
    return lines.reshape(shape)


def _lift(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    x = (x + w) >> 1
    w = w - x
    z = (z + y) >> 1
    y = y - z
    x = (x + z) >> 1
    z = z - x
    w = (w + y) >> 1
    y = y - w
    w = w + (y >> 1)
    return x, y - (w >> 1), z, w


def untransform(fixed_Bn: Tensor, dimensions: int) -> Tensor:
    """zfp's inverse lifting in 32-bit integers, the first dimension first."""
    shape = fixed_Bn.shape
    lines = fixed_Bn.view(-1, *[4] * dimensions)
    for axis in range(1, dimensions + 1):
        lines = torch.stack(_unlift(*lines.unbind(axis)), axis)
    return lines.reshape(shape)


def _unlift(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = signed32(y + (w >> 1))
    w = signed32(w - (y >> 1))
    y = signed32(y + w)
    w = signed32(2 * w - y)
    z = signed32(z + x)
    x = signed32(2 * x - z)
    y = signed32(y + z)
    z = signed32(2 * z - y)
    w = signed32(w + x)
    x = signed32(2 * x - w)
    return x, y, z, w
