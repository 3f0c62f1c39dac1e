"""The product for GPUs without wgmma, run on the CPU: fragments, ragged ends and ring, against fp64."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from imbrex.kernels.ffn.ffn import ffn, run_ffn, run_ffn_backward
from imbrex.kernels.ffn.tokens import ffn_in_place
from imbrex.kernels.gemm import portable
from imbrex.kernels.gemm.gemm import Epilogue, Layout
from imbrex.kernels.gemm.portable import FLAT, MIDDLE, TALL, launch_portable, portable_products, shape_of_tile
from tests.emulated.gemm import emulate
from tests.emulated.ragged import (
    LIMIT,
    TAIL,
    check_rows,
    draw,
    ends_of,
    error,
    per_expert,
    poisoned,
    reference_ffn,
    rows_of,
)
from tests.ranks.forked import Forked

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the kernel with g++")
COUNTS = [130, 0, 1, 70]
NAMES = ("tall", "middle", "flat")
WIDTH, COLUMNS = 136, 200
"""The last step of k has 8 of 32 or 64; two tiles across of which the last is cut."""


@pytest.fixture(params=[TALL, FLAT], ids=["tall", "flat"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "shape_of_tile", lambda *_: request.param)
    torch.manual_seed(0)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize(
    ("tile", "indexed"), [(TALL, False), (MIDDLE, True), (FLAT, True)], indirect=["tile"], ids=NAMES
)
def test_forward_keeps_gate_and_up(monkeypatch: pytest.MonkeyPatch, indexed: bool) -> None:
    rows, b = rows_of(COUNTS, WIDTH), draw(len(COUNTS), 2 * COLUMNS, WIDTH)
    index = torch.randperm(rows.shape[0])
    a = rows
    if indexed:
        a = torch.empty_like(rows)
        a[index] = rows
    act, gate_up = poisoned(rows.shape[0], COLUMNS), poisoned(rows.shape[0], 2 * COLUMNS)
    emulate(monkeypatch, [a, b, act, gate_up], blocks=2)
    more = {"gate_up": gate_up, "index_R": index if indexed else None}
    launch_portable(Layout.FORWARD, a, b, ends_of(COUNTS), act, Epilogue.SWIGLU_KEEP, **more)
    reference = per_expert(COUNTS, rows, b.mT)
    gate, up = reference.chunk(2, 1)
    check_rows(gate_up, reference)
    check_rows(act, F.silu(gate) * up)
    alone = poisoned(*act.shape)
    emulate(monkeypatch, [a, b, alone], blocks=3)
    launch_portable(Layout.FORWARD, a, b, ends_of(COUNTS), alone, Epilogue.SWIGLU, index_R=more["index_R"])
    assert torch.equal(alone[:-TAIL], act[:-TAIL])


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize(
    ("tile", "epilogue"),
    [(TALL, Epilogue.WEIGHTED), (MIDDLE, Epilogue.PLAIN), (FLAT, Epilogue.PLAIN)],
    indirect=["tile"],
    ids=NAMES,
)
def test_forward(monkeypatch: pytest.MonkeyPatch, epilogue: Epilogue) -> None:
    a, b = rows_of(COUNTS, WIDTH), draw(len(COUNTS), COLUMNS, WIDTH)
    out, weights = poisoned(a.shape[0], COLUMNS), torch.rand(a.shape[0])
    weighted = epilogue is Epilogue.WEIGHTED
    emulate(monkeypatch, [a, b, out, weights], blocks=2)
    given = weights if weighted else None
    launch_portable(Layout.FORWARD, a, b, ends_of(COUNTS), out, epilogue, weights_R=given)
    scale = weights[:-TAIL, None].double() if weighted else 1.0
    check_rows(out, per_expert(COUNTS, a, b.mT) * scale)


@pytest.mark.usefixtures("tile")
def test_gradient_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = rows_of(COUNTS, WIDTH), draw(len(COUNTS), WIDTH, COLUMNS)
    out = poisoned(a.shape[0], COLUMNS)
    emulate(monkeypatch, [a, b, out], blocks=2)
    launch_portable(Layout.DGRAD, a, b, ends_of(COUNTS), out)
    check_rows(out, per_expert(COUNTS, a, b))


@pytest.mark.parametrize("epilogue", [Epilogue.PLAIN, Epilogue.ADD, Epilogue.ADD_FLOAT])
def test_gradient_of_weights(monkeypatch: pytest.MonkeyPatch, epilogue: Epilogue) -> None:
    """Of tiles with 5, 0, 1 and 3 steps; what nobody has rows of is zero."""
    torch.manual_seed(1)
    d_out, x = rows_of(COUNTS, WIDTH), rows_of(COUNTS, COLUMNS)
    out = torch.randn(len(COUNTS), WIDTH, COLUMNS) * 8
    out = out if epilogue is Epilogue.ADD_FLOAT else out.bfloat16()
    before = out.double() if epilogue is not Epilogue.PLAIN else torch.zeros(out.shape).double()
    emulate(monkeypatch, [d_out, x, out], blocks=2)
    launch_portable(Layout.WGRAD, d_out, x, ends_of(COUNTS), out, epilogue)
    pieces = zip(d_out[:-TAIL].double().split(COUNTS), x[:-TAIL].double().split(COUNTS), strict=True)
    reference = torch.stack([d.T @ rows for d, rows in pieces]) + before
    assert error(out, reference) < (1e-6 if epilogue is Epilogue.ADD_FLOAT else LIMIT)


def test_experts_and_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step through it alone: no kernel of Hopper's is asked for."""
    torch.manual_seed(4)
    counts, width, inner = [70, 0, 3], 64, 40
    rows = sum(counts)
    x, d_y = rows_of(counts, width), rows_of(counts, width)
    gate_up, down = draw(3, 2 * inner, width) / width**0.5, draw(3, width, inner) / inner**0.5
    weights = torch.rand(rows + TAIL)
    emulate(monkeypatch, blocks=2)
    monkeypatch.setattr("imbrex.kernels.ffn.products.launch_gemm", None)
    with portable_products():
        y, kept, plan = run_ffn(x, gate_up, down, torch.tensor(counts), weights, True)
        found = run_ffn_backward(d_y, x, gate_up, down, plan, weights, kept, (True, True, True))
        sums = torch.zeros(gate_up.shape), torch.ones(down.shape)
        leaves = [t.detach().requires_grad_() for t in (x[:rows], gate_up, down)]
        added = ffn(
            leaves[0],
            leaves[1],
            leaves[2],
            torch.tensor(counts),
            weights_R=weights[:rows],
            recompute=True,
            gradients=sums,
        )
        added.backward(d_y[:rows])
        indexed = ffn_in_place(
            x, torch.arange(rows), gate_up, down, torch.tensor(counts), weights_R=weights[:rows], gather=True
        )
    exact = [t.detach().double().requires_grad_() for t in (x[:rows], gate_up, down, weights[:rows])]
    reference = reference_ffn(counts, exact[0], exact[1], exact[2], exact[3])
    expected = torch.autograd.grad(reference, exact, d_y[:rows].double())
    assert error(y[:rows], reference.detach()) < 5e-3
    for name, one, other in zip(("x", "gate_up", "down", "weights"), found, expected, strict=True):
        cut = rows if name in ("x", "weights") else 3
        assert error(one[:cut], other) < 1e-2, name
    assert torch.equal(added, y[:rows])
    assert torch.equal(indexed, y[:rows])
    assert error(sums[0], expected[1]) < 1e-2
    assert error(sums[1] - 1, expected[2]) < 1e-2


