"""The experts' network and its gradients by the kernels' sources, run on the CPU, against fp64."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from imbrex.kernels.ffn import products, slopes
from imbrex.kernels.ffn.ffn import ffn, give_gradient, run_ffn, run_ffn_backward
from imbrex.kernels.ffn.tokens import ffn_tokens
from imbrex.kernels.gemm.gemm import Epilogue, Layout, Tiling
from imbrex.kernels.gemm.tiling import OWN, override_tilings
from tests.emulated.gemm import NARROW, emulate
from tests.emulated.ragged import TAIL, draw, error, reference_ffn, rows_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the kernel with g++")


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
def test_ffn_and_its_gradients(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """All kernels of a training step, with narrow rows and, as wide ones have it, SwiGLU's gradient apart: a
    contiguous copy is made of weights that are not."""
    if not fused:
        monkeypatch.setattr(slopes, "FUSED_WIDTH", 0)
    torch.manual_seed(4)
    counts, width, inner = [70, 0, 3], 64, 128
    rows = sum(counts)
    x, d_y = rows_of(counts, width), rows_of(counts, width)
    gate_up = draw(3, width, 2 * inner).mT / width**0.5
    down, weights = draw(3, width, inner) / inner**0.5, torch.rand(rows + TAIL)
    emulate(monkeypatch, blocks=1)
    y, kept, plan = run_ffn(x, gate_up, down, torch.tensor(counts), weights, True)
    found = run_ffn_backward(d_y, x, gate_up, down, plan, weights, kept, (True, True, True))
    exact = [t.detach().double().requires_grad_() for t in (x[:rows], gate_up, down, weights[:rows])]
    expected = torch.autograd.grad(reference_ffn(counts, *exact), exact, d_y[:rows].double())
    assert error(y[:rows], reference_ffn(counts, *exact).detach()) < 5e-3
    for name, one, other in zip(("x", "gate_up", "down", "weights"), found, expected, strict=True):
        cut = rows if name in ("x", "weights") else 3
        assert error(one[:cut], other) < 1e-2, name


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
def test_a_backward_holds_no_second_gate_and_up(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """Its own bytes, beside what it gives: SwiGLU's result. The bits are those of one that writes beside
    them, and through a graph that is retained they come again, from gate and up that are computed anew."""
    if not fused:
        monkeypatch.setattr(slopes, "FUSED_WIDTH", 0)
    torch.manual_seed(4)
    counts, width, inner = torch.tensor([70, 0, 3]), 64, 136
    x, d_y, weights = draw(73, width), draw(73, width), torch.rand(73)
    gate_up, down = draw(3, 2 * inner, width) / 8, draw(3, width, inner) / 11
    leaves = [t.detach().requires_grad_() for t in (x, gate_up, down, weights)]
    emulate(monkeypatch, blocks=1)
    y = ffn(leaves[0], leaves[1], leaves[2], counts, weights_R=leaves[3])
    held: list[int] = []

    def counted(make: Any) -> Any:
        def made(*args: Any, **how: Any) -> Tensor:
            new = make(*args, **how)
            held.append(new.nbytes)
            return new

        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "new_empty", counted(Tensor.new_empty))
        patch.setattr(torch, "empty_like", counted(torch.empty_like))
        first = torch.autograd.grad(y, leaves, d_y, retain_graph=True)
    parts = 4 * 73 * -(-inner // OWN.block_n) if fused else 0  # of the weights' gradient, before their sum
    given = sum(one.nbytes for one in first)
    assert sum(held) == given + parts + 2 * 73 * inner
    again = torch.autograd.grad(y, leaves, d_y)
    _, kept, plan = run_ffn(x, gate_up, down, counts, weights, True)
    beside = run_ffn_backward(d_y, x, gate_up, down, plan, weights, kept, (True, True, True))
    y, given_d_y = ffn(leaves[0], leaves[1], leaves[2], counts, weights_R=leaves[3]), d_y.clone()
    give_gradient(y)
    over = torch.autograd.grad(y, leaves, given_d_y)
    assert over[0].data_ptr() == given_d_y.data_ptr()
    for one, *others in zip(first, again, beside, over, strict=True):
        assert all(torch.equal(one, other) for other in others)


Launched = list[tuple[Layout, Tiling]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """What every product contracted and how it was cut, as they come."""
    found, launch = [], products.launch_gemm

    def noted(layout: Layout, *tensors: Tensor, tiling: Tiling, **how: Any) -> None:
        found.append((layout, tiling))
        launch(layout, *tensors, tiling=tiling, **how)

    for module in (products, slopes):
        monkeypatch.setattr(module, "launch_gemm", noted)
    return found


def test_the_callers_tiles_are_taken_in_any_thread(
    monkeypatch: pytest.MonkeyPatch, launched: Launched
) -> None:
    """Forward here, and backward in autograd's thread: the same bits by other tiles."""
    torch.manual_seed(12)
    counts, found = torch.tensor([9, 0, 70]), []
    x, gate_up, down, d_y = draw(79, 64), draw(3, 256, 64) / 8, draw(3, 64, 128) / 11, draw(79, 64)
    emulate(monkeypatch, blocks=1)
    own = {(Layout.FORWARD, Epilogue.SWIGLU_KEEP): NARROW, (Layout.WGRAD, Epilogue.PLAIN): OWN}
    for given in ({}, own):
        launched.clear()
        leaves = [t.detach().requires_grad_() for t in (x, gate_up, down)]
        with override_tilings(given):
            y = ffn(leaves[0], leaves[1], leaves[2], counts)
            found.append([y.detach(), *torch.autograd.grad(y, leaves, d_y)])
        cut = [tiling for _, tiling in launched]
        assert (cut.count(NARROW), cut.count(OWN)) == ((1, 2) if given else (0, 0))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 1), (2, 3)], ids=str)
