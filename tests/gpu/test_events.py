"""Events on virtual ranks of one GPU, each with a stream of its own: a late one is done without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from imbrex.kernels import jit
from imbrex.kernels.events.events import EventsKernels, Patience, Words
from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.kernels.routing.routed import empty_routed
from imbrex.placement.layouts import contiguous
from tests.emulated.events import (
    Back,
    Outcome,
    check_outcome,
    doubled,
    inputs_of,
    make_kernels,
    tables_of,
    value_of,
    words_of,
)
from tests.emulated.events_in_order import CASES as FEW_ROWS
from tests.emulated.events_in_order import InOrder, on_host
from tests.emulated.scenario import Case, make_inputs
from tests.gpu.sanitizer import check_reads, check_tests

pytestmark = pytest.mark.gpu
CASES = {
    "four ranks, ragged": Case(placement=contiguous(32, 4), tokens=(170, 0, 5, 333), choices=8, width=7168),
    "two ranks": Case(placement=contiguous(16, 2), tokens=(200, 190), choices=4, width=2048),
    "shared experts": Case(
        placement=contiguous(16, 2), tokens=(70, 90, 0, 41), choices=4, width=512, tensor=2
    ),
}
LATE_CYCLES = 40_000_000
"""Some 20 ms."""
TAU_S = 2e-3


def slots_of_rows(rows_RD: torch.Tensor, counts_e: torch.Tensor, low: int) -> torch.Tensor:
    """The slot of every row."""
    row_R = torch.arange(len(rows_RD), device="cuda")
    return low + torch.bucketize(row_R, counts_e.cumsum(0), right=True)


def computed(rows_RD: torch.Tensor, counts_e: torch.Tensor, low: int) -> torch.Tensor:
    """The rows times one more than their slots."""
    slot_R = slots_of_rows(rows_RD, counts_e, low)
    return (rows_RD.float() * (slot_R[:, None] + 1)).bfloat16()


class Ranks:
    """Virtual ranks over one memory."""

    def __init__(self, case: Case, tau_s: float, epsilon: int, *, timeout: float = 10.0) -> None:
        self.case, device = case, torch.device("cuda")
        self.kernels = make_kernels(
            case, "cuda", [jit.load] * case.ranks, timeout=timeout, blocks=16, sum_blocks=24
        )
        self.streams = [torch.cuda.Stream() for _ in range(case.ranks)]
        self.patience = [Patience(tau_s, epsilon, 1, device) for _ in range(case.ranks)]
        slot_of_E, offsets = tables_of(case.placement)
        self.tables = slot_of_E.cuda(), offsets.cuda()
        self._warm_up()

    def _warm_up(self) -> None:
        """Every kernel loaded and memory for every stream before anything spins: one host serves all ranks
        here, and what it waits for may wait for a rank that it has not launched yet."""
        room = self.kernels[0].room
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1)
                low, high = self.case.slots_of(rank)
                counts_e = torch.zeros(high - low, dtype=torch.int32, device="cuda")
                rows = [torch.zeros(room.rows, self.case.width, device="cuda").bfloat16() for _ in range(3)]
                rows += [computed(rows[0], counts_e, low), torch.empty_like(rows[0])]
                words_of(self.kernels[rank]).clone()
                self._warm_up_backward(self.kernels[rank], rows[0], counts_e, low)
            torch.cuda.synchronize()
            del rows

    def _warm_up_backward(
        self, kernels: EventsKernels, rows_RD: torch.Tensor, counts_e: torch.Tensor, low: int
    ) -> None:
        """What torch does in a backward."""
        routed = empty_routed(kernels.sizes, kernels.room.tokens, kernels.device)
        assert routed.words_TC is not None
        routed.words_TC.zero_()
        served_W = torch.ones(self.case.ranks, dtype=torch.int32, device="cuda").bool()
        routed.without(served_W, kernels.room.rows)
        value_of(rows_RD, slots_of_rows(rows_RD, counts_e, low))
        doubled(rows_RD[: kernels.room.tokens])

    def call(self, inputs: Any, late: str = "", late_rank: int = -1) -> list[Any]:
        """One call of every rank: put on its stream, and not waited for."""
        results: list[Any] = []
        for rank, tokens in enumerate(self.case.tokens):
            low, high = self.case.slots_of(rank)
            kernels = self.kernels[rank]
            with torch.cuda.stream(self.streams[rank]):
                if late == "before" and rank == late_rank:
                    torch.cuda._sleep(LATE_CYCLES)
                call = kernels.send(*inputs_of(inputs, rank, tokens), self.tables, self.patience[rank])
                rows_RD = kernels.take(call)
                rows_RD = computed(rows_RD, call.routed.counts_Le[0, : high - low], low)
                if late == "experts" and rank == late_rank:
                    torch.cuda._sleep(LATE_CYCLES)
                y_TD = kernels.sum(call, rows_RD, weighted=True)
                results.append((call, y_TD, words_of(kernels).clone()))
        return results

    def backward(self, results: list[Any], late_rank: int = -1) -> list[Back]:
        """The backward of a call, in which what was computed in vain is left out."""
        backs = []
        for rank, (call, *_) in enumerate(results):
            low, high = self.case.slots_of(rank)
            kernels = self.kernels[rank]
            with torch.cuda.stream(self.streams[rank]):
                if rank == late_rank:
                    torch.cuda._sleep(LATE_CYCLES)
                back = kernels.send_back(call, doubled(call.x_TD))
                back.routed, _ = call.routed.without(call.outcome_4W[2].bool(), kernels.room.rows)
                d_y_RD = kernels.take_back(back)
                counts_e = back.routed.counts_Le[0, : high - low]
                values_R = value_of(d_y_RD, slots_of_rows(d_y_RD, counts_e, low))
                rows_RD = computed(d_y_RD, counts_e, low)
                sums = kernels.sum_back(back, rows_RD, values_R)
                backs.append(Back(back, torch.empty(0), torch.empty(0), *sums))
        return backs

    def outcome(self, inputs: Any, results: list[Any], backs: Sequence[Back] = ()) -> Outcome:
        torch.cuda.synchronize()
        for kernels in self.kernels:
            kernels.check(synchronize=True)
        calls, results_WTD, words_W = zip(*results, strict=True)
        behind_W = [Words.from_buffer_copy(bytes(words.cpu().numpy())).behind for words in words_W]
        return on_host(Outcome(list(calls), inputs, list(results_WTD), behind_W, list(backs)))


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_dropped_without_patience(name: str) -> None:
    case = CASES[name]
    ranks = Ranks(case, 0.0, 0)
    inputs = [make_inputs(replace(case, seed=seed), "cuda") for seed in range(3)]
    torch.cuda.synchronize()
    results = [ranks.call(one, "before", call % case.ranks) for call, one in enumerate(inputs)]
    for one, result in zip(inputs, results, strict=True):
        assert check_outcome(case, ranks.outcome(one, result), 0) == 0


@pytest.mark.parametrize("late", ["before", "experts"])
@pytest.mark.parametrize("name", CASES)
def test_a_late_rank_is_done_without(name: str, late: str) -> None:
    case = CASES[name]
    ranks = Ranks(case, TAU_S, 1)
    inputs = [make_inputs(replace(case, seed=seed), "cuda") for seed in range(3)]
    warm = ranks.call(inputs[0])
    assert check_outcome(case, ranks.outcome(inputs[0], warm), 1) == 0
    dropped = 0
    results = [ranks.call(one, late, case.ranks - 1) for one in inputs]
    for one, result in zip(inputs, results, strict=True):
        dropped += check_outcome(case, ranks.outcome(one, result), 1)
    assert dropped > 0


@pytest.mark.parametrize("late", ["", "before", "experts"])
@pytest.mark.parametrize("name", ["four ranks, ragged", "two ranks"])
def test_backwards_are_of_what_counted(name: str, late: str) -> None:
    """Forwards with a late rank, then their backwards with another one."""
    case = CASES[name]
    ranks = Ranks(case, TAU_S, 1)
    inputs = [make_inputs(replace(case, seed=seed), "cuda") for seed in range(3)]
    warm = ranks.call(inputs[0])
    assert check_outcome(case, ranks.outcome(inputs[0], warm, ranks.backward(warm)), 1) == 0
    results = [ranks.call(one, late, case.ranks - 1) for one in inputs]
    backs = [ranks.backward(result, late_rank=0) for result in reversed(results)][::-1]
    dropped = 0
    for one, *call in zip(inputs, results, backs, strict=True):
        dropped += check_outcome(case, ranks.outcome(one, *call), 1)
    assert (dropped > 0) == bool(late)


def test_backwards_of_experts_that_ranks_share() -> None:
    case = CASES["shared experts"]
    ranks = Ranks(case, 0.0, 0)
    inputs = make_inputs(case, "cuda")
    result = ranks.call(inputs)
    assert check_outcome(case, ranks.outcome(inputs, result, ranks.backward(result)), 0) == 0


def test_a_captured_call_counts_on() -> None:
    """A graph of one rank's calls, replayed beside others: calls are numbered on the device."""
    case = CASES["two ranks"]
    ranks = Ranks(case, 0.0, 0)
    inputs = make_inputs(case, "cuda")
    ranks.outcome(inputs, ranks.call(inputs))
    graphs, results, keep = [], [], []
    for rank, tokens in enumerate(case.tokens):
        given = inputs_of(inputs, rank, tokens)
        keep.append(given)  # whose memory the graph reads
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            call = ranks.kernels[rank].send(*given, ranks.tables, ranks.patience[rank])
            rows_RD = ranks.kernels[rank].take(call)
            y_TD = ranks.kernels[rank].sum(call, rows_RD, weighted=True)
        graphs.append(graph)
        results.append(y_TD)
    seen = []
    for _ in range(3):
        for y_TD in results:
            y_TD.fill_(float("nan"))
        torch.cuda.synchronize()
        for rank, graph in enumerate(graphs):
            with torch.cuda.stream(ranks.streams[rank]):
                graph.replay()
        torch.cuda.synchronize()
        seen.append([y_TD.clone() for y_TD in results])
    for kernels in ranks.kernels:
        kernels.check(synchronize=True)
    for later in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], later, strict=True))
    assert not any(y_TD.isnan().any() for y_TD in seen[0])


