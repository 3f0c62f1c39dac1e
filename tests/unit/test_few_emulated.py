"""Products of few tokens, emulated, against float64."""

from __future__ import annotations

import pytest
import torch

from imbrex.kernels.gemm import few
from tests.emulated import gemm, kernel

pytestmark = pytest.mark.skipif(not kernel.available(), reason="compiles the kernel with g++")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few, "_kernel", lambda variant, _: gemm.EmulatedKernel(variant, 0, None, ()))
    monkeypatch.setattr(few, "multiprocessors", lambda _: 3)


@pytest.mark.parametrize(("tokens", "columns", "depth"), [(3, 40, 1536), (16, 20, 512), (27, 24, 512)])
@pytest.mark.parametrize("added", [None, False, True], ids=["plain", "normed", "summed"])
def test_as_float64(tokens: int, columns: int, depth: int, added: bool | None) -> None:
    """Two chunks of a warp and more, or all at once; columns that fill no block; two tiles of tokens."""
    torch.manual_seed(tokens)
    x_TK, more_TK = (torch.randn(tokens, depth).bfloat16() for _ in range(2))
    norm_K = (1 + torch.randn(depth) / 4).bfloat16()
    weight_NK = (torch.randn(columns, depth) * depth**-0.5).bfloat16()
    if added is None:
        y_TN, x_of = few.product_of_few(x_TK, weight_NK), x_TK
        exact_TK = x_TK.double()
    else:
        more = more_TK if added else None
        y_TN, x_of = few.normed_product_of_few(x_TK, more, norm_K, 1e-6, weight_NK)
        assert torch.equal(x_of, x_TK + more_TK if added else x_TK)
        exact_TK = torch.nn.functional.rms_norm(x_of.double(), (depth,), norm_K.double(), 1e-6)
    torch.testing.assert_close(y_TN.double(), exact_TK @ weight_NK.double().t(), rtol=8e-3, atol=8e-3)


def test_weights_that_shared_memory_holds() -> None:
    """Qwen3-30B-A3B's two; DeepSeek-V3's output is too long, and 512 rows leave half of a GPU idle."""
    shapes = (5120, 2048), (2048, 4096), (7168, 16384), (512, 2048)
    assert [few._fits(*shape, 132) for shape in shapes] == [True, True, False, False]