def test_some_gradients_and_not_others(
    monkeypatch: pytest.MonkeyPatch, launched: Launched, wanted: tuple[int, ...]
) -> None:
    """Of rows 0, gate and up 1, down 2, the rows' weights 3: the same bits as when all are wanted, and no
    product for the others."""
    torch.manual_seed(10)
    counts, width, inner = torch.tensor([9, 0, 4]), 64, 64
    given = draw(13, width), draw(3, 2 * inner, width) / 8, draw(3, width, inner) / 8, torch.rand(13)
    d_y = draw(13, width)
    emulate(monkeypatch, blocks=1)

    def gradients(of: tuple[int, ...]) -> list[Tensor]:
        rows, gate_up, down, weights = (t.detach().requires_grad_(i in of) for i, t in enumerate(given))
        y = ffn(rows, gate_up, down, counts, weights_R=weights)
        launched.clear()
        return list(torch.autograd.grad(y, [(rows, gate_up, down, weights)[i] for i in of], d_y))

    every = gradients((0, 1, 2, 3))
    for place, found in zip(wanted, gradients(wanted), strict=True):
        assert torch.equal(found, every[place])
    layouts = [layout for layout, _ in launched]
    assert layouts.count(Layout.WGRAD) == len({1, 2} & set(wanted))
    assert layouts.count(Layout.DGRAD) == 1 + (0 in wanted)


def test_widths_that_are_no_multiples_of_8(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(8)
    counts, width, inner = [9, 0, 4], 20, 12
    gate_up, down = draw(3, 2 * inner, width) / width**0.5, draw(3, width, inner) / inner**0.5
    x, d_y, weights = draw(13, width), draw(13, width), torch.rand(13)
    emulate(monkeypatch, blocks=1)
    leaves = [t.detach().requires_grad_() for t in (x, gate_up, down, weights)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    y = ffn(leaves[0], leaves[1], leaves[2], torch.tensor(counts), weights_R=leaves[3])
    wanted = reference_ffn(counts, exact[0], exact[1], exact[2], exact[3])
    assert y.shape == x.shape
    assert error(y, wanted) < 5e-3
    found = torch.autograd.grad(y, leaves, d_y)
    for one, other in zip(found, torch.autograd.grad(wanted, exact, d_y.double()), strict=True):
        assert error(one, other) < 1e-2
    sums = torch.zeros(gate_up.shape), torch.zeros(down.shape)
    with pytest.raises(ValueError, match="multiples of 8"):
        ffn(x, gate_up, down, torch.tensor(counts), gradients=sums)


def test_gradients_of_two_batches_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    counts, width, inner = [40, 30], 64, 128
    gate_up, down = draw(2, 2 * inner, width) / 8, draw(2, width, inner) / 11
    sums = torch.ones(gate_up.shape), torch.zeros(down.shape, dtype=torch.bfloat16)
    wanted = [total.double() for total in sums]
    emulate(monkeypatch, blocks=1)
    for _ in range(2):
        x, d_y = draw(70, width), draw(70, width)
        leaves = [t.detach().requires_grad_() for t in (x, gate_up, down)]
        y = ffn(leaves[0], leaves[1], leaves[2], torch.tensor(counts), gradients=sums)
        d_x, *nothing = torch.autograd.grad(y, leaves, d_y, allow_unused=True)
        exact = [t.detach().double().requires_grad_() for t in leaves]
        y_exact = reference_ffn(counts, exact[0], exact[1], exact[2], torch.ones(70))
        d_exact = torch.autograd.grad(y_exact, exact, d_y.double())
        assert nothing == [None, None]
        assert error(d_x, d_exact[0]) < 1e-2
        wanted = [total + more for total, more in zip(wanted, d_exact[1:], strict=True)]
    assert [error(a, b) < 1e-2 for a, b in zip(sums, wanted, strict=True)] == [True, True]
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        ffn(draw(70, width), gate_up, down, torch.tensor(counts), gradients=(sums[1], sums[0]))


def test_tokens_to_weighted_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    tokens, width, inner = 40, 64, 64
    x, gate_up, down = draw(tokens, width), draw(2, 2 * inner, width) / 8, draw(2, width, inner) / 8
    weights, ids = torch.rand(tokens, 2), torch.arange(2).repeat(tokens, 1)
    order = ids.flatten().argsort(stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel())
    position = position.view(tokens, 2)
    position[::3, 1] = -1
    weights[::3, 1] = 0.0
    emulate(monkeypatch, blocks=1)
    given = x, gate_up, down, torch.tensor([tokens, tokens]), order // 2, position, weights
    found = ffn_tokens(*given, gather=True)
    assert torch.equal(found, ffn_tokens(*given, gather=False))
    args = x[order // 2].double(), gate_up.double(), down.double(), weights.flatten()[order].double()
    reference = torch.zeros(tokens, width, dtype=torch.float64)
    reference.index_add_(0, order // 2, reference_ffn([tokens, tokens], *args))
    assert error(found, reference) < 5e-3
