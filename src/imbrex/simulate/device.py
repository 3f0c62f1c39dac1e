"""The seconds of what one rank computes, from the rates of a profile.

A product of n columns and k inner values multiplies tiles of `tile_rows` x `tile_columns`, one on every
multiprocessor at a time. It takes two times, m for the waves of tiles at `product_flops_s`, and r for reading
the weights at `weights_bytes_s`. They overlap, and less so the more equal they are: the product takes (m^p +
r^p)^(1/p), where p is `reading_exponent`. Rows of an expert fill whole tiles. A CPU has tiles of one row and
column, and packs the weights before it multiplies, so p is 1.
Example: 2 experts of 1024 rows, n = 256 columns and 132 multiprocessors are 16 tiles of 128 rows: one wave,
as many seconds as 132 tiles would take.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from imbrex.simulate.engine import Floats
from imbrex.simulate.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes of a layer: model width D, expert width F, experts E, choices per token K; bytes of a value
    of a row, and of a weight."""

    width: int
    inner: int
    experts: int
    top_k: int
    value_bytes: int = 2

    @property
    def parameters(self) -> int:
        """The number of weights of all experts: gate, up and down."""
        return 3 * self.experts * self.width * self.inner


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The work of one rank of an expert-parallel group: its experts, its part of the expert width, and the
    rows of every rank, [W]."""

    experts: float
    inner: int
    rows_W: Floats


QUANTILES = np.linspace(-3.5, 3.5, 41)
DENSITY = np.exp(-QUANTILES * QUANTILES / 2) / np.exp(-QUANTILES * QUANTILES / 2).sum()
FEW = 4.0
"""Rows an expert below which most tiles have one row or none."""


def tiles(rows_W: Floats, experts: float, height: int) -> Floats:
    """The number of tiles of `height` rows that the experts' rows fill, if tokens choose experts at
    random."""
    mean_W = rows_W / experts
    number_WQ = np.maximum(mean_W[:, None] + np.sqrt(mean_W)[:, None] * QUANTILES, 0.0)
    many_W = (np.ceil(number_WQ / height) * DENSITY).sum(1)
    touched_W = -np.expm1(-mean_W)
    return experts * np.where(mean_W < FEW, touched_W * np.maximum(1.0, mean_W / height), many_W)


def forward(profile: Profile, shape: Shape, share: Share) -> Floats:
    """Seconds of gate, up, SwiGLU and down on every rank."""
    number_W = tiles(share.rows_W, share.experts, int(profile["tile_rows"]))
    touched_W = -share.experts * np.expm1(-share.rows_W / share.experts)
    width, inner = shape.width, share.inner
    sides = ((2 * inner, width), (width, inner))
    products = np.zeros_like(share.rows_W)
    for n, k in sides:
        products += _product(profile, number_W, touched_W, n, k, shape.value_bytes)
    values_W = share.rows_W * (width + 2 * inner) * shape.value_bytes
    start = np.where(share.rows_W > 0, profile["experts_start_s"], 0.0)
    return _throttled(profile, products) + values_W / profile["rows_bytes_s"] + start


def backward_rows(profile: Profile, shape: Shape, share: Share) -> Floats:
    """Seconds of the gradients of the rows: two products of the same sizes."""
    return forward(profile, shape, share) * profile["backward_rows_factor"]


def backward_weights(profile: Profile, shape: Shape, share: Share, *, chunks: int = 1) -> Floats:
    """Seconds of the weights' gradients of one of `chunks` chunks: as many operations, and every gradient is
    written, or read and written if chunks add to it.

    A CPU writes while it multiplies. But it adds all chunks after the first to the sum by another operator,
    which reads two gradients and writes one.
    """
    height, columns = int(profile["tile_rows"]), int(profile["tile_columns"])
    unit, sms = height * columns, int(profile["multiprocessors"])
    total = np.zeros_like(share.rows_W)
    for n, k in ((2 * share.inner, shape.width), (shape.width, share.inner)):
        number = share.experts * np.ceil(n / height) * np.ceil(k / columns)
        waves = np.ceil(number / sms) * sms
        total += waves * unit * 2 * share.rows_W / share.experts / profile["product_flops_s"]
    once = 3 * share.experts * shape.width * share.inner * shape.value_bytes / profile["gradients_bytes_s"]
    computed = total * profile["backward_weights_factor"]
    if sms == 1:
        together = np.maximum(computed, once) + 3 * (1 - 1 / chunks) * once
    else:
        # A multiprocessor's tile of a gradient has as few steps as the expert has rows, too few to hide the
        # writing of the tile before.
        together = computed + once * (2 if chunks > 1 else 1)
    slowed = _throttled(profile, together)
    return slowed + np.where(share.rows_W > 0, profile["experts_start_s"], 0.0)


def _product(
    profile: Profile, number_W: Floats, touched_W: Floats, n: int, k: int, value_bytes: int
) -> Floats:
    height, columns = int(profile["tile_rows"]), int(profile["tile_columns"])
    sms = int(profile["multiprocessors"])
    waves_W = np.ceil(np.round(number_W * np.ceil(n / columns), 6) / sms)
    computed = waves_W * sms * height * columns * 2 * k / profile["product_flops_s"]
    read = touched_W * n * k * value_bytes / profile["weights_bytes_s"]
    power = profile["reading_exponent"]
    longer = np.maximum(np.maximum(computed, read), 1e-15)
    return longer * ((computed / longer) ** power + (read / longer) ** power) ** (1 / power)


def _throttled(profile: Profile, seconds: Floats) -> Floats:
    """Seconds of a launch that may reach the power limit: longer by `power_slowdown` for every factor e over
    a millisecond."""
    return seconds * (1 + profile["power_slowdown"] * np.log1p(seconds / 1e-3))


def codec_seconds(profile: Profile, codec: str, what: str, rows_W: Floats, width: int) -> Floats:
    """Seconds to encode or decode rows of `width` values."""
    if codec == "identity":
        return np.zeros_like(rows_W)
    return rows_W * width / profile[f"{what}_values_s:{codec}"]


__all__ = ["Shape", "Share", "backward_rows", "backward_weights", "codec_seconds", "forward", "tiles"]
