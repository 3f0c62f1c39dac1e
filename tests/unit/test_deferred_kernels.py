"""The fused experts leave their weights' gradients to a deferral: the same bits, later. Kernels by g++."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from imbrex.kernels.ffn.ffn import ffn
from imbrex.runtime.deferred import Deferral
from tests.emulated.gemm import emulate
from tests.emulated.ragged import draw

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the kernel with g++")
COUNTS, WIDTH, INNER = [70, 0, 3], 64, 128


def leaves() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, gate_up, down, weights."""
    torch.manual_seed(11)
    rows, experts = draw(73, WIDTH), len(COUNTS)
    gate_up, down = draw(experts, 2 * INNER, WIDTH) / 8, draw(experts, WIDTH, INNER) / 11
    for leaf in (made := (rows, gate_up, down, torch.rand(73))):
        leaf.requires_grad_()
    return made


def test_weight_gradients_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, blocks=1)
    counts, d_y, given = torch.tensor(COUNTS), draw(73, WIDTH), leaves()
    y = ffn(given[0], given[1], given[2], counts, weights_R=given[3])
    wanted = torch.autograd.grad(y, given, d_y)

    deferral = Deferral()
    with deferral.record():
        y = ffn(given[0], given[1], given[2], counts, weights_R=given[3])
    d_x, *nothing, d_weights = torch.autograd.grad(y, given, d_y, allow_unused=True)
    assert nothing == [None, None]
    assert torch.equal(d_x, wanted[0])
    assert torch.equal(d_weights, wanted[3])
    left = deferral.gradients(given[1:3])
    assert [torch.equal(a, b) for a, b in zip(left, wanted[1:3], strict=True) if a is not None] == [
        True,
        True,
    ]
    assert deferral.gradients(given[1:3]) == [None, None]


def test_those_of_two_calls_are_added_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the product's epilogue: one rounding, where two gradients and their sum are three."""
    emulate(monkeypatch, blocks=1)
    given, sums, wanted = leaves(), None, [0.0, 0.0]
    for counts in ([70, 0, 3], [1, 60, 12]):
        d_y, deferral = draw(73, WIDTH), Deferral()
        with deferral.record():
            y = ffn(given[0], given[1], given[2], torch.tensor(counts))
        torch.autograd.grad(y, given[:1], d_y)
        before, sums = sums, deferral.gradients(given[1:3], sums)
        alone = torch.autograd.grad(ffn(*given[:3], torch.tensor(counts)), given[1:3], d_y)
        wanted = [total + grad.float() for total, grad in zip(wanted, alone, strict=True)]
        assert before is None or all(a is b for a, b in zip(before, sums, strict=True))
    for total, exact in zip(sums, wanted, strict=True):
        assert total is not None
        assert (total.float() - exact).norm() < 4e-3 * exact.norm()


def test_they_are_added_where_the_caller_says(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, blocks=1)
    counts, d_y, given = torch.tensor(COUNTS), draw(73, WIDTH), leaves()[:3]
    wanted = torch.autograd.grad(ffn(given[0], given[1], given[2], counts), given, d_y)
    sums = torch.zeros(given[1].shape), torch.ones(given[2].shape, dtype=torch.bfloat16)
    deferral = Deferral()
    with deferral.record():
        y = ffn(given[0], given[1], given[2], counts, gradients=sums)
    torch.autograd.grad(y, given, d_y, allow_unused=True)
    assert not sums[0].any()
    assert deferral.gradients(given[1:]) == [None, None]
    for total, before, gradient in zip(sums, (0, 1), wanted[1:], strict=True):
        assert (total.float() - before - gradient.float()).norm() < 1e-2 * gradient.float().norm()


def test_frozen_weights_and_no_rows_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, blocks=1)
    given = leaves()[:3]
    deferral = Deferral()
    with deferral.record():
        frozen = ffn(given[0], given[1], given[2].detach(), torch.tensor(COUNTS))
        empty = ffn(given[0][:0], given[1], given[2], torch.zeros(3, dtype=torch.int64))
    assert torch.autograd.grad(frozen, given[:2], draw(73, WIDTH))[1].any()
    zeros = torch.autograd.grad(empty, given[1:], draw(0, WIDTH))
    assert [bool(z.any()) for z in zeros] == [False, False]
    assert deferral.gradients(given[1:]) == [None, None]