def test_tiles_are_flat_where_experts_have_few_rows() -> None:
    shapes = [shape_of_tile(Layout.FORWARD, 8 * rows, 8) for rows in (1, 32, 33, 96, 97)]
    assert shapes == [FLAT, FLAT, MIDDLE, MIDDLE, TALL]
    assert shape_of_tile(Layout.WGRAD, 8, 8) == TALL


FAULTS = {
    "a step that is multiplied before it is there": ("__syncthreads();  // every thread's", "//"),
    "the wrong half of k": ("2 * half + lane / 16", "2 * half"),
    "zeros of the tile before that land in this one": ("ptx::copy_wait<0>();", "//"),
    "pieces past k": ("k + 8 * piece < depth", "true"),
}


def run_with(fault: str) -> None:
    a, b = rows_of(COUNTS, WIDTH), draw(len(COUNTS), COLUMNS, WIDTH)
    for seed in range(0, 80, 10):  # an interleaving each
        out = poisoned(a.shape[0], COLUMNS)
        with pytest.MonkeyPatch.context() as patch:
            emulate(patch, [a, b, out], blocks=2, edits=(FAULTS[fault],), seed=seed)
            launch_portable(Layout.FORWARD, a, b, ends_of(COUNTS), out)
        check_rows(out, per_expert(COUNTS, a, b.mT))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str, tmp_path: Path) -> None:
    """In a process of its own, since the emulator ends the process where it finds one."""
    ran = Forked(run_with, fault, folder=tmp_path, traced=False)
    assert ran.wait() != 0
    assert re.search("AssertionError|a piece lies in no tensor", ran.stderr), ran.stderr[-500:]
