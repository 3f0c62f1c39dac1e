"""Attention of one token a row, emulated, against torch's under a mask."""

from __future__ import annotations

import pytest
import torch

from imbrex.kernels.attention import few
from imbrex.serve import attention
from imbrex.serve.attention import Rotary, Span
from imbrex.serve.between import grouped_into_cache
from tests.emulated import gemm, kernel

pytestmark = pytest.mark.skipif(not kernel.available(), reason="compiles the kernel with g++")
LENGTHS = [0, 150, 71]


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        few,
        "_kernel",
        lambda shared, normed, _: gemm.EmulatedKernel(few._variant(shared, normed), 0, None, ()),
    )


@pytest.mark.parametrize(("heads", "groups", "normed", "splits"), [(8, 1, True, 3), (4, 2, False, 1)])
def test_as_torch_under_a_mask(
    heads: int, groups: int, normed: bool, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 1, 151 and 72 keys: parts without keys, of one tile and of three; then as tickets are left."""
    monkeypatch.setattr(few, "splits_of", lambda *_: splits)
    torch.manual_seed(heads)
    capacity, slots, width = 160, 4, few.HEAD
    bf16 = torch.bfloat16
    turns = Rotary(width, 1e4, capacity, device=torch.device("cpu"), dtype=bf16).turn_LC
    norms = (torch.rand(width).bfloat16(), torch.rand(width).bfloat16()) if normed else None
    caches = [[torch.randn(slots * capacity, groups, width, dtype=bf16) for _ in range(2)]]
    caches.append([part.clone() for part in caches[0]])
    for step in range(2):
        span = Span(torch.tensor(LENGTHS) + step, 1, capacity)
        qkv_THC = torch.randn(len(LENGTHS), heads + 2 * groups, width, dtype=bf16)
        turn_TC = turns[span.position_T]
        of_heads = qkv_THC, norms, turn_TC, heads, 1e-6
        y_THC = few.attend_few(*of_heads, (caches[0][0], caches[0][1]), span.row_T, span.position_T)
        queries = grouped_into_cache(*of_heads, (caches[1][0], caches[1][1]), span.row_T)
        keys, values = (
            part.view(slots, capacity, groups, width)[: len(LENGTHS)].float() for part in caches[1]
        )
        truth = attention._dot(queries[:, None].float(), keys, values, span.mask_B1SL())
        torch.testing.assert_close(y_THC.float(), truth[:, 0], rtol=2e-2, atol=2e-2)
        for own, other in zip(*caches, strict=True):
            torch.testing.assert_close(own, other, rtol=2e-2, atol=2e-2)
            untouched = torch.ones(len(own), dtype=torch.bool).index_fill(0, span.row_T, False)
            assert torch.equal(own[untouched], other[untouched]) or step
