"""When the first product reads its rows through an index: measured on an H200.

A copy in expert order costs a launch and 0.7 us for a million values; rows asked for one by one cost the
product 20 to 60 ns a step of a tile of more than 64 of them (`gemm/gather.cuh`). So it pays with narrow
experts, and with few rows an expert. Every choice gives the same bits.
"""

from __future__ import annotations

from imbrex.kernels.gemm.gemm import Epilogue, Layout, gemm_variant
from imbrex.kernels.gemm.tiling import PAIRED, SHARED, SMALL
from imbrex.kernels.jit import Variant

TILINGS = (SHARED, PAIRED, SMALL)
NARROW_WIDTH, FEW_WIDTH, FEW_ROWS = 1536, 2048, 64
"""F up to which it is faster with any number of rows (tokens to weighted sums, 1 to 16384 rows, copy over
gathered: Qwen3 1.00 to 1.12, Qwen2 0.98 to 1.11), and with so many an expert in the mean (DeepSeek-V3 1.00 to
1.04; with more 0.94 to 1.01). Wider: Phi-3.5 0.91 to 1.16, Mixtral 0.90 to 1.06."""


def gathers(inner: int, rows: int, experts: int) -> bool:
    """Whether experts of width F = `inner` had better read `rows` rows, of all of them together, in place."""
    return inner <= NARROW_WIDTH or (inner <= FEW_WIDTH and rows <= FEW_ROWS * experts)


def shipped_variants() -> list[Variant]:
    return [gemm_variant(Layout.FORWARD, Epilogue.SWIGLU, tiling, gather=True) for tiling in TILINGS]
