"""Down with others' rows first, and the sums home, emulated: the bits of two launches, whoever sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from imbrex.contracts import Placement
from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.kernels.ffn.ffn import LeftProduct
from imbrex.kernels.ffn.glue import COUNTERS, Groups
from imbrex.kernels.fused.others_first import LESS_DEPTH, experts_last, why_not_first
from imbrex.kernels.gemm.tiling import SHARED, SMALL, Tiling
from imbrex.kernels.structs import struct
from imbrex.placement.layouts import contiguous
from tests.emulated import kernel
from tests.emulated.down_home import Forward, apart, begin, differences
from tests.emulated.gemm import Edits, emulate
from tests.emulated.home import loader
from tests.emulated.others_first import made, together
from tests.emulated.scenario import Case

pytestmark = pytest.mark.skipif(not kernel.available(), reason="needs g++")

CONTROL = struct("peers/protocol.cuh", "Control")
BLOCKS = 4
CASE = Case(placement=contiguous(4, 2), tokens=(330, 290), choices=2, width=640, drop=0.05, skew=0.4)
"""Experts of two or three tiles of rows, one of which has own rows and others'; a last tile of columns that
is half one; at most 512 tokens a rank: pieces of one token."""
WHOLE = replace(CASE, tokens=(530, 70), width=256)
"""Pieces of three whole tokens."""
FOUR = Case(placement=contiguous(8, 4), tokens=(60, 0, 41, 75), choices=5, width=320, drop=0.3, seed=3)
"""A rank without tokens, none of whose rows are own ones."""
REPLICAS = Case(
    placement=Placement(num_experts=3, slots=(0, 1, 2, 0), rank_offsets=(0, 2, 4)),
    tokens=(150, 161),
    choices=2,
    width=256,
    seed=6,
    balanced=True,
)
TENSOR = Case(placement=contiguous(4, 2), tokens=(30, 40, 20, 10), choices=2, width=256, seed=7, tensor=2)
ALONE = Case(placement=contiguous(4, 1), tokens=(150,), choices=3, width=256, seed=4)
"""All rows are own ones."""
LONELY = Case(
    placement=contiguous(4, 2), tokens=(40, 33), choices=1, width=256, drop=0.0, skew=-100.0, seed=1
)
"""All choices are the first expert: a rank has no rows."""
FEW = replace(CASE, tokens=(50, 40))
INNER = 448  # more than STAGES steps


def begun(
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    inner: int = 64,
    *,
    applied: bool = True,
    edits: Edits = (),
    timeout: float = 30.0,
) -> Forward:
    """A forward by emulated kernels. applied: who multiplies applies the weights, else who sums."""
    emulate(monkeypatch, blocks=2)
    return begin(case, inner, applied=applied, addend=applied, load=loader(edits), timeout=timeout)


@pytest.mark.parametrize(("first", "last"), [(0, None), (0, 1), (0, 0), (1, None), (1, 1), (BLOCKS, None)])
def test_bits_are_those_of_two_launches(
    monkeypatch: pytest.MonkeyPatch, first: int, last: int | None
) -> None:
    """With 4 of 4 blocks one multiplies on all the same."""
    forward = begun(monkeypatch, CASE, INNER, applied=first != 1)
    wanted = apart(forward)
    for _ in range(2):  # counters and tickets are back at 0
        assert differences(CASE, together(forward, first, BLOCKS, last=last), wanted) == []


def test_how_many_experts_come_last() -> None:
    """Of 512 own rows 3.5 tiles are of them alone, by 8 of columns."""
    assert experts_last(512, 32, 2048, 132) == 5  # 28 tiles each
    assert experts_last(128, 32, 2048, 132) == 32  # 4 each, 128 in all
    assert experts_last(0, 3, 64, 2) == 3


@pytest.mark.parametrize("left", ["bounds", "progress"])
def test_a_launch_before_that_never_tells_is_reported(monkeypatch: pytest.MonkeyPatch, left: str) -> None:
    """The product ends, and nobody looks where own rows might be."""
    short = (
        ("u32 patience = PartMade::kPatience;", "u32 patience = 64;"),
        ("u32 patience = kPatience;\n        while (ptx", "u32 patience = 64;\n        while (ptx"),
    )
    forward = begun(monkeypatch, CASE, edits=short)
    status = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr("imbrex.kernels.fused.others_first.products_status", lambda _: status)

    def make(_: int, groups: Groups) -> int:
        made(groups)
        getattr(groups, left).zero_()
        return 1

    together(forward, 1, BLOCKS, make=make)
    assert status.tolist() == [1]


@pytest.mark.parametrize(
    "case",
    [WHOLE, FOUR, REPLICAS, TENSOR, ALONE, LONELY],
    ids=("whole", "four", "replicas", "tensor", "alone", "lonely"),
)
def test_whole_rows_and_ranks_without(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    forward = begun(monkeypatch, case)
    wanted = apart(forward)
    for first in (1, 2):
        assert differences(case, together(forward, first, 3), wanted) == []


def call_alone(forward: Forward, first: int) -> Tensor:
    """The launch of rank 0, whose peers never come."""
    exchange = forward.exchange
    exchange.heap.local, exchange.local_ranks = exchange.heap.local[:1], 1
    return together(replace(forward, acts=forward.acts[:1], weights=forward.weights[:1]), first, 2)


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_never_comes_ends_the_sums(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    forward = begun(monkeypatch, FEW, timeout=2.0)
    forward.exchange.check()
    with pytest.raises(ExchangeError, match=r"timed out, waiting for reduced rows of rank 1"):
        call_alone(forward, first)


@pytest.mark.parametrize("first", [0, 1])
def test_replays_behind_a_failed_call_have_no_sums(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """A failed call leaves tickets and counters as a whole one does, so a graph goes on, and ends."""
    forward = begun(monkeypatch, FEW, timeout=0.5)
    monkeypatch.setattr(
        torch, "full", lambda size, _, **how: torch.zeros(size, **how)
    )  # results hold numbers
    exchange = forward.exchange
    whole = exchange.heap.local
    with pytest.raises(ExchangeError):
        call_alone(forward, first)
    exchange.heap.local, exchange.local_ranks = whole, FEW.ranks
    monkeypatch.setattr(exchange, "check", lambda **_: None)  # a graph asks nobody
    for _ in range(2):
        found = together(forward, first, 2)
        for rank, tokens in enumerate(FEW.tokens):
            assert bool(found[rank, :tokens].isnan().all())


def test_a_host_hears_of_a_peer_that_had_given_up_before(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = begun(monkeypatch, FEW, timeout=2.0)
    given_up = CONTROL.gave_up.offset
    forward.exchange.heap.local[0][given_up : given_up + 4].view(torch.int32).fill_(2)  # 1 + the rank
    with pytest.raises(ExchangeError, match=r"rank 0 .* a peer gave up, .* rows of rank 1"):
        together(forward, 1, 2)


def left_product(monkeypatch: pytest.MonkeyPatch, tiling: Tiling = SHARED) -> Callable[..., LeftProduct]:
    monkeypatch.setattr("imbrex.kernels.ffn.products.choose_tiling", lambda *_, **__: tiling)

    def make(inner: int = 64, rows: int = 4, own: bool = True, tiles: int = 1) -> LeftProduct:
        return LeftProduct(
            act_RF=torch.zeros(rows, inner, dtype=torch.bfloat16),
            down_eDF=torch.zeros(1, 64, inner, dtype=torch.bfloat16),
            groups=Groups(torch.zeros(COUNTERS + 1, dtype=torch.int32)),
            out_RD=torch.zeros(rows, 64, dtype=torch.bfloat16),
            weights_R=None,
            own_e2=torch.zeros(1, 2, dtype=torch.int32) if own else None,
            tiles=tiles,
        )

    return make


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imbrex.kernels.ffn.products.multiprocessors", lambda _: 132, raising=False)
    make = left_product(monkeypatch)
    assert why_not_first(make()) is None
    assert "have not left" in str(why_not_first(make(rows=0)))
    assert "have not left" in str(why_not_first(object()))
    assert "nobody has looked" in str(why_not_first(make(own=False)))
    assert "does not tell" in str(why_not_first(make(tiles=0)))
    assert "read twice" in str(why_not_first(make(inner=LESS_DEPTH)))
    assert "other tiles" in str(why_not_first(left_product(monkeypatch, SMALL)()))


FAULTS = {
    "told before the tile is in memory": (
        "ptx::bulk_wait<C::kOutputs>();",
        "if (exchange::fault != 1) ptx::bulk_wait<C::kOutputs>();",
    ),
    "others' tokens summed before their rows are written": (
        "if (!wait_written(0)) return false;",
        "if (fault != 2 && !wait_written(0)) return false;",
    ),
    "own tokens summed before their rows are written": (
        "if (!wait_written(1)) return false;",
        "if (fault != 3 && !wait_written(1)) return false;",
    ),
    "rows counted twice": (
        "ptx::add_relaxed_gpu(written + list, rows_sent);",
        "ptx::add_relaxed_gpu(written + list, rows_sent * (exchange::fault == 4 ? 2 : 1));",
    ),
    "a tile with some of others' rows is taken for own": (
        "low = (first - begin + height - 1) / height,",
        "low = (first - begin + (exchange::fault == 5 ? 0 : height - 1)) / height,",
    ),
    "a first block drops what it has drawn": (
        "return stops && order.product > 0 ? kNoTile :",
        "if (exchange::fault == 6 && stops && order.product > 0) atomicAdd(counter, 1u);\n"
        "        return stops && order.product > 0 ? kNoTile :",
    ),
    "own tiles are not left out of the first list": (
        "            row += alone.high - alone.low;",
        "            row += exchange::fault == 7 ? 0 : alone.high - alone.low;",
    ),
    "the last tiles are not told": (
        "        if (thread == 0) tell();",
        "        if (exchange::fault != 8 && thread == 0) tell();",
    ),
    "others' tokens left": (
        "reduce_pieces<Sums>(call, reduce, own, tokens, others, draw_again(call, reduce, 0));",
        "reduce_pieces<Sums>(call, reduce, own, tokens, others - (fault == 9), draw_again(call, reduce, 0));",
    ),
    "sums while the groups still store": (
        "ptx::named_barrier(kSumBarrier, kSummers + 32);",
        "if (exchange::fault != 10) ptx::named_barrier(kSumBarrier, kSummers + 32);",
    ),
    "nobody begins with others' tokens": ("if (stopped ||", "if (fault == 11 ? false : stopped ||"),
}
"""Fault number i is there where `layer` says i: one build for all."""
SWITCH = (
    ("struct Reduce {\n", "inline int fault = 0;\nstruct Reduce {\n"),
    ("    if (threadIdx.x == 0) {\n        make_barriers(shared);", "    exchange::fault = group.layer;\n"
     "    if (threadIdx.x == 0) {\n        make_barriers(shared);"),
)  # fmt: skip


@pytest.fixture(scope="module")
def edits() -> Edits:
    return (*SWITCH, *FAULTS.values())


def test_the_build_of_faults_has_none_by_itself(monkeypatch: pytest.MonkeyPatch, edits: Edits) -> None:
    assert not _shows(monkeypatch, edits, None)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_show(monkeypatch: pytest.MonkeyPatch, edits: Edits, name: str) -> None:
    number = 1 + [*FAULTS].index(name)
    first = 0 if name == "sums while the groups still store" else 2
    assert kernel.shows_or_ends(lambda: _shows(monkeypatch, edits, number, first))


def _shows(monkeypatch: pytest.MonkeyPatch, edits: Edits, fault: int | None, first: int = 2) -> bool:
    """Whether other bits, or a wait that ends, come of it."""
    forward = begun(monkeypatch, CASE, edits=edits, timeout=3.0 if fault is None else 1.0)
    wanted = apart(forward)
    forward.exchange.layer = None if fault is None else fault - 1
    try:
        return any(differences(CASE, together(forward, first, 3), wanted) for _ in range(4))
    except ExchangeError:
        return True
