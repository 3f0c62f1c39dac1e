"""ZFP at a fixed rate, one value and one bit at a time, in plain Python: the reference."""

from __future__ import annotations

import math

ORDER = {4: list(range(4)), 16: [0, 1, 4, 5, 2, 8, 6, 9, 3, 12, 10, 7, 13, 11, 14, 15]}
MASK = 0xAAAAAAAA


def lift(v: list[int], at: int, step: int) -> None:
    x, y, z, w = (v[at + i * step] for i in range(4))
    x = (x + w) >> 1
    w -= x
    z = (z + y) >> 1
    y -= z
    x = (x + z) >> 1
    z -= x
    w = (w + y) >> 1
    y -= w
    w += y >> 1
    y -= w >> 1
    for i, value in enumerate((x, y, z, w)):
        v[at + i * step] = value


def encode_block(values: list[float], rate: int) -> str:
    """The bits of a block in order, as a string of 0 and 1."""
    size = len(values)
    budget = size * rate
    amax = max(map(abs, values))
    if amax == 0:
        return "0" * budget
    exponent = max(math.frexp(amax)[1], -126)
    bits = "1" + f"{exponent + 127:08b}"[::-1]
    fixed = [math.trunc(math.ldexp(v, 30 - exponent)) for v in values]
    if size == 4:
        lift(fixed, 0, 1)
    else:
        for row in range(4):
            lift(fixed, 4 * row, 1)
        for column in range(4):
            lift(fixed, column, 4)
    unsigned = [((fixed[i] + MASK) & 0xFFFFFFFF) ^ MASK for i in ORDER[size]]
    significant = 0
    for plane in range(31, -1, -1):
        here = [u >> plane & 1 for u in unsigned]
        bits += "".join(map(str, here[:significant]))
        position = significant
        while position < size:
            some = any(here[position:])
            bits += str(int(some))
            if not some:
                break
            while position < size - 1:
                bits += str(here[position])
                if here[position]:
                    break
                position += 1
            position += 1
        significant = max(significant, *(i + 1 for i, bit in enumerate(here) if bit), 0)
        if len(bits) >= budget:
            break
    return bits[:budget].ljust(budget, "0")


def encode_row(values: list[float], dimensions: int, rate: int) -> bytes:
    """A row whose length is a multiple of the block's."""
    size = 4**dimensions
    bits = "".join(encode_block(values[i : i + size], rate) for i in range(0, len(values), size))
    bits = bits.ljust(-(-len(bits) // 8) * 8, "0")
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))
