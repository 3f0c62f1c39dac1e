"""Which tile a grouped GEMM gets: a small measured heuristic. Every choice gives the same numbers."""

from __future__ import annotations

from imbrex.kernels.experts_gemm import Epilogue, Layout, Tiling

SHARED = Tiling()
"""Two groups share 128 x 256: least traffic a product; the best where there is enough work."""

DECODE = Tiling(groups=1, block_n=128, stages=8)
"""One group, 64 x 128, 192 KiB of loads in flight: few rows an expert, where weights are read once."""


def choose_tiling(layout: Layout, rows: int, experts: int) -> Tiling:
    """`rows`: rows of all experts together, at most (the counts stay on the device)."""
    if layout is not Layout.WGRAD and rows <= 32 * experts:
        return DECODE
    return SHARED


def gemm_variants() -> list[tuple[Layout, Epilogue, Tiling, bool]]:
    """Everything `choose_tiling` can ask for, and whether operands are loaded in wide boxes."""
    forward = [
        (Layout.FORWARD, epilogue, tiling, False) for epilogue in Epilogue for tiling in (SHARED, DECODE)
    ]
    dgrad = [
        (Layout.DGRAD, Epilogue.PLAIN, tiling, wide) for tiling in (SHARED, DECODE) for wide in (True, False)
    ]
    return [*forward, *dgrad, *((Layout.WGRAD, Epilogue.PLAIN, SHARED, wide) for wide in (True, False))]
