"""dx home beside both weights' gradients, emulated: the bits of three launches, whoever sums first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.kernels.exchange.launches import Sums
from imbrex.kernels.ffn.ffn import LeftGradient
from imbrex.kernels.ffn.glue import Groups
from imbrex.kernels.fused import home
from imbrex.kernels.fused.home import home_beside_gradients, why_not_home
from imbrex.kernels.gemm.gemm import Epilogue, Layout, gemm_variant
from imbrex.kernels.gemm.tiling import OWN, SHARED, override_tilings
from imbrex.placement.layouts import contiguous
from tests.emulated import kernel
from tests.emulated.gemm import Edits, emulate
from tests.emulated.home import Backward, apart, begin, beside, differences, loader
from tests.emulated.scenario import Case

pytestmark = pytest.mark.skipif(not kernel.available(), reason="needs g++")

BLOCKS = 3
CASE = Case(placement=contiguous(4, 2), tokens=(340, 300), choices=2, width=192, drop=0.05, skew=0.4)
"""Experts of more than 64 * STAGES rows; at most 512 tokens a rank: pieces of one token."""
WHOLE = replace(CASE, tokens=(530, 70))
"""Pieces of three whole tokens."""
FOUR = Case(placement=contiguous(8, 4), tokens=(60, 0, 41, 75), choices=5, width=320, drop=0.3, seed=3)
"""A rank without tokens; more columns than a tile."""
LONELY = Case(placement=contiguous(4, 2), tokens=(40, 33), choices=1, width=64, drop=0.0, skew=-100.0, seed=1)
"""All choices are the first expert: a rank has no rows."""


def begun(
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    inner: int,
    add: torch.dtype | None = None,
    *,
    edits: Edits = (),
    timeout: float = 30.0,
) -> Backward:
    """A backward by emulated kernels."""
    emulate(monkeypatch, blocks=2)
    return begin(case, inner, add, load=loader(edits), timeout=timeout)


def call_alone(backward: Backward, first: int) -> tuple[Tensor, Sequence[Any]]:
    """The sums and the gradients of rank 0, whose peers never come."""
    exchange, out = backward.exchange, torch.zeros_like(backward.like[0])
    exchange.heap.local, exchange.local_ranks = exchange.heap.local[:1], 1
    arguments = exchange, backward.d_rows, backward.routed, Sums(), out, backward.pairs[:1]
    return out, home_beside_gradients(*arguments, first_blocks=first, blocks=BLOCKS)


@pytest.mark.parametrize("first", [0, BLOCKS // 2 + 1, BLOCKS])
def test_bits_are_those_of_three_launches(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    backward = begun(monkeypatch, CASE, 64)
    assert int(backward.routed.counts_Le.max()) > 64 * (SHARED.stages + 1)
    wanted = apart(backward)
    for _ in range(2):  # counters and tickets are back at 0
        assert differences(CASE, beside(backward, first, BLOCKS), wanted) == []


@pytest.mark.parametrize(
    ("epilogue", "place", "early"),
    [(Epilogue.PLAIN, True, True), (Epilogue.PLAIN, False, False), (Epilogue.SWIGLU_GRADIENT, True, False)],
    ids=["rows before", "memory of nobody", "another before"],
)
def test_gradients_begin_before_those_of_rows_have_ended(
    monkeypatch: pytest.MonkeyPatch, epilogue: Epilogue, place: bool, early: bool
) -> None:
    """With a counter of their own, and only in memory that was taken before."""
    backward = begun(monkeypatch, CASE, 64)
    wanted = apart(backward)
    latest = gemm_variant(Layout.DGRAD, epilogue, SHARED)
    monkeypatch.setattr(home, "latest_launch", lambda device: latest)
    for rank, pair in enumerate(backward.pairs):
        pair[0].groups.counter[0] = 1 << 20  # as if its tiles were under way
        if place:
            one, other = (replace(one, out=torch.empty_like(one.weight)) for one in pair)
            backward.pairs[rank] = one, other
    assert (differences(CASE, beside(backward, 1, BLOCKS), wanted) == []) is early


@pytest.mark.parametrize(("case", "inner"), [(WHOLE, 64), (FOUR, 64), (LONELY, 128)])
def test_whole_rows_and_ranks_without(monkeypatch: pytest.MonkeyPatch, case: Case, inner: int) -> None:
    backward = begun(monkeypatch, case, inner)
    wanted = apart(backward)
    for first in (1, 2):
        assert differences(case, beside(backward, first, 2), wanted) == []


@pytest.mark.parametrize("case", [replace(FOUR, width=768), replace(WHOLE, width=256)])
def test_sums_in_fp8_have_the_bits_of_the_codec(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Those of a combine in fp8, some blocks zeros and some with a scale that divides slowly."""
    backward = begun(monkeypatch, case, 64)
    backward.d_rows[:, 0::7, :128], backward.d_rows[:, 1::7, 130] = 0.0, 3e30
    wanted, plain = apart(backward, wire="fp8"), apart(backward)
    assert differences(case, plain, wanted) != []
    for first in (0, 1):
        assert differences(case, beside(backward, first, 2, wire="fp8"), wanted) == []


