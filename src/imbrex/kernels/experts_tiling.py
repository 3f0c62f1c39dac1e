"""Which tile a grouped GEMM gets: a small measured heuristic. Every choice gives the same numbers."""

from __future__ import annotations

from imbrex.kernels.experts_gemm import Epilogue, Layout, Tiling

SHARED = Tiling()
"""Two groups share 128 x 256: least traffic a product; the best where there is enough work."""

DECODE = Tiling(groups=1, block_n=128, stages=8)
"""One group, 64 x 128, 192 KiB of loads in flight: few rows an expert, where weights are read once."""


OWN = Tiling(pingpong=True, blocks_m=2, block_n=128, stages=5, panels=4)
"""Each group its own 128 x 128 in turn: stores hide behind the other group's products, at more traffic."""

_LARGE_GRADIENT = 8 << 20
"""Values of a weight gradient from which storing it takes long enough for `OWN` to win (3-4 %)."""


def choose_tiling(layout: Layout, rows: int, experts: int, out: tuple[int, int]) -> Tiling:
    """`rows`: rows of all experts together, at most (the counts stay on the device); `out`: shape of one
    expert's output, for a weight gradient, else (rows, columns)."""
    if layout is Layout.WGRAD:
        return OWN if out[0] * out[1] >= _LARGE_GRADIENT else SHARED
    if rows <= 32 * experts:
        return DECODE
    return SHARED


def gemm_variants() -> list[tuple[Layout, Epilogue, Tiling, bool]]:
    """Everything `choose_tiling` can ask for, and whether operands are loaded in wide boxes."""
    pairs = [
        *((Layout.FORWARD, epilogue, tiling) for epilogue in Epilogue for tiling in (SHARED, DECODE)),
        *((Layout.DGRAD, Epilogue.PLAIN, tiling) for tiling in (SHARED, DECODE)),
        *((Layout.WGRAD, Epilogue.PLAIN, tiling) for tiling in (SHARED, OWN)),
    ]
    widths = {Layout.FORWARD: (False,), Layout.DGRAD: (True, False), Layout.WGRAD: (True, False)}
    return [(*pair, wide) for pair in pairs for wide in widths[pair[0]]]
