"""A small dispatch and its experts in one launch, emulated: the bits of the launches that it stands for."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from imbrex.bench.shapes import MODELS
from imbrex.bench.stamps import STAMPS, stamped
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.kernels.exchange.groups import empty_groups
from imbrex.kernels.ffn.glue import COUNTERS
from imbrex.kernels.fused.few import dispatch_and_experts, dispatching_sms, run_few, why_not_few, why_slower
from imbrex.kernels.gemm.gemm import products_status
from imbrex.kernels.jit import KernelError, Variant
from imbrex.kernels.structs import struct
from imbrex.placement.layouts import contiguous, from_slots
from tests.emulated import kernel
from tests.emulated.few import Few, apart, begin, differences, loader, shared_of, summed, together
from tests.emulated.gemm import STATIC_BYTES, Edits, EmulatedKernel, emulate
from tests.emulated.out_of_step import OutOfStep
from tests.emulated.scenario import Case, make_inputs

pytestmark = pytest.mark.skipif(not kernel.available(), reason="needs g++")

CONTROL = struct("peers/protocol.cuh", "Control")
WIDTH, INNER, BLOCKS = 136, 72, 5
"""More than a step of both products, and tiles at their ends; blocks of a rank."""
TWO = Case(placement=contiguous(8, 2), tokens=(3, 2), choices=2, width=WIDTH, drop=0.0)


def make(
    monkeypatch: pytest.MonkeyPatch, case: Case, *, edits: Edits = (), blocks: int = BLOCKS, **options: float
) -> Few:
    emulate(monkeypatch, blocks=2)
    few = begin(case, INNER, load=loader(case, edits), **{"timeout": 30.0, **options})
    few.exchange.least_sms = blocks * case.ranks
    return few


def words_of(few: Few) -> list[list[int]]:
    """Of every rank, blocks that have placed their rows, and whether it is told who has rows."""
    at = CONTROL.drawn.offset + 8 * 4  # of the small dispatch
    return few.exchange.heap.local[:, at : at + 8].clone().view(torch.int32).tolist()


def check_bits(few: Few, sms: int = 3) -> None:
    """The same bits twice, and zeros again where blocks are counted."""
    two = apart(few)
    for _ in range(2):
        assert differences(few, together(few, sms), two) == []
        assert words_of(few) == [[0, 0]] * few.case.ranks
    assert products_status(-1).tolist() == [0]


@pytest.mark.parametrize("skew", [0.0, 3.0], ids=["even", "skewed"])
@pytest.mark.parametrize(("world", "tokens"), [(1, 1), (1, 128), (2, 1), (2, 16), (4, 4), (4, 24)])
def test_the_bits_of_a_dispatch_and_its_experts(
    monkeypatch: pytest.MonkeyPatch, world: int, tokens: int, skew: float
) -> None:
    """The last rank of several has no tokens."""
    given = (tokens,) * (world - 1) + (tokens if world == 1 else 0,)
    case = Case(placement=contiguous(4 * world, world), tokens=given, choices=2, width=WIDTH, skew=skew)
    check_bits(make(monkeypatch, case))


SHAPES = {
    "a rank without rows": (replace(TWO, choices=1, skew=-100.0), 3, BLOCKS),
    "no tokens at all": (replace(TWO, tokens=(1, 1), drop=1.0), 3, BLOCKS),
    "replicas": (replace(TWO, placement=from_slots([[0, 1, 2], [2, 3, 0]], 4), tokens=(9, 7)), 3, BLOCKS),
    "all blocks dispatch": (TWO, 4, 4),
    "one dispatches, one pushes": (TWO, 2, 3),
    "several tell and place": (replace(TWO, tokens=(40, 33)), 6, 7),
    "more blocks than tiles": (replace(TWO, choices=1, tokens=(1, 0)), 3, 9),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case, sms, blocks = SHAPES[name]
    check_bits(make(monkeypatch, case, blocks=blocks), sms)


def test_as_many_push_as_where_a_peer_takes_two_launches() -> None:
    """Ranks need not agree on one kernel, and wait for so many blocks of each that push."""
    for ranks, sms in product(range(1, 17), range(1, 133)):
        for tokens in (1, 2, 3, 128, lay.SMALL_TOKENS):
            few = dispatching_sms(tokens, sms)
            assert 0 < few <= sms
            assert lay.small_pushers(ranks, few) == lay.small_pushers(ranks, sms)
    assert [dispatching_sms(tokens, 64) for tokens in (1, 16, 17, 512)] == [32, 32, 64, 64]
    assert dispatching_sms(1, 24) == 24


@pytest.mark.parametrize("late", [False, True], ids=["rows at once", "rows late"])
def test_steps_that_were_not_asked_for_at_once_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Rings of eight steps, tiles of nine, of which two are asked for at once."""
    check_bits(make(monkeypatch, replace(TWO, width=9 * 64), edits=(LATE,) if late else ()))


