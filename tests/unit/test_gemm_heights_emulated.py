"""The grouped GEMM's kernel in tiles of 64 rows, as it finds them from the counts, on the CPU."""

from __future__ import annotations

import shutil

import pytest
import torch

from imbrex.kernels.gemm.gemm import Layout, Tiling, launch_gemm
from imbrex.kernels.gemm.tiling import PAIRED, SHARED
from tests.emulated.gemm import emulate
from tests.emulated.ragged import LIMIT, draw, error, poisoned

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the kernel with g++")


@pytest.mark.parametrize("tiling", [SHARED, PAIRED], ids=["single", "pair"])
def test_one_tile_of_128_rows_becomes_two_of_64(monkeypatch: pytest.MonkeyPatch, tiling: Tiling) -> None:
    """Two blocks, 128 rows, one column of tiles: one wave of 128 rows is 1.00, of 64 rows 0.65."""
    torch.manual_seed(0)
    a, b, out = draw(128, 72), draw(1, 200, 72), poisoned(128, 200)
    emulate(monkeypatch, [a, b, out], blocks=2)
    ends_e, counter = torch.tensor([128], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    launch_gemm(Layout.FORWARD, a, b, ends_e, out, counter, tiling=tiling)
    assert error(out, a.double() @ b[0].double().mT) < LIMIT
    assert counter.tolist() == [0, 0]
