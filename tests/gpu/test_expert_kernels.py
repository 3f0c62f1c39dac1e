"""The expert kernels against fp64, on ragged groups, with poisoned outputs and rows past the counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.kernels.ffn import slopes
from imbrex.kernels.ffn.ffn import ffn
from imbrex.kernels.ffn.glue import gather_rows, plan_groups, sum_rows
from imbrex.kernels.ffn.inputs import why_not_ffn
from imbrex.kernels.ffn.products import FOLLOWING
from imbrex.kernels.ffn.tokens import TILINGS as GATHER_TILINGS
from imbrex.kernels.ffn.tokens import ffn_tokens
from imbrex.kernels.gemm.gemm import ALONE, FOLLOWS, Epilogue, Layout, Tiling, begins_behind, launch_gemm
from imbrex.kernels.gemm.tiling import LOW, PAIRED, SHARED, SMALL, TALL, gemm_choices
from tests.emulated.ragged import reference_ffn

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
TAIL = 77
LIMIT = 3e-3  # of ||out - ref|| / ||ref||: bf16 rounds by 2^-9 at most, 1.7e-3 in this norm
CASES = {
    "ragged": ([130, 0, 1, 300, 64, 65, 128, 0, 7], 704, 512),
    "one expert has all": ([0, 0, 1000, 0], 256, 272),
    "narrow": ([5, 9], 72, 144),
    "no rows": ([0, 0, 0], 128, 128),
    "single rows": ([1, 1, 1, 1], 264, 1408),
    "many rows": ([700, 512, 3, 900], 2048, 1024),
    "half tiles": ([129, 200], 192, 384),
}
TILINGS = sorted({choice.tiling for choice in gemm_choices()}, key=str)
WGRAD_TILINGS = sorted({c.tiling for c in gemm_choices() if c.layout is Layout.WGRAD}, key=str)


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=CUDA) * scale).to(torch.bfloat16)


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"), device=CUDA, dtype=torch.bfloat16)


def groups_of(counts: list[int]):
    return plan_groups(torch.tensor(counts, device=CUDA))


def error(found: Tensor, reference: Tensor) -> float:
    norm = reference.double().norm().clamp_min(1e-30)
    return float((found.double() - reference.double()).norm() / norm)


def per_expert(counts: list[int], rows: Tensor, weight: Tensor) -> Tensor:
    pieces = rows[: sum(counts)].double().split(counts)
    return torch.cat([piece @ w.double() for piece, w in zip(pieces, weight, strict=True)])


def check_rows(out: Tensor, reference: Tensor) -> None:
    rows = reference.shape[0]
    assert out[rows:].isnan().all(), "rows past the counts were written"
    if rows:
        assert error(out[:rows], reference) < LIMIT


@pytest.fixture(params=list(CASES), ids=list(CASES))
def case(request):
    torch.manual_seed(0)
    counts, width, columns = CASES[request.param]
    rows = sum(counts)
    a = draw(rows + TAIL, width)
    a[rows:] = float("nan")
    return counts, a, draw(len(counts), columns, width, scale=width**-0.5)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_forward_and_weighted(case, tiling: Tiling) -> None:
    counts, a, b = case
    groups, reference = groups_of(counts), per_expert(counts, a, b.mT)
    weights = torch.rand(a.shape[0], device=CUDA)
    for epilogue in (Epilogue.PLAIN, Epilogue.WEIGHTED):
        out = poisoned(a.shape[0], b.shape[1])
        scale = weights[: sum(counts), None].double() if epilogue is Epilogue.WEIGHTED else 1.0
        launch_gemm(
            Layout.FORWARD,
            a,
            b,
            groups.ends_e,
            out,
            groups.counter,
            tiling=tiling,
            epilogue=epilogue,
            weights_R=weights,
        )
        check_rows(out, reference * scale)
    assert groups.counter[:2].tolist() == [0, 0]


@pytest.mark.parametrize("tiling", FOLLOWING, ids=str)
def test_a_product_that_follows_waits_for_its_rows(case, tiling: Tiling) -> None:
    """A first product makes the rows in the launch right before, twenty times."""
    counts, a, b = case
    groups, down = groups_of(counts), draw(len(counts), a.shape[1], b.shape[1], scale=0.1)
    for _ in range(20):
        found = []
        for beside, counter in ((ALONE, groups.counter), (FOLLOWS, groups.other_counter)):
            middle, out = poisoned(a.shape[0], b.shape[1]), poisoned(a.shape[0], a.shape[1])
            if beside is ALONE:
                torch.cuda.synchronize()
            launch_gemm(Layout.FORWARD, a, b, groups.ends_e, middle, groups.counter, tiling=tiling)
            if beside is ALONE:
                torch.cuda.synchronize()
            more = {"tiling": tiling, "beside": beside}
            launch_gemm(Layout.FORWARD, middle, down, groups.ends_e, out, counter, **more)
            found.append(out)
        assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16))
    assert groups.plan[:4].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("keep", [False, True], ids=["result", "keep"])
@pytest.mark.parametrize("second", [SHARED, SMALL, LOW, PAIRED, TALL], ids=str)
@pytest.mark.parametrize("first", [SHARED, SMALL, PAIRED, TALL], ids=str)
def test_a_product_begins_in_the_last_wave_of_the_one_that_makes_its_rows(
    first: Tiling, second: Tiling, keep: bool
) -> None:
    """Experts fewer and more than the parts that are waited for, twenty times each, behind other products."""
    torch.manual_seed(1)
    for counts, inner, width in (([130, 0, 700], 264, 512), ([9, 0, 300, 64, 65] * 7, 1408, 704)):
        rows, groups = sum(counts), groups_of(counts)
        x, gate_up = draw(rows + TAIL, width), draw(len(counts), 2 * inner, width, scale=width**-0.5)
        down, weights = draw(len(counts), width, inner, scale=inner**-0.5), torch.rand(rows, device=CUDA)
        found = []
        for turn in range(21):
            act, kept, out = (poisoned(rows + TAIL, size) for size in (inner, 2 * inner, width))
            up: dict[str, Any] = {
                "tiling": first,
                "epilogue": Epilogue.SWIGLU_KEEP if keep else Epilogue.SWIGLU,
            }
            up["gate_up"] = kept if keep else None
            last: dict[str, Any] = {"tiling": second, "epilogue": Epilogue.WEIGHTED, "weights_R": weights}
            if turn:
                tiles = -(-inner // (first.block_n // 2))
                up["progress"] = groups.progress
                last |= {"progress": groups.progress, "beside": begins_behind(tiles)}
            ends = groups.ends_e
            launch_gemm(Layout.FORWARD, x, gate_up, ends, act, groups.counter, **up)
            counter = groups.other_counter if turn else groups.counter
            launch_gemm(Layout.FORWARD, act, down, ends, out, counter, **last)
            found.append(out)
        for out in found[1:]:
            assert torch.equal(found[0].view(torch.int16), out.view(torch.int16))
        assert found[0][rows:].isnan().all()
        assert not found[0][:rows].isnan().any()
        assert not groups.plan[: -len(counts)].any()


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_swiglu_in_the_epilogue(case, tiling: Tiling) -> None:
    counts, a, b = case
    groups, reference = groups_of(counts), per_expert(counts, a, b.mT)
    gate, up = reference.chunk(2, 1)
    act, kept, gate_up = (poisoned(a.shape[0], n) for n in (b.shape[1] // 2, b.shape[1] // 2, b.shape[1]))
    common = (a, b, groups.ends_e)
    launch_gemm(Layout.FORWARD, *common, act, groups.counter, tiling=tiling, epilogue=Epilogue.SWIGLU)
    launch_gemm(
        Layout.FORWARD,
        *common,
        kept,
        groups.counter,
        tiling=tiling,
        epilogue=Epilogue.SWIGLU_KEEP,
        gate_up=gate_up,
    )
    check_rows(act, F.silu(gate) * up)
    check_rows(kept, F.silu(gate) * up)
    check_rows(gate_up, reference)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_gradient_of_rows(case, tiling: Tiling) -> None:
    counts, a, b = case
    groups = groups_of(counts)
    d_out, out = draw(a.shape[0], b.shape[1]), poisoned(a.shape[0], a.shape[1])
    d_out[sum(counts) :] = float("nan")
    launch_gemm(Layout.DGRAD, d_out, b, groups.ends_e, out, groups.counter, tiling=tiling)
    check_rows(out, per_expert(counts, d_out, b))


@pytest.mark.parametrize("layout", [Layout.FORWARD, Layout.DGRAD], ids=["forward", "gradient"])
def test_a_cluster_computes_the_same_bits(case, layout: Layout) -> None:
    counts, a, b = case
    groups, found = groups_of(counts), []
    b = b if layout is Layout.FORWARD else b.mT.contiguous()
    for tiling in (SHARED, PAIRED):
        found.append(poisoned(a.shape[0], b.shape[1 if layout is Layout.FORWARD else 2]))
        launch_gemm(layout, a, b, groups.ends_e, found[-1], groups.counter, tiling=tiling)
        assert groups.counter[:2].tolist() == [0, 0]
    assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16))


@pytest.mark.parametrize("epilogue", [Epilogue.SWIGLU, Epilogue.SWIGLU_KEEP], ids=["swiglu", "kept"])
@pytest.mark.parametrize("tiling", GATHER_TILINGS, ids=str)
def test_gathered_rows_give_the_bits_of_a_copy(case, tiling: Tiling, epilogue: Epilogue) -> None:
    """Tokens wanted several times, once and never; those are NaN."""
    counts, _, b = case
    rows, tokens, groups = sum(counts), max(4, sum(counts) // 3), groups_of(counts)
    x = draw(tokens, b.shape[2])
    x[tokens // 2 :] = float("nan")
    index = torch.randint(tokens // 2, (rows + TAIL,), device=CUDA)
    index[rows:] = tokens - 1
    found = []
    for a, source in ((x[index], None), (x, index)):
        act, gate_up = poisoned(rows + TAIL, b.shape[1] // 2), poisoned(rows + TAIL, b.shape[1])
        kept = gate_up if epilogue is Epilogue.SWIGLU_KEEP else None
        how = {"tiling": tiling, "epilogue": epilogue, "gate_up": kept, "index_R": source}
        launch_gemm(Layout.FORWARD, a, b, groups.ends_e, act, groups.counter, **how)
        assert groups.counter[:2].tolist() == [0, 0]
        found.append(torch.cat([act, gate_up], 1))
    assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16))
    assert found[1][rows:].isnan().all()


@pytest.mark.parametrize("tiling", WGRAD_TILINGS, ids=str)
def test_gradient_of_weights(case, tiling: Tiling) -> None:
    counts, a, b = case
    groups, rows = groups_of(counts), sum(counts)
    d_out, out = draw(a.shape[0], b.shape[1]), poisoned(*b.shape)
    d_out[rows:] = float("nan")
    launch_gemm(Layout.WGRAD, d_out, a, groups.ends_e, out, groups.counter, tiling=tiling)
    pieces = zip(d_out[:rows].double().split(counts), a[:rows].double().split(counts), strict=True)
    reference = torch.stack([d.T @ x for d, x in pieces])
    assert not out.isnan().any()
    assert error(out, reference) < LIMIT


@pytest.mark.parametrize("tiling", WGRAD_TILINGS, ids=str)
@pytest.mark.parametrize("rows", [1, 64, 130, 256])
def test_gradients_of_short_sums(tiling: Tiling, rows: int) -> None:
    """Many tiles a block, each of fewer steps than the ring has stages."""
    torch.manual_seed(7)
    counts = [rows] * 16
    d_out, x = draw(16 * rows, 1024), draw(16 * rows, 2048)
    groups, out = groups_of(counts), poisoned(16, 1024, 2048)
    for _ in range(5):
        launch_gemm(Layout.WGRAD, d_out, x, groups.ends_e, out, groups.counter, tiling=tiling)
    pieces = zip(d_out.float().split(counts), x.float().split(counts), strict=True)
    assert error(out, torch.stack([d.T @ x for d, x in pieces])) < LIMIT


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("counts", [[130, 0, 1, 300, 64, 65], [1, 2, 0, 3]], ids=str)
def test_ffn_and_its_gradients(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], recompute: bool, fused: bool
) -> None:
    """SwiGLU's gradient in a product's epilogue, and, as with wide rows, by a kernel of its own."""
    if not fused:
        monkeypatch.setattr(slopes, "FUSED_WIDTH", 0)
    torch.manual_seed(1)
    rows, width, inner = sum(counts), 512, 264
    x, d_y = draw(rows + TAIL, width), draw(rows + TAIL, width)
    gate_up = draw(len(counts), 2 * inner, width, scale=width**-0.5)
    down, weights = draw(len(counts), width, inner, scale=inner**-0.5), torch.rand(rows + TAIL, device=CUDA)
    x[rows:] = d_y[rows:] = float("nan")
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    assert why_not_ffn(x, gate_up, down) is None
    y = ffn(x, gate_up, down, torch.tensor(counts, device=CUDA), weights_R=weights, recompute=recompute)
    found = torch.autograd.grad(y, leaves, d_y)
    exact = [t.detach().double().requires_grad_() for t in (x, gate_up, down, weights)]
    y_exact = reference_ffn(counts, exact[0][:rows], exact[1], exact[2], exact[3][:rows])
    expected = torch.autograd.grad(y_exact, exact, d_y[:rows].double())
    assert error(y[:rows], y_exact) < 5e-3
    for name, one, other in zip(("x", "gate_up", "down", "weights"), found, expected, strict=True):
        cut = rows if name in ("x", "weights") else one.shape[0]
        assert error(one[:cut], other[:cut]) < 1e-2, name


def test_the_same_bits_twice() -> None:
    torch.manual_seed(2)
    counts = torch.tensor([500, 3, 700, 129], device=CUDA)
    x, gate_up, down = draw(1332, 1024), draw(4, 1024, 1024, scale=1 / 32), draw(4, 1024, 512, scale=1 / 16)
    leaves = (x.requires_grad_(), gate_up.requires_grad_(), down.requires_grad_())
    first, second = (torch.autograd.grad(ffn(*leaves, counts).sum(), leaves) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("width", [512, 4608])
def test_a_retained_graph_gives_the_same_bits(width: int) -> None:
    """Though a backward writes over gate and up; SwiGLU's gradient fused, and apart."""
    torch.manual_seed(8)
    counts, inner = torch.tensor([130, 0, 70], device="cuda"), 328
    like = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    leaves = [torch.randn(200, width, **like), torch.randn(3, 2 * inner, width, **like)]
    leaves.append(torch.randn(3, width, inner, **like))
    y = ffn(leaves[0], leaves[1], leaves[2], counts)
    d_y = torch.randn(200, width, device="cuda", dtype=torch.bfloat16)
    first = torch.autograd.grad(y, leaves, d_y, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(y, leaves, d_y), strict=True):
        assert torch.equal(one, other)


