"""The grouped GEMM's kernel source, run on the CPU: indices, ragged ends, ring and turns, against fp64."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.kernels import experts_ffn, experts_gemm
from imbrex.kernels.experts_ffn import ffn, run_ffn, run_ffn_backward
from imbrex.kernels.experts_gemm import Epilogue, Layout, Tiling, launch_gemm
from imbrex.kernels.experts_tiling import LOW, NARROW, OWN, SHARED, SMALL, override_tilings
from imbrex.kernels.experts_tokens import ffn_tokens
from imbrex.kernels.jit import KernelError
from tests.emulated.gemm import emulate

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the kernel with g++")
LIMIT = 3e-3  # of ||out - ref|| / ||ref||: bf16 rounds by 2^-9 at most
TAIL = 5
COUNTS = [130, 0, 1, 70]
PAIR = SHARED._replace(cluster=2)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"), dtype=torch.bfloat16)


def error(found: Tensor, reference: Tensor) -> float:
    return float((found.double() - reference).norm() / reference.norm())


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32)


def rows_of(counts: list[int], width: int) -> Tensor:
    """Rows past the counts are NaN: one that is read shows."""
    rows = draw(sum(counts) + TAIL, width)
    rows[sum(counts) :] = float("nan")
    return rows


def per_expert(counts: list[int], rows: Tensor, weight: Tensor) -> Tensor:
    pieces = rows[: sum(counts)].double().split(counts)
    return torch.cat([piece @ w.double() for piece, w in zip(pieces, weight, strict=True)])


def check_rows(out: Tensor, reference: Tensor) -> None:
    assert error(out[: reference.shape[0]], reference) < LIMIT
    assert out[reference.shape[0] :].isnan().all()


@pytest.mark.parametrize(("tiling", "width"), [(SHARED, 136), (LOW, 64)], ids=["shared", "low"])
def test_forward_keeps_gate_and_up(monkeypatch: pytest.MonkeyPatch, tiling: Tiling, width: int) -> None:
    torch.manual_seed(0)
    a, b, counter = (
        rows_of(COUNTS, width),
        draw(len(COUNTS), 2 * 144, width),
        torch.zeros(2, dtype=torch.int32),
    )
    act, gate_up = poisoned(a.shape[0], 144), poisoned(a.shape[0], 288)
    emulate(monkeypatch, [a, b, act, gate_up], blocks=2)
    launch_gemm(
        Layout.FORWARD,
        a,
        b,
        ends_of(COUNTS),
        act,
        counter,
        tiling=tiling,
        epilogue=Epilogue.SWIGLU_KEEP,
        gate_up=gate_up,
    )
    reference = per_expert(COUNTS, a, b.mT)
    gate, up = reference.chunk(2, 1)
    check_rows(gate_up, reference)
    check_rows(act, F.silu(gate) * up)
    assert counter.tolist() == [0, 0]


def test_segments_give_the_order_and_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two column slices over all experts, the second one first; rows weighted."""
    torch.manual_seed(1)
    a, b, weights = rows_of(COUNTS, 64), draw(len(COUNTS), 256, 64), torch.rand(sum(COUNTS) + TAIL)
    out, ends = poisoned(a.shape[0], 256), [0, *accumulate(COUNTS)]
    slices = [(e, ends[e], ends[e + 1], c, c + 128) for c in (128, 0) for e in range(len(COUNTS))]
    emulate(monkeypatch, [a, b, out], blocks=2)
    launch_gemm(
        Layout.FORWARD,
        a,
        b,
        ends_of(COUNTS),
        out,
        torch.zeros(2, dtype=torch.int32),
        tiling=NARROW,
        epilogue=Epilogue.WEIGHTED,
        weights_R=weights,
        segments=torch.tensor(slices, dtype=torch.int32),
    )
    check_rows(out, per_expert(COUNTS, a, b.mT) * weights[: sum(COUNTS), None].double())


PAIRED = {
    "swiglu": (Layout.FORWARD, Epilogue.SWIGLU, SHARED, 192, 288),
    "forward": (Layout.FORWARD, Epilogue.PLAIN, SHARED, 136, 600),
    "rows' gradient": (Layout.DGRAD, Epilogue.PLAIN, SHARED, 72, 640),
}


