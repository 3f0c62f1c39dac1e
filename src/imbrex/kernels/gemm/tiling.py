"""Which tile a grouped GEMM gets: a small measured model. Every choice gives the same numbers.

A product's time is taken as waves of tiles over the SMs, times the cost of a tile in units of a full one of
128 x 256, or as the time to read the weights (measured on an H200, 1 to 8192 rows an expert). Rows that one
expert has above the mean another has below it; equal experts count once, a standard deviation apart twice.
In bf16, tiles of 256 columns are 128 or 64 rows high, as the kernel finds from the counts (gemm/height.cuh).
Example: 2 experts of 64 rows, 4096 columns: 32 tiles of 256 columns keep 32 of 132 SMs busy for 0.66, 64
tiles of 64 x 128 twice as many for 0.36 (measured 125, 82 us).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict, Unpack

from imbrex.kernels.gemm.gemm import Epilogue, Layout, Tiling

SHARED = Tiling()
"""Two groups share 128 x 256: least traffic a product; the best where there is enough work."""
LOW = Tiling(groups=1, stages=5)
"""One group, 64 x 256: fp8 of few rows, whose weights it reads up to 5 % faster than `SHARED`."""
SMALL = Tiling(groups=1, block_n=128, stages=8)
"""One group, 64 x 128, 192 KiB of loads in flight: decode, where weights are read once."""
OWN = Tiling(pingpong=True, blocks_m=2, block_n=128, stages=5, panels=4)
"""Each group its own 128 x 128 in turn: stores hide behind the other group's products, at more traffic."""

STAGED = Tiling(stages=3, panels=4)
"""128 x 256 in fp8, where a step takes as long as two in bf16: three of them are far enough ahead, and a tile
can be stored whole while the next one is computed (1 to 3 % over `SHARED`)."""

TALL = Tiling(blocks_m=3, panels=3)
"""192 x 256 in bf16 by two groups, for experts of a little more than 128 rows (gemm/tall.cuh)."""

PAIRED, PAIRED_STAGED = SHARED._replace(cluster=2), STAGED._replace(cluster=2)
"""Two blocks share the weights' columns: fewer reads of L2, and two row tiles read them at the same time."""
_PAIRS = {SHARED: PAIRED, STAGED: PAIRED_STAGED}
_PAIRED_WAVES, _PAIRED_DEPTH = 3.5, 54_000
"""Waves, and waves times depth (600 us), from which a pair is faster, up to 9 %: it starts 1 us later, waits
for the slower of its blocks and fills the last wave by twos."""
_WIDE, _WIDE_WAVES = 12_800, 3
"""Columns, in bf16, from which it is from fewer waves on, 1 to 2 %."""

_COSTS = {SHARED: 1.0, LOW: 0.7, SMALL: 0.36}
"""Time of a tile over that of `SHARED`. It is fitted, with the numbers below, to 500 products of 1 to 8192
rows an expert, counts equal, random and skewed: the choice takes 1.015 times the best tile's time, and is at
least 0.995 times as fast as torch."""
_READ = {SHARED: 0.98, LOW: 1.0, SMALL: 1.06}
"""Time to read the weights over the least: less is on its way at once."""
_READERS, _FEW_ROWS = {LOW: 1.0, SMALL: 0.53}, 32
"""A wave of tiles that read weights for a few rows, up to so many an expert in the mean: the same bytes in
narrow tiles take 1.06 times as long, but fill a last wave that wide ones leave half empty."""
_LOW_COST = 0.65
"""64 rows of a tile that could be 128 high, as in gemm/height.cuh."""
_TAIL_COST = 0.66
"""The last tile of an expert where its second group has no rows, over a full one; as there."""
FP8_UP_TILINGS, FP8_DOWN_TILINGS = (SHARED, LOW, PAIRED), (STAGED, LOW, PAIRED_STAGED)
"""Tiles with SwiGLU, whose result is a quarter of the tile and always staged whole, and without. A tile of
256 columns holds whole blocks of 128, of gate and of up."""
GRADIENT_TILINGS = (OWN, SMALL._replace(panels=3))
"""Tiles for SwiGLU's gradient, of many and of few rows: three panels leave at once; with 256 columns its
registers spill."""
_PANEL_COST = 1.43
"""Reading 256 columns of an expert's weights from memory, over a full tile: 4.27 TB/s, 783 TFLOP/s."""
_READ_AGAIN = 0.1
"""A share of `_PANEL_COST`, for every further row tile of an expert: some find the columns gone from L2."""
_READ_IDLE = 0.25
"""A share of `_PANEL_COST`, for every wave that the last one leaves idle, over the number of waves."""
_TALL_ROWS, _MANY_EXPERTS, _TALL_GAIN, _SOME_ABOVE, _FEW_LAST = (112, 184, 192), 32, 1.04, 1.05, 0.3
"""Mean rows of an expert for which `TALL` is thought of: from, and to, of few experts and of many; by how
much it has to be faster; tiles where some experts have more than 192 rows; and the share of a wave up to
which few tiles are left for it. benchmarks/tiles.py times it beside `SHARED` and `PAIRED`."""
_LARGE_GRADIENT = 8 << 20
"""Values of a weight gradient from which storing it takes long enough for `OWN` to win (3-4 %)."""
_GATHERED_PAIRS = 256
"""Mean rows of an expert, read through an index in bf16, from which pairs are faster: with half of the
weights' lines to ask for, the copy engine has time for the rows (Qwen3, 16384 rows: 176 us, single 180)."""
_overridden: dict[tuple[Layout, Epilogue], Tiling] = {}