def test_a_graph_follows_the_counts() -> None:
    torch.manual_seed(3)
    x, gate_up, down = draw(400, 256), draw(3, 512, 256, scale=1 / 16), draw(3, 256, 256, scale=1 / 16)
    counts = torch.tensor([100, 200, 100], device=CUDA)
    ffn(x, gate_up, down, counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ffn(x, gate_up, down, counts)
    for now in ([100, 200, 100], [0, 1, 399], [400, 0, 0]):
        counts.copy_(torch.tensor(now))
        graph.replay()
        assert torch.equal(y, ffn(x, gate_up, down, counts))


def test_compiled_whole_and_equal() -> None:
    torch.manual_seed(4)
    x, gate_up, down = draw(300, 256), draw(2, 512, 256, scale=1 / 16), draw(2, 256, 256, scale=1 / 16)
    counts = torch.tensor([100, 200], device=CUDA)
    leaves = [t.requires_grad_() for t in (x, gate_up, down)]

    def step(x, gate_up, down):
        return ffn(x, gate_up, down, counts).float().square().sum()

    expected = torch.autograd.grad(step(*leaves), leaves)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*leaves), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_gather_and_sum_are_exact() -> None:
    torch.manual_seed(5)
    tokens, choices, width = 500, 4, 264
    x = draw(tokens, width)
    order = torch.randperm(tokens * choices, device=CUDA)
    groups = groups_of([tokens * choices - 3, 3])
    rows = gather_rows(x, order // choices, groups.ends_e)
    assert torch.equal(rows, x[order // choices])
    position = torch.empty_like(order)
    position[order] = torch.arange(tokens * choices, device=CUDA)
    position = position.view(tokens, choices)
    position[::7, 1] = -1
    weights = torch.rand(tokens, choices, device=CUDA)
    reference = torch.zeros(tokens, width, device=CUDA)
    for k in range(choices):
        part = rows[position[:, k].clamp_min(0)].float() * weights[:, k, None]
        reference += torch.where(position[:, k, None] >= 0, part, 0.0)
    assert error(sum_rows(rows, position, weights), reference) < LIMIT


def test_tokens_to_weighted_sums() -> None:
    torch.manual_seed(6)
    tokens, choices, experts, width, inner = 300, 3, 5, 256, 136
    x, gate_up = draw(tokens, width), draw(experts, 2 * inner, width, scale=1 / 16)
    down, weights = draw(experts, width, inner, scale=1 / 12), torch.rand(tokens, choices, device=CUDA)
    ids = torch.rand(tokens, experts, device=CUDA).argsort(1)[:, :choices]
    order = ids.flatten().argsort(stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel(), device=CUDA)
    counts = torch.bincount(ids.flatten(), minlength=experts)
    given = x, gate_up, down, counts, order // choices, position.view(tokens, choices), weights
    found, gathered, copied = (ffn_tokens(*given, gather=gather) for gather in (None, True, False))
    assert torch.equal(gathered, copied)
    assert torch.equal(found, copied)
    rows = x[order // choices].double()
    flat = weights.flatten()[order].double()
    exact = reference_ffn(counts.tolist(), rows, gate_up.double(), down.double(), flat)
    reference = torch.zeros(tokens, width, device=CUDA, dtype=torch.float64).index_add(
        0, order // choices, exact
    )
    assert error(found, reference) < 5e-3


@pytest.mark.parametrize(("width", "inner"), [(20, 16), (256, 77), (101, 52)])
def test_other_widths_are_padded(width: int, inner: int) -> None:
    torch.manual_seed(9)
    counts = [33, 0, 130]
    x, gate_up = draw(163, width), draw(3, 2 * inner, width, scale=width**-0.5)
    down, weights, d_y = (
        draw(3, width, inner, scale=inner**-0.5),
        torch.rand(163, device=CUDA),
        draw(163, width),
    )
    assert why_not_ffn(x, gate_up, down) is None
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    y = ffn(x, gate_up, down, torch.tensor(counts, device=CUDA), weights_R=weights)
    wanted = reference_ffn(counts, *exact)
    assert error(y, wanted.detach()) < 5e-3
    found = torch.autograd.grad(y, leaves, d_y)
    for one, other in zip(found, torch.autograd.grad(wanted, exact, d_y.double()), strict=True):
        assert error(one, other) < 1e-2


def test_what_is_not_supported_is_said() -> None:
    x, gate_up, down = draw(4, 20), draw(1, 32, 20), draw(1, 20, 16)
    assert "bfloat16" in str(why_not_ffn(x.float(), gate_up, down))
    assert "GPU" in str(why_not_ffn(x.cpu(), gate_up, down))