def test_sums_right_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    few = make(monkeypatch, TWO)
    rows, routed, _ = apart(few)
    wanted = summed(few, rows, routed)
    for _ in range(2):
        done = dispatch_and_experts(few.exchange, few.tensors, few.experts, 3)
        assert done.behind == 3 - lay.small_pushers(2, 3)
        assert torch.equal(summed(few, done.out, done.routed, behind=done.behind), wanted)


def test_blocks_say_when_they_come_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that `benchmarks/decode_one.py --stamps` times: the same bits, and every stamp of a block in
    its thread's order. Three of a rank's five blocks dispatch, of which two push or tell."""
    kernels: list[Any] = []

    def load(variant: Variant, device: Any = None) -> Any:
        kernels.append(loader(TWO)(stamped(variant) if variant.source.startswith("fused/") else variant))
        return kernels[-1]

    emulate(monkeypatch, blocks=2)
    few = begin(TWO, INNER, load=load, timeout=30.0)
    few.exchange.least_sms = 2 * BLOCKS
    check_bits(few)
    one = next(made for made in kernels if isinstance(made, EmulatedKernel))
    words = (ctypes.c_int64 * (2 * BLOCKS * len(STAMPS))).in_dll(one._library, "stamps")
    blocks = torch.tensor(words).view(2 * BLOCKS, len(STAMPS))
    begun = blocks[:, STAMPS["kBegun"], None]
    times = dict(
        zip(STAMPS, torch.where(blocks >= begun, blocks, 0).T, strict=True)
    )  # none of the call before
    assert {name for name, time in times.items() if not time.any()} == {"kBeginTime"}
    assert int((times["kTells"] > 0).sum()) == 2
    assert 0 < int((times["kPlaced"] > 0).sum()) <= 2 * 3
    assert all(bool((time <= times["kEnded"]).all()) for name, time in times.items() if name != "kEndTime")
    loads = [times[name] for name in ("kReleased", "kDispatched", "kKnows", "kTile", "kAsked", "kRows")]
    tiles = times["kRows"] > 0
    assert int(tiles.sum()) > 2
    assert all(bool((a[tiles] <= b[tiles]).all()) for a, b in pairwise(loads))


def shows(monkeypatch: pytest.MonkeyPatch, edits: Edits, seeds: int) -> int:
    """In how many of so many interleavings the bits differ. Results and activations are NaN before."""
    few = make(monkeypatch, TWO, edits=edits)
    two = apart(few)
    return sum(bool(differences(few, together(few), two)) for _ in range(seeds))


@pytest.mark.parametrize("unrest", [False, True], ids=["at random", "an adversary's"])
def test_any_interleaving_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, unrest: bool) -> None:
    monkeypatch.setattr(EmulatedKernel, "unrest", unrest)
    assert shows(monkeypatch, (), 12) == 0


def test_why_not_few_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    few = make(monkeypatch, TWO)
    small = few.exchange.small_call(few.tensors, 3, None, None, {})
    assert why_not_few(few.exchange, small, 4) is None
    assert "5 multiprocessors" in (why_not_few(few.exchange, small._replace(sms=6), 4) or "")
    assert "1025 experts" in (why_not_few(few.exchange, small, 1025) or "")
    assert "shared memory" in (why_not_few(few.exchange, small._replace(shared=1 << 18), 4) or "")
    with pytest.raises(KernelError, match="is to dispatch on 6"):
        together(few, 6)


@pytest.mark.parametrize(
    ("model", "tokens"),
    [("qwen3-30b-a3b", 2), ("qwen2-moe", 2), ("phi3.5-moe", 1), ("mixtral", 0), ("deepseek-v3", 0)],
)
def test_one_kernel_is_the_faster_way_up_to_so_many_tokens(model: str, tokens: int) -> None:
    """Of two ranks, each with half of the experts; a rank that has one expert reads no more than that."""
    shape = MODELS[model]
    sizes = shape.num_experts // 2, shape.hidden_size, shape.intermediate_size
    faster = [count for count in range(1, 9) if why_slower(count, count * shape.top_k, sizes) is None]
    assert faster == list(range(1, 1 + tokens))
    assert why_slower(2, 2 * shape.top_k, (1, *sizes[1:])) is None


FAULTS: dict[str, tuple[str, str]] = {
    "rows are not waited for": (
        "[=](u32 placed) { return placed >= due; }",
        "[=](u32) { return true; }",
    ),
    "rows of a block are not waited for": (
        "const u32 due = exchange::counted_of(call.blocks);",
        "const u32 due = exchange::counted_of(call.blocks) - 1;",
    ),
    "a block counts itself before it has placed": (
        "    bool fine = true;\n    if (call.block < call.blocks) {",
        "    bool fine = true;\n    if (threadIdx.x == 0) tell_dispatched(call, true);\n"
        "    if (call.block < call.blocks) {",
    ),
}
PLACE = "    place_parts(call, small, s, 0, 1, row_of);\n"
LATE = (PLACE, f"    for (int i = 0; i < 300; ++i) ptx::pause();\n{PLACE}")
"""Rows are placed long after products have begun."""
TELL = "    ffn::tell_hits(hits_of(call, small), small.slots,\n"
TOLD_LATE = (TELL, f"    for (int i = 0; i < 300; ++i) ptx::pause();\n{TELL}")
"""So is it told who has rows."""


def test_rows_may_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shows(monkeypatch, (LATE,), 4) == 0


@pytest.mark.parametrize("name", FAULTS)
def test_faults_show(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert shows(monkeypatch, (LATE, FAULTS[name]), 12)


AT_ONCE = (
    "[](u32 word) { return (word & exchange::kHitsTold) != 0; });",
    "[](u32) { return true; }) && static_cast<int>(both.hits[0]) >= 0;",
)


@pytest.mark.parametrize("waits", [True, False])
def test_a_list_of_the_call_before_is_not_taken(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """Memory of the list is that of a call whose tokens went elsewhere, and this one's is told late."""
    few = make(monkeypatch, replace(TWO, choices=1), edits=(TOLD_LATE, *(() if waits else (AT_ONCE,))))
    two = apart(few)
    before = make(monkeypatch, few.case)
    groups = together(replace(before, inputs=make_inputs(replace(few.case, seed=5))))[2]
    assert not torch.equal(groups.counts, two[2].counts)
    monkeypatch.setattr("imbrex.kernels.fused.few.empty_groups", lambda *_: groups)

    def differs() -> bool:
        try:
            return differences(few, together(few), two) != []
        except KernelError:  # a block that took no tile is waited for
            return True

    assert kernel.shows_or_ends(differs) is not waits