@contextmanager
def override_tilings(tilings: Mapping[tuple[Layout, Epilogue], Tiling]) -> Iterator[None]:
    """A context in which products with such a layout and epilogue are cut like this, in every thread: to
    measure other tiles than the chosen ones. The same bits; KernelError where the kernel cannot be cut so."""
    before = dict(_overridden)
    _overridden.update(tilings)
    try:
        yield
    finally:
        _overridden.clear()
        _overridden.update(before)


class Reading(TypedDict, total=False):
    """How a product reads its operands. depth: of a sum; gather: rows come through an index; expected: rows
    of a small batch in the mean, of which the most, `rows`, are many more; mean: the same of any batch, if it
    is known; tall: `TALL` can be taken."""

    depth: int
    fp8: bool
    gather: bool
    expected: int
    mean: int
    tall: bool


def choose_tiling(
    layout: Layout,
    epilogue: Epilogue,
    rows: int,
    experts: int,
    out: tuple[int, int],
    *,
    sms: int,
    **reading: Unpack[Reading],
) -> Tiling:
    """`rows`: rows of all experts together, at most (the counts stay on the device); `out`: shape of one
    expert's output, for a weight gradient, else (rows, columns); `sms`: of the device."""
    if (override := _overridden.get((layout, epilogue))) is not None:
        return override
    fp8, expected = reading.get("fp8", False), reading.get("expected", 0)
    if 0 < expected <= _FEW_ROWS * experts and layout is Layout.FORWARD and not fp8:
        return _fastest_reader(expected, experts, _columns(epilogue, out), sms)
    chosen = _fastest(layout, epilogue, rows, experts, out, sms, reading.get("depth", 0), fp8)
    if reading.get("gather"):
        paired = not fp8 and chosen == SHARED and rows >= _GATHERED_PAIRS * experts
        return PAIRED if paired else chosen
    tall = reading.get("tall") and not fp8 and layout is not Layout.WGRAD
    if tall and chosen in (SHARED, PAIRED) and epilogue is not Epilogue.SWIGLU_GRADIENT:
        mean = (reading.get("mean") or rows) / experts
        return TALL if _tall_pays(mean, experts, _columns(epilogue, out), sms) else chosen
    return chosen


@functools.lru_cache(maxsize=1024)
def _tall_pays(mean: float, experts: int, columns: int, sms: int) -> bool:
    """Whether `TALL` is faster where an expert gets `mean` rows, each by chance.

    A last tile of 64 rows takes as long as a full one, since L2 gives no more, but half as long where few
    are left for the last wave; a tile of 192 rows half as long again. Two draws are likely: one in which no
    expert has more than 192 rows, and one in which some do.
    """
    if not _TALL_ROWS[0] <= mean <= _TALL_ROWS[1 if experts < _MANY_EXPERTS else 2]:
        return False
    above = (1 - math.erf((128.5 - mean) / math.sqrt(2 * mean))) / 2  # experts with more than 128 rows
    tiles = experts * math.ceil(columns / TALL.block_n) / sms  # waves of one tile an expert
    reading = tiles * _PANEL_COST * _READ[SHARED]
    waves = (math.ceil(tiles) + math.ceil(_SOME_ABOVE * tiles)) / 2
    tall = max(waves * (1 + above / 2), reading)
    others = math.ceil(tiles * (1 + above))
    few_last = others - tiles * (1 + above) >= 1 - _FEW_LAST
    return max(others - few_last / 2, reading) >= _TALL_GAIN * tall


