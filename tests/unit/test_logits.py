"""The gradient of a gate's logits by products of bfloat16 numbers, on the CPU with a product of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from imbrex.router.logits import logits_backward, split

T, D, E = 64, 48, 12


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a.float() @ b.float()


@pytest.mark.untraced
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_two_parts_keep_fifteen_bits(compiled: bool) -> None:
    x = torch.randn(4096, dtype=torch.float32) * torch.logspace(-20, 20, 4096, dtype=torch.float32)
    call = torch.compile(split, fullgraph=True) if compiled else split
    high, low = (part.bfloat16().double() for part in call(x))
    assert ((x.double() - high - low).abs() <= x.double().abs() * 2.0**-15).all()


def test_gradients_are_those_of_float32_copies() -> None:
    """Within 2^-14 of the sums' terms and one rounding to bfloat16."""
    x_TD, weight_ED = torch.randn(T, D).bfloat16(), torch.randn(E, D).bfloat16()
    d_logits_TE = torch.randn(T, E, dtype=torch.float32)
    d_x_TD, d_weight_ED = logits_backward(d_logits_TE, x_TD, weight_ED, _product, True, True)
    for found, left, right in (
        (d_x_TD, d_logits_TE, weight_ED),
        (d_weight_ED, d_logits_TE.t(), x_TD),
    ):
        assert found is not None
        assert found.dtype == torch.bfloat16
        exact, terms = left.double() @ right.double(), left.double().abs() @ right.double().abs()
        assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-8 + terms * 2.0**-14).all()


def test_nothing_is_computed_that_nobody_needs() -> None:
    x_TD, weight_ED = torch.randn(T, D).bfloat16(), torch.randn(E, D).bfloat16()
    d_logits_TE = torch.randn(T, E, dtype=torch.float32)
    assert logits_backward(d_logits_TE, x_TD, weight_ED, _product, False, False) == (None, None)