@pytest.mark.parametrize("case", list(PAIRED))
def test_a_cluster_computes_the_same_bits(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Two clusters against one block; pairs that share columns, that do not, and one of a single tile."""
    torch.manual_seed(8)
    (layout, epilogue, tiling, depth, columns), counts = PAIRED[case], [200, 0, 1, 330]
    a = rows_of(counts, depth)
    b = draw(4, *((depth, columns) if layout is Layout.DGRAD else (columns, depth)))
    shape = (a.shape[0], columns // 2 if epilogue is Epilogue.SWIGLU else columns)
    found = []
    for cluster in (1, 2):
        out, counter = poisoned(*shape), torch.zeros(2, dtype=torch.int32)
        emulate(monkeypatch, [a, b, out], blocks=3 * cluster - 2, seed=cluster)
        one = tiling._replace(cluster=cluster)
        launch_gemm(layout, a, b, ends_of(counts), out, counter, tiling=one, epilogue=epilogue)
        assert counter.tolist() == [0, 0]
        found.append(out)
    assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16))
    assert found[0].isnan().sum() == TAIL * shape[1]


@pytest.mark.parametrize("tiling", [SHARED, PAIR, SMALL], ids=["shared", "pair", "small"])
def test_gathered_rows_give_the_bits_of_a_copy(monkeypatch: pytest.MonkeyPatch, tiling: Tiling) -> None:
    """Tokens that are wanted twice, once and never; those are NaN, and so is what lies past the last row."""
    torch.manual_seed(9)
    counts, tokens = [330, 0, 1, 70], 60
    x, b = draw(tokens, 136), draw(4, 2 * 144, 136)
    x[tokens // 2 :] = float("nan")
    index = torch.randint(tokens // 2, (sum(counts) + TAIL,))
    index[sum(counts) :] = tokens - 1
    found = []
    for source in (None, index):
        out, counter = poisoned(len(index), 144), torch.zeros(2, dtype=torch.int32)
        a = x[index] if source is None else x
        emulate(monkeypatch, [a, b, out], blocks=2 * tiling.cluster)
        how = {"tiling": tiling, "epilogue": Epilogue.SWIGLU, "index_R": source}
        launch_gemm(Layout.FORWARD, a, b, ends_of(counts), out, counter, **how)
        assert counter.tolist() == [0, 0]
        found.append(out)
    assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16))
    assert found[0].isnan().sum() == TAIL * 144


@pytest.mark.parametrize("columns", [128, 136], ids=["wide", "narrow"])
def test_gradient_of_rows(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    torch.manual_seed(2)
    d_out, b = rows_of(COUNTS, 72), draw(len(COUNTS), 72, columns)
    out = poisoned(d_out.shape[0], columns)
    emulate(monkeypatch, [d_out, b, out], blocks=2)
    launch_gemm(
        Layout.DGRAD, d_out, b, ends_of(COUNTS), out, torch.zeros(2, dtype=torch.int32), tiling=NARROW
    )
    check_rows(out, per_expert(COUNTS, d_out, b))


def weight_gradient(
    monkeypatch: pytest.MonkeyPatch, tiling: Tiling, columns: int, edits=(), seed: int = 0
) -> float:
    """Error of one weight gradient; tiles of 3, 0, 1 and 2 steps, several a block."""
    torch.manual_seed(3)
    d_out, x = rows_of(COUNTS, 192), rows_of(COUNTS, columns)
    out = poisoned(len(COUNTS), 192, columns)
    emulate(monkeypatch, [d_out, x, out], blocks=1, edits=edits, seed=seed)
    launch_gemm(
        Layout.WGRAD, d_out, x, ends_of(COUNTS), out, torch.zeros(2, dtype=torch.int32), tiling=tiling
    )
    pieces = zip(d_out[:-TAIL].double().split(COUNTS), x[:-TAIL].double().split(COUNTS), strict=True)
    assert not out.isnan().any()
    return error(out, torch.stack([d.T @ x for d, x in pieces]))


@pytest.mark.parametrize(("tiling", "columns"), [(SHARED, 136), (OWN, 192)], ids=["narrow", "ping-pong"])
def test_gradient_of_weights(monkeypatch: pytest.MonkeyPatch, tiling: Tiling, columns: int) -> None:
    assert weight_gradient(monkeypatch, tiling, columns) < LIMIT


@pytest.mark.parametrize(
    ("tiling", "dtype"), [(SHARED, torch.float32), (OWN, torch.bfloat16)], ids=["float", "bf16"]
)
def test_gradient_is_added(monkeypatch: pytest.MonkeyPatch, tiling: Tiling, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    d_out, x, before = (
        rows_of(COUNTS, 72),
        rows_of(COUNTS, 136),
        8 * torch.randn(len(COUNTS), 72, 136).to(dtype),
    )
    out = before.clone()
    emulate(monkeypatch, [d_out, x, out], blocks=2)
    launch_gemm(
        Layout.WGRAD,
        d_out,
        x,
        ends_of(COUNTS),
        out,
        torch.zeros(2, dtype=torch.int32),
        tiling=tiling,
        epilogue=Epilogue.ADD if dtype == torch.bfloat16 else Epilogue.ADD_FLOAT,
    )
    pieces = zip(d_out[:-TAIL].double().split(COUNTS), x[:-TAIL].double().split(COUNTS), strict=True)
    wanted = torch.stack([d.T @ x for d, x in pieces]) + before.double()
    assert error(out, wanted) < (LIMIT if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
def test_ffn_and_its_gradients(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """All kernels of a training step, with narrow rows and, as wide ones have it, SwiGLU's gradient apart: a
    contiguous copy is made of weights that are not."""
    if not fused:
        monkeypatch.setattr(experts_ffn, "FUSED_WIDTH", 0)
    torch.manual_seed(4)
    counts, width, inner = [70, 0, 3], 64, 128
    rows = sum(counts)
    x, d_y = rows_of(counts, width), rows_of(counts, width)
    gate_up = draw(3, width, 2 * inner).mT / width**0.5
    down, weights = draw(3, width, inner) / inner**0.5, torch.rand(rows + TAIL)
    emulate(monkeypatch, blocks=1)
    y, kept, plan = run_ffn(x, gate_up, down, torch.tensor(counts), weights, True)
    found = run_ffn_backward(d_y, x, gate_up, down, plan, weights, kept, True, True, True)
    exact = [t.detach().double().requires_grad_() for t in (x[:rows], gate_up, down, weights[:rows])]
    expected = torch.autograd.grad(reference_ffn(counts, *exact), exact, d_y[:rows].double())
    assert error(y[:rows], reference_ffn(counts, *exact).detach()) < 5e-3
    for name, one, other in zip(("x", "gate_up", "down", "weights"), found, expected, strict=True):
        cut = rows if name in ("x", "weights") else 3
        assert error(one[:cut], other) < 1e-2, name


def test_the_callers_tiles_are_taken_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward here, and backward in autograd's thread: the same bits by other tiles."""
    torch.manual_seed(12)
    counts, found = torch.tensor([9, 0, 70]), []
    x, gate_up, down, d_y = draw(79, 64), draw(3, 256, 64) / 8, draw(3, 64, 128) / 11, draw(79, 64)
    emulate(monkeypatch, blocks=1)
    launch, cut = experts_ffn.launch_gemm, []

    def noted(*given: Any, tiling: Tiling, **how: Any) -> None:
        cut.append(tiling)
        launch(*given, tiling=tiling, **how)

    monkeypatch.setattr(experts_ffn, "launch_gemm", noted)
    own = {(Layout.FORWARD, Epilogue.SWIGLU_KEEP): NARROW, (Layout.WGRAD, Epilogue.PLAIN): OWN}
    for given in ({}, own):
        cut.clear()
        leaves = [t.detach().requires_grad_() for t in (x, gate_up, down)]
        with override_tilings(given):
            y = ffn(leaves[0], leaves[1], leaves[2], counts)
            found.append([y.detach(), *torch.autograd.grad(y, leaves, d_y)])
        assert (cut.count(NARROW), cut.count(OWN)) == ((1, 2) if given else (0, 0))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 1), (2, 3)], ids=str)
