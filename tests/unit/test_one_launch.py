"""Gate and up, and down, of a small batch in one launch: the kernel's source on the CPU, against two."""

from __future__ import annotations

import shutil
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from imbrex.kernels.exchange.groups import empty_groups
from imbrex.kernels.ffn import both
from imbrex.kernels.ffn.ffn import run_experts
from imbrex.kernels.ffn.glue import COUNTERS, Groups
from imbrex.kernels.gemm.gemm import products_status
from imbrex.placement.layouts import contiguous
from tests.emulated.gemm import Edits, EmulatedKernel, emulate
from tests.emulated.kernel import load
from tests.emulated.ragged import TAIL, draw, ends_of, hits_of, poisoned, rows_of
from tests.emulated.scenario import Case, make_exchange, make_inputs

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the kernel with g++")
EXPERTS, CHOICES, BLOCKS = 8, 2, 3


class Batch(NamedTuple):
    """Rows of a rank, its weights, and where the rows of every expert end."""

    rows_RD: Tensor
    gate_up_eGD: Tensor
    down_eDF: Tensor
    groups: Groups
    weights_R: Tensor


def batch(counts: list[int], width: int, inner: int) -> Batch:
    torch.manual_seed(5)
    rows = rows_of(counts, width)
    up, down = draw(len(counts), 2 * inner, width) / width**0.5, draw(len(counts), width, inner) / inner**0.5
    plan = torch.cat([torch.zeros(COUNTERS, dtype=torch.int32), ends_of(counts)])
    groups = Groups(plan, expected=max(1, sum(counts) // 4), hits=hits_of(counts))
    return Batch(rows, up, down, groups, torch.rand(len(rows)))


def choose(world: int, tokens: int, *, skew: bool = False) -> list[int]:
    """Rows of every expert of a rank, of `world` ranks with `tokens` tokens each; skew: most want one."""
    torch.manual_seed(world * 1000 + tokens)
    wish = torch.ones(EXPERTS * world)
    if skew:
        wish[1] = 60.0
    ids = torch.multinomial(wish.expand(world * tokens, -1), CHOICES)
    return torch.bincount(ids.flatten(), minlength=EXPERTS * world)[:EXPERTS].tolist()


def in_one(
    monkeypatch: pytest.MonkeyPatch,
    made: Batch,
    *,
    weighted: bool = True,
    blocks: int = BLOCKS,
    edits: Edits = (),
    seed: int = 0,
) -> Tensor:
    """The result of one launch; activations are NaN until they are written."""
    smem = both.shared_bytes(len(made.down_eDF))
    emulated = EmulatedKernel(both.both_variant(weighted=weighted), smem, None, edits)
    emulated.seed = seed
    emulate(monkeypatch, blocks=blocks)
    monkeypatch.setattr(both, "_kernel", lambda *_: (emulated, blocks))
    rows, inner = len(made.rows_RD), made.down_eDF.shape[2]
    act, out = poisoned(rows, inner), poisoned(rows, made.rows_RD.shape[1])
    operands = made.rows_RD, made.gate_up_eGD, made.down_eDF, made.groups, act, out
    both.run_both(*operands, made.weights_R if weighted else None)
    return out


def in_two(monkeypatch: pytest.MonkeyPatch, made: Batch, *, weighted: bool = True) -> Tensor:
    emulate(monkeypatch, blocks=BLOCKS)
    groups = Groups(made.groups.plan, expected=made.groups.expected, one_launch=False)
    operands = made.rows_RD, made.gate_up_eGD, made.down_eDF, groups
    return run_experts(*operands, made.weights_R if weighted else None)


def check_bits(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], width: int, inner: int, **how: Any
) -> None:
    """The same bits, and zeros again where tiles are counted."""
    made, rows = batch(counts, width, inner), sum(counts)
    one = in_one(monkeypatch, made, **how)
    two = in_two(monkeypatch, made, weighted=how.get("weighted", True))
    assert torch.equal(one[:rows].view(torch.int16), two[:rows].view(torch.int16))
    assert not one[:rows].isnan().any()
    assert one[rows:].isnan().all()
    assert len(one) == rows + TAIL
    assert made.groups.plan[:COUNTERS].tolist() == [0] * COUNTERS
    assert products_status(-1).tolist() == [0]


@pytest.mark.parametrize("skew", [False, True], ids=["even", "skewed"])
@pytest.mark.parametrize("tokens", [1, 4, 16, 128])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_bits_of_two_launches(
    monkeypatch: pytest.MonkeyPatch, world: int, tokens: int, skew: bool
) -> None:
    check_bits(monkeypatch, choose(world, tokens, skew=skew), 136, 72)


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_behind_a_dispatch(monkeypatch: pytest.MonkeyPatch, world: int, tokens: int) -> None:
    """Rows, gate weights and plan of a small dispatch of virtual ranks, of which the last has no tokens, are
    what the launch takes."""
    given = (tokens,) * (world - 1) + (tokens if world == 1 else 0,)
    case = Case(placement=contiguous(4 * world, world), tokens=given, choices=2, width=72)
    exchange, inputs = make_exchange(case, load=load, timeout=30.0), make_inputs(case)
    room = exchange.shape.row_capacity
    left = empty_groups(world, room, 4, COUNTERS, torch.device("cpu"))
    tensors = inputs.x_WTD, inputs.ids_WTK, inputs.weights_WTK, 3, inputs.tokens_W
    rows, _ = exchange.dispatch_small(*tensors, groups=left)
    for me in range(world):
        plan, hits = (part.view(world, -1)[me] for part in (left.plan, left.hits))
        groups = Groups(plan, expected=tokens, hits=hits)
        parts = rows.view(world, room, 72)[me], draw(4, 128, 72) / 8, draw(4, 72, 64) / 8
        made, live = Batch(*parts, groups, left.weights.view(world, -1)[me]), int(groups.ends_e[-1])
        one, two = in_one(monkeypatch, made), in_two(monkeypatch, made)
        assert torch.equal(one[:live].view(torch.int16), two[:live].view(torch.int16))
        assert not one[:live].isnan().any()


SHAPES = {
    "no rows": ([0, 0, 0], 136, 72, {}),
    "rings that wrap": ([3, 0, 70, 1], 1160, 584, {}),
    "down with as many steps as stages": ([1, 2], 72, 512, {"blocks": 2}),
    "one block": ([3, 65, 1], 264, 136, {"blocks": 1}),
    "more blocks than tiles": ([0, 1], 72, 64, {"blocks": 5}),
    "first tiles of down": ([2], 648, 64, {"blocks": 4}),
    "fewer units than parts, and more": ([1] * 21, 136, 72, {}),
    "many experts, most without rows": ([0] * 140 + [2, 0, 1] + [0] * 120 + [66], 72, 64, {}),
    "without weights": ([3, 0, 70], 136, 72, {"weighted": False}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    counts, width, inner, how = SHAPES[name]
    check_bits(monkeypatch, counts, width, inner, **how)


@pytest.mark.parametrize("seed", range(8))
def test_any_interleaving_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    check_bits(monkeypatch, [1, 0, 3, 70], 584, 136, blocks=4, seed=100 * seed)


LATE: Edits = (
    (
        "        ptx::wait_for_launches();\n        ptx::more_registers",
        """        if (threadIdx.x == 0 && blockIdx.x == 0) {
            const int words = hit_words(both.experts);
            for (int i = 0; i < 200; ++i) ptx::pause();
            for (int i = words - 1; i >= 0; --i) const_cast<u32*>(both.hits)[i] = both.hits[words + i];
        }
        ptx::more_registers""",
    ),
)
"""The dispatch tells which experts have rows, which the test has given behind the list, long after this
begins."""
AT_ONCE = ("take(both.hits, wait_for_hits(both.hits))", "take(both.hits, 0)")


@pytest.mark.parametrize("waits", [True, False])
def test_it_begins_before_it_is_known_who_has_rows(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    counts = [3, 0, 1, 70]
    made = batch(counts, 136, 72)
    two, hits = in_two(monkeypatch, made), hits_of(counts)
    made.groups.hits = torch.cat([torch.zeros_like(hits), hits])
    made.groups.hits[0] = -1
    one = in_one(monkeypatch, made, edits=LATE if waits else (*LATE, AT_ONCE))
    assert torch.equal(one[:74].view(torch.int16), two[:74].view(torch.int16)) is waits


FAULTS = {
    "down does not wait": ("if (!Up::kQuantises && work.down) written.wait(work.part);", ";"),
    "a tile is counted before it is in memory": (
        "    if (!Up::kQuantises) {\n        ptx::bulk_wait<0>();\n        ptx::fence_async();\n    }\n",
        "",
    ),
    "a part is due a tile early": ("< due * ups)", "< due * ups - 1)"),
    "the part before is looked at": (
        "work.part = part_of(begin + down, all);",
        "work.part = part_of(work.down && begin ? begin - 1 : begin, all);",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_show(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Some interleaving reads activations that are not there."""
    made = batch([1, 3, 2], 136, 72)
    wrong = 0
    for seed in range(12):
        out = in_one(monkeypatch, made, blocks=6, edits=(FAULTS[name],), seed=100 * seed)
        made.groups.plan[:COUNTERS] = 0
        wrong += bool(out[:6].isnan().any())
    assert wrong


def test_experts_take_one_launch_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made, launched = batch([3, 1], 72, 64), []
    emulate(monkeypatch, blocks=1)
    monkeypatch.setattr(both, "run_both", lambda *operands: launched.append(operands))
    for one_launch in (False, None, True):
        made.groups.one_launch = one_launch
        run_experts(*made)
    assert len(launched) == 2
    kept = torch.empty(len(made.rows_RD), 128, dtype=torch.bfloat16)
    run_experts(*made, kept)
    assert len(launched) == 2, "gate and up are kept"


def test_why_not_both_says_why() -> None:
    def why(
        expected: int, experts: int, *, one_launch: bool | None = True, told: bool = True, **how: bool
    ) -> str | None:
        plan = torch.zeros(COUNTERS + experts, dtype=torch.int32)
        hits = hits_of([1] * experts) if told else None
        groups = Groups(plan, expected=expected, hits=hits, one_launch=one_launch)
        return both.why_not_both(groups, sizes=(2048, 768), **{"keep": False, "elsewhere": False, **how})

    assert why(8, 4) is None
    assert "asked for" in (why(8, 4, one_launch=False) or "")
    assert why(32, 64, one_launch=None) is None
    assert "small dispatch" in (why(0, 4) or "")
    assert "32 an expert" in (why(4 * 32 + 1, 4) or "")
    assert "nobody has told" in (why(8, 4, told=False) or "")
    assert "1025 experts" in (why(8, 1025) or "")
    assert "kept" in (why(8, 4, keep=True) or "")
    assert "order of experts" in (why(8, 4, elsewhere=True) or "")


@pytest.mark.parametrize(
    ("model", "rows", "one"),
    [
        ((2048, 768, 64), 8, True),
        ((2048, 768, 64), 32, True),
        ((2048, 768, 64), 1024, True),
        ((2048, 1408, 32), 8, True),
        ((2048, 1408, 32), 16, True),
        ((7168, 2048, 128), 8, True),
        ((7168, 2048, 128), 64, False),
        ((7168, 2048, 128), 32, True),
        ((7168, 2048, 128), 128, False),
        ((7168, 2048, 128), 1024, False),
    ],
)
def test_one_launch_is_taken_where_it_was_faster(model: tuple[int, int, int], rows: int, one: bool) -> None:
    """Half of Qwen3's, Qwen2's and DeepSeek-V3's experts, 1 to 128 tokens of each of two ranks."""
    width, inner, experts = model
    assert (both.why_two(rows, experts, (width, inner)) is None) is one
