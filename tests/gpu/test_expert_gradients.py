"""SwiGLU's gradient in a product's epilogue, gradients added to others, and the fp8 experts, against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.kernels.ffn import fp8
from imbrex.kernels.ffn.ffn import ffn
from imbrex.kernels.ffn.fp8 import ffn_fp8, quantise_experts, quantise_rows
from imbrex.kernels.ffn.fp8_tokens import ffn_tokens_fp8
from imbrex.kernels.ffn.glue import plan_groups, sum_rows, swiglu_backward
from imbrex.kernels.gemm.gemm import Epilogue, Layout, Slopes, launch_gemm
from imbrex.kernels.gemm.tiling import FP8_DOWN_TILINGS, FP8_UP_TILINGS, GRADIENT_TILINGS, OWN

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
COUNTS = [130, 0, 1, 300, 64, 65, 128]
TAIL = 9


def draw(*shape: int) -> Tensor:
    scale = shape[-1] ** -0.5 if len(shape) == 3 else 1.0
    return (torch.randn(*shape, device=CUDA) * scale).to(torch.bfloat16)


def error(found: Tensor, reference: Tensor) -> float:
    return float((found.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("tiling", GRADIENT_TILINGS, ids=str)
@pytest.mark.parametrize("inner", [264, 512])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_fused_gradient_is_the_separate_one(tiling, inner: int, weighted: bool) -> None:
    torch.manual_seed(0)
    rows, width = sum(COUNTS), 320
    d_y, down, gate_up = draw(rows + TAIL, width), draw(len(COUNTS), width, inner), draw(rows, 2 * inner)
    weights = torch.rand(rows, device=CUDA) if weighted else None
    groups = plan_groups(torch.tensor(COUNTS, device=CUDA))
    act, d_gate_up = draw(rows, inner), draw(rows, 2 * inner)
    parts = torch.full((-(-inner // tiling.block_n), rows), float("nan"), device=CUDA) if weighted else None
    slopes = Slopes(gate_up=gate_up, d_gate_up=d_gate_up, d_weights=parts)
    common = {"epilogue": Epilogue.SWIGLU_GRADIENT, "weights_R": weights, "slopes": slopes, "tiling": tiling}
    launch_gemm(Layout.DGRAD, d_y, down, groups.ends_e, act, groups.counter, **common)
    d_act = torch.empty_like(act)
    launch_gemm(Layout.DGRAD, d_y, down, groups.ends_e, d_act, groups.counter, tiling=OWN)
    wanted = swiglu_backward(d_act, gate_up, weights, groups.ends_e)
    assert error(d_gate_up, wanted[0]) < 5e-3  # the separate one rounds d_act to bf16 first
    assert error(act, wanted[1]) < 1e-5
    if parts is not None and wanted[2] is not None:
        assert error(parts.sum(0), wanted[2]) < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    rows, width, inner = sum(COUNTS), 1024, 256
    gate_up, down = draw(len(COUNTS), 2 * inner, width), draw(len(COUNTS), width, inner)
    counts = torch.tensor(COUNTS, device=CUDA)
    sums = tuple(torch.randn(t.shape, device=CUDA).to(dtype) for t in (gate_up, down))
    before = [t.double() for t in sums]
    x = draw(rows, width)
    leaves = [t.requires_grad_() for t in (x, gate_up, down)]
    d_y = draw(rows, width)
    plain = torch.autograd.grad(ffn(x, gate_up, down, counts), leaves, d_y)
    y = ffn(x, gate_up, down, counts, gradients=(sums[0], sums[1]))
    d_x, *nothing = torch.autograd.grad(y, leaves, d_y, allow_unused=True)
    assert nothing == [None, None]
    assert torch.equal(d_x, plain[0])
    for total, start, gradient in zip(sums, before, plain[1:], strict=True):
        assert error(total, start + gradient.double()) < 5e-3


def reference(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    outputs = []
    for piece, up, out in zip(rows.split(COUNTS), gate_up, down, strict=True):
        gate_R, up_R = (piece @ up.T).chunk(2, 1)
        outputs.append((F.silu(gate_R) * up_R) @ out.T)
    return torch.cat(outputs)


def exact(values: Tensor, scales: Tensor, high: int) -> Tensor:
    return values.double() * scales.double().repeat_interleave(128, -1).repeat_interleave(high, -2)


@pytest.mark.parametrize("tiling", sorted({*FP8_UP_TILINGS, *FP8_DOWN_TILINGS}, key=str), ids=str)
def test_fp8_experts(monkeypatch: pytest.MonkeyPatch, tiling) -> None:
    torch.manual_seed(2)
    monkeypatch.setattr(fp8, "choose_tiling", lambda *_, **__: tiling)
    rows, width, inner = sum(COUNTS), 512, 384
    x, gate_up, down = draw(rows + TAIL, width), draw(7, 2 * inner, width), draw(7, width, inner)
    x[rows:] = float("nan")
    counts, weights = torch.tensor(COUNTS, device=CUDA), torch.rand(rows + TAIL, device=CUDA)
    experts = quantise_experts(gate_up, down)
    _, values, scales = quantise_rows(x, counts)
    largest = torch.tensor(
        448.0, device=CUDA
    )  # by a number, a GPU's tensor is multiplied with its reciprocal
    assert torch.equal(scales[:rows], x[:rows].float().view(rows, 4, 128).abs().amax(2) / largest)
    y = ffn_fp8(x, experts, counts, weights_R=weights)
    assert torch.equal(y[:rows], ffn_fp8(x, experts, counts, weights_R=weights)[:rows])
    quantised = reference(
        exact(values[:rows], scales[:rows], 1),
        exact(experts.gate_up_eGD, experts.gate_up_scales, 128),
        exact(experts.down_eDF, experts.down_scales, 128),
    )
    assert error(y[:rows], quantised * weights[:rows, None]) < 4e-2  # the activation's rounding
    whole = reference(x[:rows].double(), gate_up.double(), down.double()) * weights[:rows, None]
    assert error(y[:rows], whole) < 8e-2


@pytest.mark.parametrize("tiling", FP8_UP_TILINGS, ids=str)
def test_fp8_tokens(monkeypatch: pytest.MonkeyPatch, tiling) -> None:
    """Quantised once and gathered, or for each choice: the bits of copied rows. Tokens repeat."""
    torch.manual_seed(3)
    monkeypatch.setattr(fp8, "choose_tiling", lambda *_, **__: tiling)
    tokens, rows, width, inner = 301, sum(COUNTS), 512, 384
    experts = quantise_experts(draw(7, 2 * inner, width), draw(7, width, inner))
    x, counts = draw(tokens, width), torch.tensor(COUNTS, device=CUDA)
    source = torch.randint(tokens - 1, (rows,), device=CUDA)
    position = torch.randint(-1, rows, (tokens, 3), device=CUDA)
    position[-1] = -1
    weights = torch.rand(tokens, 3, device=CUDA)
    wanted = sum_rows(ffn_fp8(x[source], experts, counts), position, weights)
    for gather in (True, False, None):
        found = ffn_tokens_fp8(x, experts, counts, source, position, weights, gather=gather)
        assert torch.equal(found, wanted)