def test_some_gradients_and_not_others(monkeypatch: pytest.MonkeyPatch, wanted: tuple[int, ...]) -> None:
    """Of rows 0, gate and up 1, down 2, the rows' weights 3: the same bits as when all are wanted, and no
    product for the others."""
    torch.manual_seed(10)
    counts, width, inner = torch.tensor([9, 0, 4]), 64, 64
    given = draw(13, width), draw(3, 2 * inner, width) / 8, draw(3, width, inner) / 8, torch.rand(13)
    launched, d_y = [], draw(13, width)
    emulate(monkeypatch, blocks=1)
    launch = experts_ffn.launch_gemm

    def noted(layout: Layout, *tensors: Tensor, **how: Any) -> None:
        launched.append(layout)
        launch(layout, *tensors, **how)

    monkeypatch.setattr(experts_ffn, "launch_gemm", noted)

    def gradients(of: tuple[int, ...]) -> list[Tensor]:
        rows, gate_up, down, weights = (t.detach().requires_grad_(i in of) for i, t in enumerate(given))
        y = ffn(rows, gate_up, down, counts, weights_R=weights)
        launched.clear()
        return list(torch.autograd.grad(y, [(rows, gate_up, down, weights)[i] for i in of], d_y))

    every = gradients((0, 1, 2, 3))
    for place, found in zip(wanted, gradients(wanted), strict=True):
        assert torch.equal(found, every[place])
    assert launched.count(Layout.WGRAD) == len({1, 2} & set(wanted))
    assert launched.count(Layout.DGRAD) == 1 + (0 in wanted)


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


