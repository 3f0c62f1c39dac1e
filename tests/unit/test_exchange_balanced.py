"""Replicas by the loads of the batch inside the routing kernel, emulated: every position, row and sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from imbrex.exchange import plan as oracle
from imbrex.placement import contiguous, from_slots, split_balanced, split_evenly
from tests.emulated import kernel
from tests.emulated.scenario import Case, check_exchange, check_small, make_exchange, make_inputs, route

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")

CASES = {
    "replicas and a spare": Case(
        placement=from_slots([[0, 1, 2], [2, 3, -1], [0, 2, 4, 5]], 6), tokens=(40, 3, 21), choices=3
    ),
    "several routing blocks": Case(
        placement=from_slots([[0, 1, 4], [2, 3, 0], [5, 4, 0]], 6), tokens=(300, 140, 131), choices=2, width=8
    ),
    "skewed": Case(
        placement=from_slots([[0, 1, 7], [2, 3, 7], [4, 5, 6], [6, 7, 1]], 8),
        tokens=(33, 0, 18, 40),
        choices=2,
        skew=2.0,
        alignment=8,
    ),
    "spares only": Case(placement=from_slots([[0, -1, 1], [2, 3, -1]], 4), tokens=(20, 9), choices=2),
}


@pytest.mark.parametrize("name", CASES)
def test_balanced_exchange(name: str) -> None:
    case = replace(CASES[name], balanced=True)
    check_exchange(case, make_exchange(case, load=kernel.load, timeout=20.0, route_blocks=2))


@pytest.mark.parametrize("name", ["replicas and a spare", "skewed"])
def test_balanced_small_dispatch(name: str) -> None:
    case = replace(CASES[name], balanced=True)
    check_small(case, make_exchange(case, load=kernel.load, timeout=20.0))


@pytest.mark.parametrize("balanced", [True, False])
def test_choices_by_slot_are_added_up(balanced: bool) -> None:
    case = replace(CASES["skewed"], balanced=balanced)
    exchange = make_exchange(case, load=kernel.load, timeout=20.0)
    tally_LWS = torch.zeros(case.ranks, case.ranks, case.placement.num_slots, dtype=torch.int32)
    expected_WS = torch.zeros(case.ranks, case.placement.num_slots, dtype=torch.int64)
    for seed in range(2):
        inputs = make_inputs(replace(case, seed=seed))
        route(case, exchange, inputs, tally_LWS)
        exchange.check()
        ids = [inputs.ids_WTK[r, :t] for r, t in enumerate(case.tokens)]
        counts = torch.stack([oracle.count_choices(one, case.placement.num_experts) for one in ids])
        expected_WS += (split_balanced if balanced else split_evenly)(counts, case.placement)
    for tally_WS in tally_LWS:
        assert torch.equal(tally_WS.long(), expected_WS)


def test_choices_of_a_small_dispatch_are_added_up_where_experts_have_one_slot() -> None:
    case = Case(placement=contiguous(6, 3), tokens=(9, 0, 140), choices=2, skew=2.0)
    exchange, inputs = make_exchange(case, load=kernel.load, timeout=20.0), make_inputs(case)
    tally_LWS = torch.ones(3, 3, 6, dtype=torch.int32)
    given = inputs.x_WTD, inputs.ids_WTK, inputs.weights_WTK, 3, inputs.tokens_W
    exchange.dispatch_small(*given, tally=tally_LWS)
    exchange.check()
    ids = [inputs.ids_WTK[r, :t] for r, t in enumerate(case.tokens)]
    counts = torch.stack([oracle.count_choices(one, 6) for one in ids])
    assert (tally_LWS.long() == 1 + counts).all()