@functools.lru_cache(maxsize=1024)
def _fastest(
    layout: Layout,
    epilogue: Epilogue,
    rows: int,
    experts: int,
    out: tuple[int, int],
    sms: int,
    depth: int,
    fp8: bool,
) -> Tiling:
    if layout is Layout.WGRAD:
        return OWN if out[0] * out[1] >= _LARGE_GRADIENT else SHARED
    if epilogue is Epilogue.SWIGLU_GRADIENT:
        many, few = GRADIENT_TILINGS
        return many if rows // experts > OWN.block_m // 2 else few
    columns = _columns(epilogue, out)
    if rows <= experts and rows * math.ceil(columns / SHARED.block_n) <= sms and not fp8:
        return SMALL  # wide tiles of the experts that have a row leave multiprocessors idle
    mean = max(1, rows // experts)
    spread = math.isqrt(mean) if experts > 1 else 0  # a standard deviation of what an expert gets
    tilings = (SHARED, SMALL)
    if fp8:
        tilings = (FP8_UP_TILINGS if epilogue is Epilogue.SWIGLU else FP8_DOWN_TILINGS)[:2]
        tilings = (LOW,) if mean + spread <= LOW.block_m else tilings
    equal, apart = [(mean, experts)], [(mean + spread, experts - experts // 2), (mean - spread, experts // 2)]

    def time(tiling: Tiling) -> float:
        return _time(tiling, equal, columns, sms, fp8) + 2 * _time(tiling, apart, columns, sms, fp8)

    best = min(tilings, key=time)
    full = experts * math.ceil(mean / best.block_m) * math.ceil(columns / best.block_n) / sms
    if best in _PAIRS and mean >= best.block_m and _pair_pays(full, depth, columns, fp8):
        return _PAIRS[best]
    return best


def _columns(epilogue: Epilogue, out: tuple[int, int]) -> int:
    return out[1] * (2 if epilogue in (Epilogue.SWIGLU, Epilogue.SWIGLU_KEEP) else 1)


@functools.lru_cache(maxsize=1024)
def _fastest_reader(expected: int, experts: int, columns: int, sms: int) -> Tiling:
    """The tile for a few rows, of which one rank has a standard deviation more, where reading their experts'
    weights is all that takes time: that of the fewest waves, each as long as it has columns."""
    hit = experts * (1 - (1 - 1 / experts) ** (expected + math.isqrt(expected)))

    def time(tiling: Tiling) -> float:
        return math.ceil(hit * math.ceil(columns / tiling.block_n) / sms) * _READERS[tiling]

    return min(_READERS, key=time)


def _pair_pays(full: float, depth: int, columns: int, fp8: bool) -> bool:
    if columns >= _WIDE and not fp8:
        return full >= _WIDE_WAVES
    return full >= _PAIRED_WAVES and full * depth >= _PAIRED_DEPTH


def _time(tiling: Tiling, groups: list[tuple[int, int]], columns: int, sms: int, fp8: bool) -> float:
    """The time with the better height where the kernel has two; `groups`: rows, and how many experts have as
    many."""
    like = SHARED if tiling == STAGED else tiling
    parts = columns, sms, tiling.block_n, _READ[like]
    waves = _waves(tiling.block_m, _COSTS[like], groups, *parts)
    if fp8 or not tiling.two_heights:
        return waves
    return min(waves, _waves(64, _LOW_COST, groups, *parts))


def _waves(
    height: int, cost: float, groups: list[tuple[int, int]], columns: int, sms: int, width: int, read: float
) -> float:
    """Waves of products, or the time to read the weights where that is longer."""
    tiles, tails, experts = 0, 0, sum(number for _, number in groups)
    for rows, number in groups:
        tiles += number * math.ceil(rows / height)
        if height == 128 and 0 < rows % height <= 64:
            tails += number
    full = tiles * math.ceil(columns / width) / sms
    waves = math.ceil(full)
    products = waves * cost * (1 - (1 - _TAIL_COST) * tails / max(1, tiles))
    panels = experts * columns / SHARED.block_n / sms
    again = 1 + _READ_AGAIN * max(0, tiles / experts - 1)
    idle = 1 + _READ_IDLE * (waves / max(full, 1e-9) - 1)
    return max(products, panels * _PANEL_COST * read * again * idle)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One kernel; `wide` as in gemm/gemm.cu."""

    layout: Layout
    epilogue: Epilogue
    tiling: Tiling
    wide: bool = False


def gemm_choices() -> list[Choice]:
    """Everything that `choose_tiling` can ask for."""
    swiglu = Epilogue.SWIGLU_GRADIENT
    plain = (Epilogue.PLAIN, Epilogue.SWIGLU, Epilogue.SWIGLU_KEEP, Epilogue.WEIGHTED)
    shared = (SHARED, SMALL)
    choices = [Choice(layout=Layout.FORWARD, epilogue=e, tiling=t) for e in plain for t in (*shared, PAIRED)]
    gradients = (
        (Layout.DGRAD, Epilogue.PLAIN, shared),
        (Layout.DGRAD, swiglu, GRADIENT_TILINGS),
        *((Layout.WGRAD, e, (SHARED, OWN)) for e in (Epilogue.PLAIN, Epilogue.ADD, Epilogue.ADD_FLOAT)),
    )
    choices += [Choice(layout=Layout.FORWARD, epilogue=e, tiling=TALL) for e in plain]
    wide = {"layout": Layout.DGRAD, "epilogue": Epilogue.PLAIN, "wide": True}
    choices += [Choice(tiling=tiling, **wide) for tiling in (PAIRED, TALL)]
    for layout, epilogue, tilings in gradients:
        for tiling, wide in itertools.product(tilings, (True, False)):
            choices.append(Choice(layout=layout, epilogue=epilogue, tiling=tiling, wide=wide))
    return choices
