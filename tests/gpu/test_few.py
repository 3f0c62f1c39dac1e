"""Products of few rows and attention of single tokens on a GPU: values, and bits in a captured chain."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.kernels.attention import few as attention
from imbrex.kernels.gemm import few
from imbrex.serve.attention import Rotary, Span, _dot
from imbrex.serve.between import grouped_into_cache

pytestmark = pytest.mark.gpu
KIND = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
EPS = 1e-6


@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize(("columns", "depth"), [(5120, 2048), (2048, 4096), (576, 7168), (7168, 16384)])
def test_products_of_few_rows(tokens: int, columns: int, depth: int) -> None:
    torch.manual_seed(0)
    weight_NK = torch.randn(columns, depth, **KIND) * depth**-0.5
    x_TK, more_TK, norm_K = (torch.randn(*shape, depth, **KIND) for shape in ((tokens,), (tokens,), ()))
    y_TN = few.product_of_few(x_TK, weight_NK)
    torch.testing.assert_close(y_TN.double(), x_TK.double() @ weight_NK.double().t(), rtol=8e-3, atol=8e-3)
    y_TN, sum_TK = few.normed_product_of_few(x_TK, more_TK, norm_K, EPS, weight_NK)
    assert torch.equal(sum_TK, x_TK + more_TK)
    normed_TK = F.rms_norm(sum_TK.double(), (depth,), norm_K.double(), EPS)
    torch.testing.assert_close(y_TN.double(), normed_TK @ weight_NK.double().t(), rtol=8e-3, atol=2e-2)


class Layers:
    """Two layers of attention with what they need, over one cache each. rows: of 900 tokens and more."""

    heads, groups, width, capacity, hidden = 16, 4, 128, 1280, 2048

    def __init__(self, rows: int) -> None:
        shape = rows * self.capacity, self.groups, self.width
        self.caches = [tuple(torch.randn(shape, **KIND) for _ in range(2)) for _ in range(2)]
        self.norms = torch.rand(self.width, **KIND), torch.rand(self.width, **KIND)
        columns = (self.heads + 2 * self.groups) * self.width
        self.qkv = torch.randn(columns, self.hidden, **KIND) * self.hidden**-0.5
        self.out = torch.randn(self.hidden, self.heads * self.width, **KIND) * self.hidden**-0.5
        self.norm = torch.rand(self.hidden, **KIND)
        self.span = Span(900 + 7 * torch.arange(rows, device="cuda"), 1, self.capacity)
        self.turns = Rotary(self.width, 1e6, self.capacity, **KIND).turn_LC[self.span.position_T]

    def __call__(self, x_TD: Tensor, *, in_turns: bool = False) -> Tensor:
        added_TD = None
        for keys, values in self.caches:
            qkv_TX, x_TD = few.normed_product_of_few(x_TD, added_TD, self.norm, EPS, self.qkv)
            _wait(in_turns)
            of_heads = qkv_TX.view(len(x_TD), -1, self.width), self.norms, self.turns, self.heads, EPS
            places = self.span.row_T, self.span.position_T
            y_THC = attention.attend_few(*of_heads, (keys, values), *places)
            _wait(in_turns)
            added_TD = few.product_of_few(y_THC.flatten(1), self.out)
            _wait(in_turns)
        assert added_TD is not None
        return x_TD + added_TD


def _wait(wanted: bool) -> None:
    if wanted:
        torch.cuda.synchronize()


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_captured_chain_has_the_bits_of_calls_one_by_one(rows: int) -> None:
    """Every kernel begins before the one before it has ended."""
    torch.manual_seed(rows)
    with torch.no_grad():
        layers = Layers(rows)
        x_TD = torch.randn(rows, layers.hidden, **KIND)
        layers(x_TD)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y_TD = layers(x_TD)
        for _ in range(50):
            x_TD.normal_()
            graph.replay()
            assert torch.equal(y_TD, layers(x_TD, in_turns=True))


@pytest.mark.parametrize(("rows", "heads", "groups"), [(8, 32, 4), (33, 8, 8), (200, 8, 4), (3, 8, 1)])
@pytest.mark.parametrize("tokens", [0, 700])
def test_attention_of_single_tokens(rows: int, heads: int, groups: int, tokens: int) -> None:
    torch.manual_seed(rows)
    capacity, width = tokens + rows, attention.HEAD
    qkv_THC = torch.randn(rows, heads + 2 * groups, width, **KIND)
    keys, values = (torch.randn(rows * capacity, groups, width, **KIND) for _ in range(2))
    span = Span(tokens + torch.arange(rows, device="cuda"), 1, capacity)
    of_heads = qkv_THC, None, Rotary(width, 1e6, capacity, **KIND).turn_LC[span.position_T], heads, EPS
    with torch.no_grad():
        assert attention.why_not_few(qkv_THC, heads, (keys, values)) is None
        y_THC = attention.attend_few(*of_heads, (keys, values), span.row_T, span.position_T)
    q_THC = grouped_into_cache(*of_heads, (keys.clone(), values.clone()), span.row_T)
    k_BLGC, v_BLGC = (part.view(rows, capacity, groups, width).float() for part in (keys, values))
    truth = _dot(q_THC[:, None].float(), k_BLGC, v_BLGC, span.mask_B1SL())[:, 0]
    torch.testing.assert_close(y_THC.float(), truth, rtol=2e-2, atol=2e-2)
