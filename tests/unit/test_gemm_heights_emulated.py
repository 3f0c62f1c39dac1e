"""The grouped GEMM's kernel in tiles of 64 rows, as it finds them from the counts, on the CPU."""

from __future__ import annotations

import shutil

import pytest
import torch

from imbrex.kernels.experts_gemm import Layout, Tiling, launch_gemm
from imbrex.kernels.experts_tiling import PAIRED, SHARED
from tests.emulated.gemm import emulate

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the kernel with g++")


@pytest.mark.parametrize("tiling", [SHARED, PAIRED], ids=["single", "pair"])
def test_one_tile_of_128_rows_becomes_two_of_64(monkeypatch: pytest.MonkeyPatch, tiling: Tiling) -> None:
    """Two blocks, 128 rows, one column of tiles: one wave of 128 rows is 1.00, of 64 rows 0.65."""
    torch.manual_seed(0)
    a, b = torch.randn(128, 72).bfloat16(), torch.randn(1, 200, 72).bfloat16()
    out = torch.full((128, 200), torch.nan, dtype=torch.bfloat16)
    emulate(monkeypatch, [a, b, out], blocks=2)
    ends_e, counter = torch.tensor([128], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    launch_gemm(Layout.FORWARD, a, b, ends_e, out, counter, tiling=tiling)
    wanted = a.double() @ b[0].double().mT
    assert float((out.double() - wanted).norm() / wanted.norm()) < 3e-3
    assert counter.tolist() == [0, 0]
