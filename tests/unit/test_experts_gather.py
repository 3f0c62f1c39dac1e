"""When rows are read through an index, against what was measured on an H200 (docs/LOG.md)."""

from __future__ import annotations

import pytest
import torch

from imbrex.kernels.ffn.fp8_tokens import gathers_quantised
from imbrex.kernels.ffn.tokens import TILINGS, gathers
from imbrex.kernels.gemm.gemm import Epilogue, Layout, Tiling
from imbrex.kernels.gemm.tiling import PAIRED, SHARED, SMALL, choose_tiling

# experts of one rank, F, rows; microseconds from tokens to weighted sums, copied and gathered
GATHERED = {
    "Qwen3, decode": (128, 768, 8),  # 62, 57
    "Qwen3, 16384 rows": (32, 768, 16384),  # 314, 297
    "Qwen2, 4096 rows": (16, 1408, 4096),  # 177, 173
    "DeepSeek-V3, 64 rows an expert": (64, 2048, 4096),  # 1427, 1389
}
COPIED = {
    "DeepSeek-V3, 256 rows an expert": (64, 2048, 16384),  # 2791, 2874
    "Mixtral, 16 rows": (2, 14336, 16),  # equal counts: 210, 234
    "Phi-3.5, 512 rows": (4, 6400, 512),  # equal counts: 203, 215
}


@pytest.mark.parametrize("name", [*GATHERED, *COPIED])
def test_the_faster_way_is_taken(name: str) -> None:
    experts, inner, rows = {**GATHERED, **COPIED}[name]
    assert gathers(inner, rows, experts) == (name in GATHERED)


def test_many_rows_are_gathered_in_pairs() -> None:
    """512 rows of each of 32 experts of Qwen3: 176 us, 180 in single blocks; 128: 93 and 89."""

    def chosen(rows: int, gather: bool = True) -> Tiling:
        what = Layout.FORWARD, Epilogue.SWIGLU, rows, 32, (rows, 768)
        return choose_tiling(*what, sms=132, depth=2048, gather=gather)

    assert (chosen(16384), chosen(16384, gather=False)) == (PAIRED, SHARED)
    assert chosen(4096) == SHARED
    assert set(TILINGS) == {SHARED, PAIRED, SMALL}


@pytest.mark.parametrize(
    ("experts", "inner", "tokens", "rows", "gathered"),
    [
        (32, 768, 2048, 16384, True),  # Qwen3, 1.02 to 1.05
        (64, 2048, 512, 4096, True),  # DeepSeek-V3, 1.00 to 1.02
        (64, 2048, 1024, 8192, False),  # 0.98
        (16, 1408, 4096, 16384, False),  # Qwen2, four rows of a token
        (2, 14336, 64, 128, False),  # Mixtral, two
    ],
)
def test_when_quantised_tokens_are_gathered(
    experts: int, inner: int, tokens: int, rows: int, gathered: bool
) -> None:
    down_eDF = torch.empty(experts, 128, inner, device="meta")
    assert gathers_quantised(down_eDF, tokens, rows) == gathered
