"""Down and the sums home in one launch, emulated: the bits of two launches, however the columns are cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.kernels.fused.down_home import MOST_PARTS, Cut, cut_of, pieces_of, why_not_sums
from imbrex.kernels.gemm.tiling import PAIRED, SHARED, SMALL, Tiling
from imbrex.kernels.structs import struct
from imbrex.placement.layouts import contiguous
from tests.emulated import kernel
from tests.emulated.down_home import apart, begin, differences, together
from tests.emulated.gemm import Edits, emulate
from tests.emulated.home import loader
from tests.emulated.scenario import Case

pytestmark = pytest.mark.skipif(not kernel.available(), reason="needs g++")

CONTROL = struct("peers/protocol.cuh", "Control")
BLOCKS = 4
CASE = Case(placement=contiguous(4, 2), tokens=(210, 180), choices=2, width=640, drop=0.05, skew=0.4)
"""Three parts of a tile, the last of half a one; experts of more than a tile of rows."""
FOUR = Case(placement=contiguous(8, 4), tokens=(60, 0, 41, 75), choices=5, width=512, drop=0.3, seed=3)
"""A rank without tokens."""
ALONE = Case(placement=contiguous(4, 1), tokens=(150,), choices=3, width=512, seed=4)
LONELY = Case(
    placement=contiguous(4, 2), tokens=(40, 33), choices=1, width=512, drop=0.0, skew=-100.0, seed=1
)
"""All choices are the first expert: a rank has no rows."""
THIRDS = Cut(3, (1, 2, 3))  # of a tile each
FEW = replace(CASE, tokens=(50, 40))
INNER = 448  # more than STAGES steps


@pytest.mark.parametrize(
    ("case", "tiling", "turn"),
    [(CASE, SHARED, False), (FOUR, PAIRED, True), (ALONE, SMALL, False), (LONELY, SHARED, True)],
    ids=("two", "four-pairs", "one-small", "lonely"),
)
def test_bits_are_those_of_two_launches(
    monkeypatch: pytest.MonkeyPatch, case: Case, tiling: Tiling, turn: bool
) -> None:
    """Who applies the weights and how sums are drawn change no bit together; they meet in turn."""
    emulate(monkeypatch, blocks=2)
    monkeypatch.setattr("imbrex.kernels.ffn.products.choose_tiling", lambda *_, **__: tiling)
    ways = (8, True), (3, False)
    for applied, (piece, beside) in zip((turn, not turn), ways, strict=True):
        forward = begin(case, INNER, applied=applied, addend=applied, load=loader(), timeout=30.0)
        wanted = apart(forward)
        found = together(forward, cut=THIRDS, piece=piece, blocks=BLOCKS, beside=beside)
        assert differences(case, found, wanted) == []


@pytest.mark.parametrize("cut", [Cut(1, (1,)), Cut(2, (1, 2)), Cut(3, (2, 3)), Cut(3, (3,))])
def test_parts_may_be_computed_together(monkeypatch: pytest.MonkeyPatch, cut: Cut) -> None:
    emulate(monkeypatch, blocks=2)
    forward = begin(FEW, 64, load=loader(), timeout=30.0)
    wanted = apart(forward)
    assert differences(FEW, together(forward, cut=cut, blocks=2), wanted) == []
    assert differences(FEW, apart(forward, pieces=pieces_of(cut)), wanted) == []


def test_a_rank_without_a_product_takes_a_combine_of_the_same_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, blocks=2)
    forward = begin(LONELY, 64, load=loader(), timeout=30.0)
    wanted = apart(forward)
    assert differences(LONELY, apart(forward, pieces=pieces_of(Cut(2, (1, 2)))), wanted) == []


def test_a_rank_that_never_comes_ends_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, blocks=2)
    forward = begin(FEW, 64, load=loader(), timeout=2.0)
    exchange = forward.exchange
    exchange.heap.local, exchange.local_ranks = exchange.heap.local[:1], 1
    first = replace(forward, acts=forward.acts[:1], weights=forward.weights[:1])
    exchange.check()
    with pytest.raises(ExchangeError, match=r"timed out, waiting for reduced rows of rank 1"):
        together(first, blocks=2)


@pytest.mark.parametrize("idle", [True, False], ids=["beside", "behind"])
def test_replays_behind_a_failed_call_have_no_sums(monkeypatch: pytest.MonkeyPatch, idle: bool) -> None:
    """A failed call leaves tickets as a whole one does, so a graph goes on, and ends."""
    emulate(monkeypatch, blocks=2)
    monkeypatch.setattr(
        torch, "full", lambda size, _, **how: torch.zeros(size, **how)
    )  # results hold numbers
    forward = begin(FEW, 64, load=loader(), timeout=0.5)
    exchange = forward.exchange
    whole, exchange.heap.local, exchange.local_ranks = exchange.heap.local, exchange.heap.local[:1], 1
    first = replace(forward, acts=forward.acts[:1], weights=forward.weights[:1])
    with pytest.raises(ExchangeError):
        together(first, blocks=2, beside=idle)
    exchange.heap.local, exchange.local_ranks = whole, FEW.ranks
    monkeypatch.setattr(exchange, "check", lambda **_: None)  # a graph asks nobody
    for _ in range(2):
        found = together(forward, blocks=2, beside=idle)
        for rank, tokens in enumerate(FEW.tokens):
            assert bool(found[rank, :tokens].isnan().all())


@pytest.mark.parametrize("way", [apart, together])
def test_a_host_hears_of_a_peer_that_had_given_up_before(
    monkeypatch: pytest.MonkeyPatch, way: Callable[..., Tensor]
) -> None:
    emulate(monkeypatch, blocks=2)
    forward = begin(FEW, 64, load=loader(), timeout=2.0)
    given_up = CONTROL.gave_up.offset
    forward.exchange.heap.local[0][given_up : given_up + 4].view(torch.int32).fill_(2)  # 1 + the rank
    with pytest.raises(ExchangeError, match=r"rank 0 .* a peer gave up, .* rows of rank 1"):
        way(forward)


def test_cuts_and_reasons() -> None:
    assert cut_of(2048) == Cut(4, (2, 3, 4))
    assert cut_of(640) == Cut(2, (1, 2))
    assert cut_of(7168) == Cut(7, (3, 5, 6, 7))
    assert cut_of(1 << 16, 99).parts == MOST_PARTS
    assert why_not_sums(8192, 4096, 6400, 2, 2) is None
    assert "fewer than 4096" in str(why_not_sums(2048, 4096, 6400, 2, 2))
    assert "more than 32 terms" in str(why_not_sums(8192, 4096, 6400, 24, 16))
    assert "no two parts" in str(why_not_sums(8192, 512, 6400, 8, 2))
    assert "shorter than what sums take" in str(why_not_sums(8192, 2048, 1408, 8, 2))


FAULTS = {
    "told before the tile is in memory": (
        "ptx::bulk_wait<C::kOutputs>();",
        "if (exchange::fault != 1) ptx::bulk_wait<C::kOutputs>();",
    ),
    "no wait for the product": (
        "for (; ready <= job.part; ++ready)",
        "for (; fault != 2 && ready <= job.part; ++ready)",
    ),
    "no wait for the peers' sums": (
        "if (job.home && !wait_reduced(call, job.flag))",
        "if (fault != 3 && job.home && !wait_reduced(call, job.flag))",
    ),
    "rows counted twice": (
        "ptx::add_relaxed_gpu(written + part, rows_sent);",
        "ptx::add_relaxed_gpu(written + part, rows_sent * (exchange::fault == 4 ? 2 : 1));",
    ),
    "own tokens of the last part forgotten": (
        "return {others, own, (others + own) * static_cast<u32>(reduce.parts)};",
        "return {others, own, (others + own) * static_cast<u32>(reduce.parts) - (fault == 5 ? own : 0)};",
    ),
    "a tile of another slice": (
        "            tile.column += begin;",
        "            tile.column += exchange::fault == 6 ? 0 : begin;",
    ),
    "a sum of nothing is not written": (
        "            wanted = k == 0;\n",
        "            wanted = k == 0 && fault != 7;\n",
    ),
}
"""Fault number i is there where `layer` says i: one build for all."""
SWITCH = (
    ("struct Reduce {\n", "inline int fault = 0;\nstruct Reduce {\n"),
    ("    if (threadIdx.x == 0) {\n        room.call", "    exchange::fault = group.layer;\n"
     "    if (threadIdx.x == 0) {\n        room.call"),
)  # fmt: skip


@pytest.fixture(scope="module")
def edits() -> Edits:
    return (*SWITCH, *FAULTS.values())


def test_the_build_of_faults_has_none_by_itself(monkeypatch: pytest.MonkeyPatch, edits: Edits) -> None:
    assert not _shows(monkeypatch, edits, None)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_show(monkeypatch: pytest.MonkeyPatch, edits: Edits, name: str) -> None:
    assert _shows(monkeypatch, edits, 1 + [*FAULTS].index(name))


def _shows(monkeypatch: pytest.MonkeyPatch, edits: Edits, fault: int | None) -> bool:
    """Whether other bits, or a wait that ends, come of it."""
    emulate(monkeypatch, blocks=2)
    forward = begin(replace(FEW, drop=0.3), 64, load=loader(edits), timeout=3.0 if fault is None else 1.0)
    wanted = apart(forward)
    forward.exchange.layer = None if fault is None else fault - 1
    try:
        return any(differences(FEW, together(forward, cut=THIRDS, blocks=2), wanted) for _ in range(4))
    except ExchangeError:
        return True