def reference_ffn(counts: list[int], rows: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
    outputs = []
    for piece, up, out in zip(rows.split(counts), gate_up, down, strict=True):
        gate_R, up_R = (piece @ up.T).chunk(2, 1)
        outputs.append((F.silu(gate_R) * up_R) @ out.T)
    return torch.cat(outputs) * weights[:, None]


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


FAULTS = {
    "groups without turns": (
        "if (PINGPONG && index > 0) ptx::mbarrier_wait(shared.order",
        "if (false) ptx::mbarrier_wait(shared.order",
        "AssertionError|more arrivals than the barrier expects",
    ),
    "boxes outside their tensor": (
        "panels_b = least((tile.columns + 63) / 64, kBlockN / 64)",
        "panels_b = kBlockN / 64",
        "a box outside its tensor",
    ),
    "a stage freed before its product": (
        "ptx::wgmma_wait<1>();",
        "",
        "AssertionError",
    ),
}
"""What went wrong once, or could: the text of the kernel, the fault in its place, and how it shows."""


def test_a_lost_arrival_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait ends; the launch after the one that gave up says so."""
    status = torch.zeros(1, dtype=torch.int32)
    word = ctypes.c_int32.from_address(status.data_ptr())
    monkeypatch.setattr(experts_gemm, "_status", lambda device: status)
    monkeypatch.setattr(experts_gemm, "_status_word", lambda device: word)
    lost = ("if (step > 0) release_stage(shared.empty + 8 * last);", "")
    rows, weight, out = draw(8, 512), draw(1, 64, 512), poisoned(8, 64)
    emulate(monkeypatch, blocks=1, edits=(lost,))
    with pytest.raises(KernelError, match="its result is wrong"):
        launch_gemm(
            Layout.FORWARD, rows, weight, ends_of([8]), out, torch.zeros(2, dtype=torch.int32), tiling=SHARED
        )


def run_with(fault: str) -> None:
    tiling, columns = (OWN, 192) if "turns" in fault else (SHARED, 136)
    for seed in range(0, 80, 10):  # an interleaving each
        with pytest.MonkeyPatch.context() as patch:
            assert weight_gradient(patch, tiling, columns, (FAULTS[fault][:2],), seed) < LIMIT


@pytest.mark.parametrize("fault", list(FAULTS))
def test_faults_are_caught(fault: str) -> None:
    """In a process of its own, since the emulator ends the process where it finds one."""
    code = f"from tests.unit.test_expert_kernels_emulated import run_with; run_with({fault!r})"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode != 0
    assert re.search(FAULTS[fault][2], ran.stderr), ran.stderr[-500:]