@pytest.mark.parametrize("add", [torch.bfloat16, torch.float32])
def test_gradients_are_added_in_turns_of_the_groups(
    monkeypatch: pytest.MonkeyPatch, add: torch.dtype
) -> None:
    backward = begun(monkeypatch, CASE, 128, add)
    epilogue = Epilogue.ADD if add == torch.bfloat16 else Epilogue.ADD_FLOAT
    wanted = apart(backward)
    with override_tilings({(Layout.WGRAD, epilogue): OWN}):
        for first in (0, 2):
            assert differences(CASE, beside(backward, first, BLOCKS), wanted) == []


@pytest.mark.parametrize("first", [0, BLOCKS])
def test_a_rank_that_never_comes_ends_the_sums_and_not_the_product(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    backward = begun(monkeypatch, CASE, 64, timeout=1.0)
    wanted, exchange = apart(backward), backward.exchange
    out, ((one, other),) = call_alone(backward, first)
    with pytest.raises(ExchangeError, match=r"timed out, waiting for reduced rows of rank 1"):
        exchange.check()
    assert torch.equal(one, wanted[2])
    assert torch.equal(other, wanted[3])
    assert bool(out[0].isnan().all()), "what was summed of a failed call is no sum"


@pytest.mark.parametrize("first", [0, BLOCKS])
def test_replays_behind_a_failed_call_have_gradients_and_no_sums(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """A failed call leaves tickets and counters as a whole one does, so a graph goes on, and ends."""
    backward = begun(monkeypatch, CASE, 64, timeout=0.5)
    wanted, exchange = apart(backward), backward.exchange
    monkeypatch.setattr(
        torch, "full_like", lambda tensor, _: torch.zeros_like(tensor)
    )  # results hold numbers
    whole = exchange.heap.local
    call_alone(backward, first)
    with pytest.raises(ExchangeError):
        exchange.check()
    exchange.heap.local, exchange.local_ranks = whole, CASE.ranks
    monkeypatch.setattr(exchange, "check", lambda **_: None)  # a graph asks nobody
    for _ in range(2):
        found = beside(backward, first, BLOCKS)
        assert all(torch.equal(*pair) for pair in zip(found[2:], wanted[2:], strict=True))
        for rank, tokens in enumerate(CASE.tokens):
            assert bool(found[0][rank, :tokens].isnan().all())
            assert bool(found[1][rank, :tokens].isnan().all())


def left(groups: Groups, columns: int, depth: int, add: torch.dtype | None = None) -> LeftGradient:
    """Of a weight [2, columns, depth]; nothing of it is read."""
    one = torch.zeros(1, dtype=torch.bfloat16, device="cpu")
    weight = one.expand(2, columns, depth)
    return LeftGradient(
        d_out=one.expand(300, columns),
        rows=one.expand(300, depth),
        groups=groups,
        weight=weight,
        add_to=None if add is None else weight.to(add),
    )


def test_reasons_against_one_launch() -> None:
    groups, others = (Groups(plan=torch.zeros(6, dtype=torch.int32, device="cpu")) for _ in range(2))
    narrow = left(groups, 2816, 2048), left(groups, 2048, 1408)
    assert why_not_home(narrow) is None
    assert "have not left" in str(why_not_home(narrow[:1]))
    assert "have not left" in str(why_not_home([narrow[0], lambda total: total]))
    assert "same rows" in str(why_not_home([narrow[0], left(others, 2048, 1408)]))
    assert "multiples of 64" in str(why_not_home([left(groups, 2832, 2048), left(groups, 2048, 1416)]))
    added = left(groups, 2048, 1408, torch.float32)
    assert "added to what is there" in str(why_not_home([narrow[0], added]))
    assert "added to what is there" in str(why_not_home([left(groups, 2816, 2048, torch.bfloat16), added]))
    assert "different tiles" in str(why_not_home([left(groups, 4096, 2048), left(groups, 2048, 2048)]))


FAULTS = {
    "sums over tiles that are still read": (
        "        ptx::named_barrier(kSumBarrier, kSummers);",
        "        if (fault != 1) ptx::named_barrier(kSumBarrier, kSummers);",
    ),
    "tiles over sums that are still read": (
        "if (sums_first) ptx::named_barrier(kLoadBarrier, kSummers + 32);\n            const",
        "if (sums_first && fault != 2) ptx::named_barrier(kLoadBarrier, kSummers + 32);\n            const",
    ),
    "sums over staging that is still read": (
        "if (stores.thread == 0) ptx::bulk_wait<0>();\n    sink",
        "if (stores.thread == 0 && exchange::fault != 3) ptx::bulk_wait<0>();\n    sink",
    ),
    "others' pieces left in the end": (
        "bool end() {\n        if (!reduce_others()) return false;",
        "bool end() {\n        if (fault != 4 && fault != 5 && !reduce_others()) return false;",
    ),
    "own pieces before others'": (
        "return wait_reduced(call, piece.flag); }) >= home;",
        "return wait_reduced(call, piece.flag); }) >= home && (fault != 5 || reduce_others());",
    ),
    "the first product's result for both": (
        "ptx::tma_store_3d(map_d + tile.together,",
        "ptx::tma_store_3d(map_d + (fault == 6 ? 0 : tile.together),",
    ),
    "the piece put aside is forgotten": (
        "aside < home ? aside : draw_again(call, reduce, 1)",
        "aside < home && fault != 7 ? aside : draw_again(call, reduce, 1)",
    ),
}
"""Fault number i is there where `layer` says i: one build for all. From the last one on rank 1 sums only when
rank 0 has asked for its first own piece, which is put aside."""
LATE = len(FAULTS) + 1
SWITCH = (
    ("struct Reduce {\n", "inline int fault = 0;\nstruct Reduce {\n"),
    (
        "sums_first = call.block < home.first_blocks;",
        "sums_first = call.block < home.first_blocks && (group.layer < 7 || call.me == 0);\n"
        "    fault = group.layer;",
    ),
    (
        "fence_async_shared();\n            ptx::named_barrier(kLoadBarrier, kSummers + 32);",
        "fence_async_shared();\n            if (fault != 2) ptx::named_barrier(kLoadBarrier, kSummers + 32);",
    ),
    (
        "        fine = fine && summer.end();\n",
        "        while (fault > 6 && call.me == 1 && control_of(group, 0)->drawn[kCombine][1] == 0)\n"
        "            ptx::pause();\n"
        "        fine = fine && summer.end();\n        ptx::bulk_wait<0>();\n",
    ),
)


@pytest.fixture(scope="module")
def edits() -> Edits:
    return (*SWITCH, *FAULTS.values())


@pytest.mark.parametrize("none", [None, LATE])
def test_the_build_of_faults_has_none_by_itself(
    monkeypatch: pytest.MonkeyPatch, edits: Edits, none: int | None
) -> None:
    assert not _shows(monkeypatch, edits, none, 1)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_show(monkeypatch: pytest.MonkeyPatch, edits: Edits, name: str) -> None:
    number = 1 + [*FAULTS].index(name)
    first = 0 if number in (1, 3, 4, 5) else 1
    assert kernel.shows_or_ends(lambda: _shows(monkeypatch, edits, number, first))


def _shows(monkeypatch: pytest.MonkeyPatch, edits: Edits, fault: int | None, first: int) -> bool:
    """Whether other bits, or a wait that ends, come of it."""
    backward = begun(monkeypatch, CASE, 64, edits=edits, timeout=2.0)
    wanted = apart(backward)
    backward.exchange.layer = None if fault is None else fault - 1
    turns = 4 if fault in range(1, LATE) else 2  # other interleavings
    try:
        return any(differences(CASE, beside(backward, first, BLOCKS), wanted) for _ in range(turns))
    except ExchangeError:
        return True