def test_a_rank_that_never_comes_is_lost() -> None:
    """However patient its peer is: after the time-out it is an error that names it."""
    case = CASES["two ranks"]
    ranks = Ranks(case, 1e-3, 1, timeout=0.5)
    inputs = make_inputs(case, "cuda")
    ranks.outcome(inputs, ranks.call(inputs))
    given = inputs_of(inputs, 0, case.tokens[0])

    def go_on() -> None:
        for _ in range(2000):
            call = ranks.kernels[0].send(*given, ranks.tables, ranks.patience[0])
            rows_RD = ranks.kernels[0].take(call)
            ranks.kernels[0].sum(call, rows_RD, weighted=True)
            torch.cuda.synchronize()

    with pytest.raises(ExchangeError, match=r"rank 0 in events call .*: timed out, waiting for .* of rank 1"):
        go_on()


@pytest.mark.parametrize("late", ["", "before", "experts"])
@pytest.mark.parametrize("name", FEW_ROWS)
def test_launches_in_order(name: str, late: str) -> None:
    case = FEW_ROWS[name]
    ranks = InOrder(case, "cuda", jit.load)
    dropped = [check_outcome(case, ranks.run(seed, late), 1) for seed in range(2)]
    assert all((n > 0) == bool(late) for n in dropped)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.timeout(300)
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    """In forwards and backwards, with rows in vain; in one stream, since a tool makes every rank late."""
    check_tests(tool, f"{__file__}::test_launches_in_order")


@pytest.mark.timeout(300)
def test_no_kernel_reads_what_nobody_wrote() -> None:
    check_reads(f"{__file__}::test_launches_in_order[shared experts-experts]")