def library_of(variant: Variant) -> Any:
    """The kernel's, which may touch any memory."""
    library = EmulatedKernel(variant, shared_of(TWO), None, ())._library
    library.forget()
    library.name(ctypes.c_void_p(0), ctypes.c_int64(2**62))
    return library


CALLS = 3


@pytest.mark.parametrize("seed", range(6))
def test_ranks_may_be_in_different_calls(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every rank has launches of its own, and others' are a call ahead."""
    few = make(monkeypatch, TWO)
    calls = [replace(few, inputs=make_inputs(replace(TWO, seed=seed + call))) for call in range(CALLS)]
    wanted = [apart(call) for call in calls]
    ranks, kept = OutOfStep(TWO, wanted[0][1], library_of), []
    for rank, exchange in enumerate(ranks.exchanges):
        exchange.least_sms = BLOCKS
        for call in calls:
            own = slice(TWO.tokens[rank])
            x, ids, weights = (tensor[rank, own].contiguous() for tensor in call.tensors[:3])
            groups = empty_groups(1, exchange.shape.row_capacity, 4, COUNTERS, exchange.device)
            small = exchange.small_call((x, ids, weights, None), 3, groups, None, {})
            rows = small.rows.shape[1]
            memory = torch.empty(1, rows, INNER).bfloat16(), torch.empty(1, rows, WIDTH).bfloat16()
            run_few(exchange, small, [few.experts[rank]], memory)
            kept.append(((x, ids, weights), groups, small, memory))
        launches = ranks.launches[rank]
        for i, (variant, (grid, block, smem), *more) in enumerate(launches):
            launches[i] = variant, (grid, block, smem + STATIC_BYTES), *more
    ranks.run(seed)
    for (rank, call), (_, groups, _, memory) in zip(product(range(2), range(CALLS)), kept, strict=True):
        live = int(groups.plan[-1])
        assert live == int(wanted[call][2].plan[rank, -1])
        assert torch.equal(memory[1][0, :live], wanted[call][0][rank, :live])


def test_a_rank_that_never_comes_leaves_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products end, whoever was waited for, and nobody takes what they made for a result."""
    few = make(monkeypatch, TWO, timeout=0.5)
    exchange, results = few.exchange, []
    together(few)
    whole, exchange.heap.local, exchange.local_ranks = exchange.heap.local, exchange.heap.local[:1], 1

    def zeros(like: Tensor) -> Tensor:
        results.append(torch.zeros(like.shape, dtype=like.dtype))
        return results[-1]

    monkeypatch.setattr(torch, "empty_like", zeros)
    alone = replace(few, experts=few.experts[:1])
    with pytest.raises(ExchangeError, match=r"timed out, waiting for expert ids of rank 1"):
        together(alone)
    assert results[0].isnan().all()
    assert words_of(few) == [[0, 0]]
    exchange.heap.local, exchange.local_ranks = whole, 2
