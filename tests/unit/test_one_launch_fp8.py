"""Experts in fp8 of few rows in one launch, which quantises them: the kernel's source on the CPU, against the
three launches."""

from __future__ import annotations

import shutil
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from imbrex.kernels.exchange.groups import empty_groups
from imbrex.kernels.ffn import both, fp8
from imbrex.kernels.ffn.fp8 import Fp8Experts, ffn_fp8, quantise_experts, run_ffn_fp8, run_in_one
from imbrex.kernels.ffn.glue import COUNTERS, Groups
from imbrex.kernels.gemm.gemm import products_status
from imbrex.placement.layouts import contiguous
from tests.emulated.gemm import Edits, EmulatedKernel, emulate
from tests.emulated.kernel import load
from tests.emulated.ragged import TAIL, draw, ends_of, hits_of, rows_of
from tests.emulated.scenario import Case, make_exchange, make_inputs
from tests.unit.test_one_launch import LATE

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the kernel with g++")
BLOCKS = 3


class Batch(NamedTuple):
    """Rows of a rank, its experts in fp8, and where the rows of every expert end."""

    rows_RD: Tensor
    experts: Fp8Experts
    groups: Groups
    weights_R: Tensor
    counts_e: Tensor


def batch(counts: list[int], width: int, inner: int) -> Batch:
    """Magnitudes of rows differ, and so do those of weights from block to block."""
    torch.manual_seed(5)
    rows, experts = rows_of(counts, width), len(counts)
    rows *= 10.0 ** torch.linspace(-3, 3, len(rows)).bfloat16()[:, None]
    up, down = draw(experts, 2 * inner, width) / width**0.5, draw(experts, width, inner) / inner**0.5
    up[:, ::256] *= 8
    down[:, ::128, :128] *= 4
    plan = torch.cat([torch.zeros(COUNTERS, dtype=torch.int32), ends_of(counts)])
    groups = Groups(plan, expected=max(1, sum(counts) // 4), hits=hits_of(counts), one_launch=True)
    return Batch(rows, quantise_experts(up, down), groups, torch.rand(len(rows)), torch.tensor(counts))


def in_one(
    monkeypatch: pytest.MonkeyPatch,
    made: Batch,
    *,
    weighted: bool = True,
    blocks: int = BLOCKS,
    edits: Edits = (),
    seed: int = 0,
) -> Tensor:
    """The result of one launch; activations, and the result, are NaN until they are written."""
    smem = both.shared_bytes(len(made.counts_e), fp8=True)
    emulated = EmulatedKernel(both.both_variant(weighted=weighted, fp8=True), smem, None, edits)
    emulated.seed = seed
    emulate(monkeypatch, blocks=blocks)
    monkeypatch.setattr(both, "_kernel", lambda *_: (emulated, blocks))
    return run_in_one(made.rows_RD, made.experts, made.groups, made.weights_R if weighted else None)


def in_three(monkeypatch: pytest.MonkeyPatch, made: Batch, *, weighted: bool = True) -> Tensor:
    emulate(monkeypatch, blocks=BLOCKS)
    weights_R = made.weights_R if weighted else None
    return run_ffn_fp8(made.rows_RD, None, *made.experts.tensors(), made.counts_e, weights_R)


def check_bits(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], width: int, inner: int, **how: Any
) -> None:
    """The same bits, and zeros again where tiles are counted."""
    made, rows = batch(counts, width, inner), sum(counts)
    one = in_one(monkeypatch, made, **how)
    three = in_three(monkeypatch, made, weighted=how.get("weighted", True))
    assert torch.equal(one[:rows].view(torch.int16), three[:rows].view(torch.int16))
    assert not one[:rows].isnan().any()
    assert one[rows:].isnan().all()
    assert len(one) == rows + TAIL
    assert made.groups.plan[:COUNTERS].tolist() == [0] * COUNTERS
    assert products_status(-1).tolist() == [0]


SHAPES = {
    "a row each": ([1, 0, 1, 1], 256, 128, {}),
    "no rows": ([0, 0, 0], 256, 128, {}),
    "rows of several batches, and tiles": ([9, 0, 70, 17], 384, 256, {}),
    "rings that wrap": ([3, 1], 1280, 1408, {}),
    "one block": ([3, 65, 1], 256, 384, {"blocks": 1}),
    "more blocks than tiles": ([0, 1], 128, 128, {"blocks": 7}),
    "fewer units than parts, and more": ([1] * 21, 128, 128, {}),
    "without weights": ([3, 0, 70], 256, 128, {"weighted": False}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_bits_of_three_launches(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    counts, width, inner, how = SHAPES[name]
    check_bits(monkeypatch, counts, width, inner, **how)


@pytest.mark.parametrize("seed", range(4))
def test_any_interleaving_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    check_bits(monkeypatch, [1, 0, 3, 70], 640, 256, blocks=4, seed=100 * seed)


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("world", [1, 2])
def test_behind_a_dispatch(monkeypatch: pytest.MonkeyPatch, world: int, tokens: int) -> None:
    """Rows, gate weights and plan of a small dispatch of virtual ranks, of which the last of two has no
    tokens, are what the launch takes."""
    width, given = 256, (tokens,) * (world - 1) + (tokens if world == 1 else 0,)
    case = Case(placement=contiguous(4 * world, world), tokens=given, choices=2, width=width)
    exchange, inputs = make_exchange(case, load=load, timeout=30.0), make_inputs(case)
    room = exchange.shape.row_capacity
    left = empty_groups(world, room, 4, COUNTERS, torch.device("cpu"))
    tensors = inputs.x_WTD, inputs.ids_WTK, inputs.weights_WTK, 3, inputs.tokens_W
    rows, _ = exchange.dispatch_small(*tensors, groups=left)
    experts = quantise_experts(draw(4, 256, width) / 16, draw(4, width, 128) / 11)
    for me in range(world):
        plan, hits, counts_e = (part.view(world, -1)[me] for part in (left.plan, left.hits, left.counts))
        groups = Groups(plan, expected=tokens, hits=hits)
        rows_RD, weights_R = rows.view(world, room, width)[me], left.weights.view(world, -1)[me]
        made, live = Batch(rows_RD, experts, groups, weights_R, counts_e), int(groups.ends_e[-1])
        one, three = in_one(monkeypatch, made), in_three(monkeypatch, made)
        assert torch.equal(one[:live].view(torch.int16), three[:live].view(torch.int16))
        assert not one[:live].isnan().any()


def test_it_begins_before_it_is_known_who_has_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [3, 0, 1, 70]
    made = batch(counts, 256, 128)
    three, hits = in_three(monkeypatch, made), hits_of(counts)
    made.groups.hits = torch.cat([torch.zeros_like(hits), hits])
    made.groups.hits[0] = -1
    one = in_one(monkeypatch, made, edits=LATE)
    assert torch.equal(one[:74].view(torch.int16), three[:74].view(torch.int16))


def test_rows_of_any_magnitude_have_the_codecs_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of zeros, of numbers too small or too large for the quick quotient (whose SwiGLU overflows),
    with an infinity and with NaN: they spoil no other row."""
    counts = [9, 6]
    made = batch(counts, 256, 128)
    made.rows_RD[1] = 0
    made.rows_RD[3, 128:] = 0
    made.rows_RD[4] *= 1e-30
    made.rows_RD[6] *= 1e30
    made.rows_RD[10, 7], made.rows_RD[12, 200] = float("inf"), float("nan")
    one, three = in_one(monkeypatch, made)[:15], in_three(monkeypatch, made)[:15]
    assert torch.equal(one.nan_to_num(7.0), three.nan_to_num(7.0))
    assert three.isnan().any(1).nonzero().flatten().tolist() == [6, 10, 12]


END = "}\n\n}  // namespace ffn"
FAULTS: dict[str, Edits] = {
    "down does not wait": (("written.wait(-1 - tile.together);", ";"),),
    "a part is due a tile early": (("< due * ups)", "< due * ups - 1)"),),
    "a tile is counted before others have written it": (
        (f"    ptx::named_barrier(1, 128);\n{END}", END),
        (
            "    const int thread = static_cast<int>(threadIdx.x % 128), warp = thread / 32",
            "    for (int i = 0; threadIdx.x > 0 && i < 200; ++i) ptx::pause();\n"
            "    const int thread = static_cast<int>(threadIdx.x % 128), warp = thread / 32",
        ),
    ),
    "counters are set back while warps still look": (
        ("leave(both, kQuantisers * gridDim.x)", "leave(both, 2 * gridDim.x)"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_show(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Some interleaving reads activations that are not there, or leaves counters."""
    wrong = 0
    for seed in range(12):
        made = batch([1, 40, 2], 128, 128)
        three = in_three(monkeypatch, made)
        out = in_one(monkeypatch, made, blocks=6, edits=FAULTS[name], seed=100 * seed)
        wrong += not torch.equal(out[:43].view(torch.int16), three[:43].view(torch.int16))
        wrong += bool(made.groups.plan[:COUNTERS].any())
    products_status(-1).zero_()
    assert wrong


def test_experts_take_one_launch_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made, launched = batch([3, 1], 128, 128), []
    emulate(monkeypatch, blocks=1)
    with torch.library._scoped_library("imbrex_experts_fp8", "IMPL") as here:
        here.impl("ffn", run_ffn_fp8, "CPU")
        monkeypatch.setattr(fp8, "run_in_one", lambda *operands: launched.append(operands))
        more = {"weights_R": made.weights_R, "groups": made.groups}
        for one_launch in (False, None, True):
            made.groups.one_launch = one_launch
            ffn_fp8(made.rows_RD, made.experts, made.counts_e, **more)
        assert len(launched) == 2
        values, scales = made.rows_RD.to(torch.float8_e4m3fn), torch.ones(len(made.rows_RD), 1)
        ffn_fp8(values, made.experts, made.counts_e, scales_RB=scales, **more)
        assert len(launched) == 2, "rows are quantised already"
    sizes = {"sizes": (2048, 768), "keep": False, "elsewhere": False, "fp8": True}
    assert both.why_not_both(made.groups, **sizes) is None
    made.groups.one_launch = None
    assert both.why_not_both(made.groups, **sizes) is None
    sizes["sizes"] = (1 << 20, 1 << 11)
    assert "wide tiles gain more" in (both.why_not_both(made.groups, **sizes) or "")
