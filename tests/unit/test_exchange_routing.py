"""The exchange kernels on virtual ranks, emulated on the CPU: positions, dispatched rows and sums to the
bit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.placement.layouts import contiguous, from_slots
from tests.emulated import kernel
from tests.emulated.scenario import (
    Case,
    check_dispatch,
    check_exchange,
    check_quantised,
    check_small,
    make_exchange,
    make_inputs,
)

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")

CASES = {
    "two ranks": Case(placement=contiguous(8, 2), tokens=(20, 20), choices=3),
    "four ranks, ragged": Case(placement=contiguous(8, 4), tokens=(17, 0, 5, 33), choices=2, alignment=8),
    "one rank": Case(placement=contiguous(4, 1), tokens=(9,), choices=2),
    "uneven ranks, top-1": Case(placement=contiguous(5, 3), tokens=(11, 12, 13), choices=1, drop=0.0),
    "replicas and a spare": Case(
        placement=from_slots([[0, 1, 2], [2, 3, -1], [0, 2, 4, 5]], 6), tokens=(40, 3, 21), choices=3
    ),
    "all to the last experts": Case(
        placement=contiguous(8, 4), tokens=(15, 15, 15, 15), choices=2, skew=100.0
    ),
    "nothing at all": Case(placement=contiguous(4, 2), tokens=(6, 6), choices=2, drop=1.1),
    "long rows": Case(placement=contiguous(4, 2), tokens=(7, 9), choices=4, width=9000),
    "several routing blocks": Case(
        placement=contiguous(6, 3), tokens=(300, 140, 131), choices=2, width=8, alignment=4
    ),
    "fp8 on the way home": Case(placement=contiguous(6, 3), tokens=(9, 30, 2), choices=3, width=1280),
    "experts split over two ranks": Case(
        placement=contiguous(6, 2), tokens=(20, 5, 0, 31), choices=3, tensor=2, alignment=8
    ),
    "replicas of experts split over two ranks": Case(
        placement=from_slots([[0, 1], [1, 2, 3]], 4), tokens=(13, 21, 9, 2), choices=2, tensor=2
    ),
    "one expert rank of three": Case(placement=contiguous(3, 1), tokens=(9, 14, 3), choices=2, tensor=3),
    "two chunks": Case(placement=contiguous(4, 2), tokens=(140, 131), choices=1, width=8),
    "more slots than a warp has lanes": Case(
        placement=contiguous(150, 2), tokens=(40, 33), choices=4, alignment=4
    ),
    "a piece for every warp": Case(placement=contiguous(6, 2), tokens=(4, 3), choices=3, width=520),
}
SMALL = (
    "a piece for every warp",
    "four ranks, ragged",
    "replicas and a spare",
    "two chunks",
    "one rank",
    "uneven ranks, top-1",
    "nothing at all",
    "experts split over two ranks",
    "more slots than a warp has lanes",
)


@pytest.mark.parametrize("name", CASES)
def test_exchange(name: str) -> None:
    case = CASES[name]
    exchange = make_exchange(case, load=kernel.load, timeout=20.0, route_blocks=2)
    check_exchange(case, exchange)


@pytest.mark.parametrize(
    "name",
    [
        "four ranks, ragged",
        "replicas and a spare",
        "two chunks",
        "one rank",
        "several routing blocks",
        "fp8 on the way home",
        "experts split over two ranks",
        "nothing at all",
    ],
)
def test_rows_leave_while_routing_goes_on(name: str) -> None:
    case = replace(CASES[name], width=max(512, CASES[name].width // 512 * 512))
    exchange = make_exchange(case, load=kernel.load, timeout=20.0)
    for seed in range(2):
        check_dispatch(replace(case, seed=seed), exchange, sms=1 + seed)
    check_exchange(case, exchange)  # calls of either kind follow each other


@pytest.mark.parametrize(
    "name", ["four ranks, ragged", "replicas and a spare", "long rows", "nothing at all"]
)
def test_tokens_are_staged_while_routing_goes_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of tokens come unasked, the others are staged."""
    case = replace(CASES[name], width=max(1024, CASES[name].width))
    some = 2 * (32 // case.ranks) * (case.ranks - 1) * 2 * case.width
    monkeypatch.setattr("imbrex.kernels.exchange.layout.EARLY_BYTES", some)
    monkeypatch.setattr("imbrex.kernels.exchange.launches.FEW_SMS", 0)
    exchange = make_exchange(case, load=kernel.load, timeout=20.0)
    assert lay.early_groups(exchange.shape) == min(2, -(-max(case.tokens) // (32 // case.ranks)))
    for seed in range(2):
        check_small(replace(case, seed=seed), exchange, sms=1 + seed, large=True)
    check_exchange(case, exchange)


@pytest.mark.parametrize("name", SMALL)
def test_small_dispatch(name: str) -> None:
    case = CASES[name]
    exchange = make_exchange(case, load=kernel.load, timeout=20.0)
    for seed in range(2):
        check_small(replace(case, seed=seed), exchange, sms=2 + seed)


@pytest.mark.parametrize(("width", "tokens"), [(512, (45, 44, 0)), (1536, (150, 3, 9)), (10240, (60, 4, 2))])
def test_rows_cross_as_fp8(width: int, tokens: tuple[int, ...]) -> None:
    case = Case(placement=contiguous(6, 3), tokens=tokens, choices=3, width=width, drop=0.0)
    check_quantised(case, make_exchange(case, load=kernel.load, timeout=20.0))


def test_many_calls_on_rotating_buffers() -> None:
    exchange = None
    for seed in range(8):
        case = Case(
            placement=contiguous(6, 3), tokens=(seed, 9, 2 * seed % 7), choices=2, width=16, seed=seed
        )
        case = replace(case, tokens=(*case.tokens[:2], min(case.tokens[2], 9)))
        exchange = exchange or make_exchange(case, load=kernel.load, timeout=20.0, route_blocks=2)
        check_exchange(case, exchange, sms=1 + seed % 3)


def test_a_missing_rank_ends_in_one_exception() -> None:
    case = Case(placement=contiguous(8, 4), tokens=(16,) * 4, choices=2)
    exchange = make_exchange(case, load=kernel.load, timeout=1.0)
    exchange.heap.local = exchange.heap.local[:3]
    exchange.local_ranks, exchange._sizes = 3, exchange._sizes._replace(local_ranks=3)
    inputs = make_inputs(case)
    given = inputs.ids_WTK[:3], inputs.weights_WTK[:3], inputs.tokens_W[:3]
    routed = exchange.route(*given)
    with pytest.raises(ExchangeError, match=r"route call 1 .*timed out, waiting for expert ids of rank 3"):
        exchange.check()
    # What is launched behind it finds no rows, in place of whatever the memory held.
    assert bool((routed.position_LWTK == -1).all())
    assert bool((routed.recv_row_LWT == -1).all())
    assert bool((routed.send_row_LTW == -1).all())
    assert not routed.counts_Le.any()
    assert not routed.totals_L4.any()
    assert not routed.tokens_LW.any()
    with pytest.raises(ExchangeError):
        exchange.route(*given)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("missing", [0, 3])
def test_a_missing_rank_of_a_call_in_one_kernel_ends_in_one_exception(
    missing: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imbrex.kernels.exchange.launches.FEW_SMS", 0)
    case = Case(placement=contiguous(8, 4), tokens=(16,) * 4, choices=2, width=1024)
    exchange = make_exchange(case, load=kernel.load, timeout=1.0)
    inputs = make_inputs(case)
    first = 1 if missing == 0 else 0
    exchange.heap.first, exchange.local_ranks = first, 3
    there = slice(first, first + 3)
    exchange.heap.local = exchange.heap.local[there]
    given = inputs.x_WTD[there], inputs.ids_WTK[there], inputs.weights_WTK[there], 2, inputs.tokens_W[there]
    (exchange.dispatch_expert if large else exchange.dispatch)(*given)
    # Blocks that wait for ids and blocks that wait for rows may give up at the same moment.
    with pytest.raises(ExchangeError, match=rf"timed out, waiting for (expert ids|rows) of rank {missing}"):
        exchange.check()


def test_a_rank_that_dies_in_pull_ends_in_one_exception() -> None:
    case = Case(placement=contiguous(8, 4), tokens=(16,) * 4, choices=2)
    exchange = make_exchange(case, load=kernel.load, timeout=1.0)
    inputs = make_inputs(case)
    routed = exchange.route(inputs.ids_WTK, inputs.weights_WTK, inputs.tokens_W)
    exchange.local_ranks = 3
    exchange.pull(inputs.x_WTD, routed, num_sms=2)
    with pytest.raises(ExchangeError, match=r"pull call 1 .*timed out, waiting for staged rows of rank 3"):
        exchange.check()


@pytest.mark.parametrize("wrong", [7, 2**32 + 1, -(2**32)], ids=["twice", "low word 1", "low word 0"])
def test_wrong_ids_end_in_one_exception(wrong: int) -> None:
    case = Case(placement=contiguous(8, 2), tokens=(16, 16), choices=2)
    exchange = make_exchange(case, load=kernel.load, timeout=5.0)
    inputs = make_inputs(case)
    inputs.ids_WTK[1, 3] = torch.tensor([7, wrong])
    exchange.route(inputs.ids_WTK, inputs.weights_WTK, inputs.tokens_W)
    with pytest.raises(ExchangeError, match="expert ids out of range or repeated"):
        exchange.check()
