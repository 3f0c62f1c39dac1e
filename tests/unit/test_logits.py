"""The gradient of a gate's logits by products of bfloat16 numbers, on the CPU with a product of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from imbrex.kernels.gate import logits as few
from imbrex.router.logits import logits_backward, split
from tests.emulated import kernel

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
    parts = torch.cat(split(d_logits_TE), dim=1).bfloat16()
    d_x_TD, d_weight_ED = logits_backward(parts, x_TD, weight_ED, (True, True), _product)
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
    parts = torch.randn(T, 2 * E).bfloat16()
    assert logits_backward(parts, x_TD, weight_ED, (False, False)) == (None, None)


@pytest.mark.skipif(not kernel.available(), reason="compiles the kernel with g++")
@pytest.mark.parametrize(("tokens", "experts", "width"), [(1, 9, 8), (8, 16, 2048), (19, 7, 2056)])
def test_logits_of_few_tokens(tokens: int, experts: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one block and several, of which the last have fewer; the same bits whoever is beside."""
    monkeypatch.setattr(few, "_kernel", lambda variant, _: kernel.load(variant))
    torch.manual_seed(0)
    x_TD, weight_ED = torch.randn(tokens, width).bfloat16(), torch.randn(experts, width).bfloat16()
    logits_TE = few.logits_of_few(x_TD, weight_ED)
    exact = x_TD.double() @ weight_ED.double().t()
    terms = x_TD.double().abs() @ weight_ED.double().abs().t()
    assert ((logits_TE.double() - exact).abs() <= terms * 2.0**-20).all()
    assert torch.equal(few.logits_of_few(x_TD[-1:], weight_ED), logits_TE[-1:])


def test_who_gets_them_by_that_kernel() -> None:
    weight_ED = torch.zeros(4, 16).bfloat16()
    for x_TD, said in (
        (torch.zeros(1, 16).expand(few.MOST_PRODUCTS // 64 + 1, 16), "up to 20 Mi products"),
        (torch.zeros(0, 16), "some tokens"),
        (torch.zeros(2, 12), "a multiple of 8"),
        (torch.zeros(2, 16), "NVIDIA GPU"),
    ):
        reason = few.why_not_few(x_TD.bfloat16(), weight_ED)
        assert reason is not None
        assert said in reason


@pytest.mark.skipif(not kernel.available(), reason="compiles the kernel with g++")
def test_halves_are_added_and_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few, "_kernel", lambda variant, _: kernel.load(variant))
    halves = torch.randn(2 * 3, 700)
    out = few.add_halves(halves, torch.empty(3, 700).bfloat16())
    assert torch.equal(out, halves.unflatten(0, (2, -1)).sum(0).bfloat16())
    assert "multiple of 4" in str(few.why_not_halves(torch.zeros(2, 6, 3)[:, :3]))
