"""The kernels of events, emulated: ranks out of step, of whom those that are late are done without."""

from __future__ import annotations

import math

import pytest
import torch

from imbrex.kernels.events.events import Patience
from imbrex.overlap.events.seat import FEWEST, Stage
from imbrex.placement import contiguous, from_slots
from tests.emulated import kernel
from tests.emulated.events import EventsOutOfStep, check_outcome
from tests.emulated.events_in_order import CASES, InOrder
from tests.emulated.scenario import Case

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
CASE = Case(placement=contiguous(6, 3), tokens=(5, 0, 9), choices=2, width=64)
UNEVEN = Case(placement=from_slots([[0, 1, 2], [3, 4, 5], [-1]], 6), tokens=(7, 4, 3), choices=3, width=72)
SHARED = Case(placement=contiguous(4, 2), tokens=(4, 3, 2, 5), choices=2, width=64, tensor=2)
PAIR = Case(placement=contiguous(4, 2), tokens=(3, 4), choices=2, width=64)
CALLS = 4


@pytest.mark.parametrize("case", [CASE, UNEVEN, SHARED])
def test_without_patience_nothing_is_dropped(case: Case) -> None:
    ranks = EventsOutOfStep(case, 0, 0.0)
    for seed in range(2):
        for outcome in ranks.run_calls(CALLS, seed):
            assert check_outcome(case, outcome, 0) == 0


@pytest.mark.parametrize(("case", "epsilon"), [(CASE, 1), (CASE, 2), (UNEVEN, 2), (SHARED, 1)])
def test_whoever_is_late_is_done_without(case: Case, epsilon: int) -> None:
    """With a tau of 0 who counts is the adversary's: outputs are those of the masks, to the bit, no rank
    gives up on more than epsilon, and both sides of every claim know the same."""
    dropped = 0
    for seed in range(4):
        ranks = EventsOutOfStep(case, epsilon, 0.0)
        for outcome in ranks.run_calls(CALLS, seed):
            dropped += check_outcome(case, outcome, epsilon)
    assert dropped > 0


@pytest.mark.parametrize("case", [CASE, UNEVEN, SHARED])
def test_backwards_without_patience(case: Case) -> None:
    for outcome in EventsOutOfStep(case, 0, 0.0).run_calls(CALLS, 1, backward=True):
        assert len(outcome.backs) == case.ranks
        assert check_outcome(case, outcome, 0) == 0


@pytest.mark.parametrize(("case", "epsilon"), [(CASE, 1), (CASE, 2), (UNEVEN, 2), (SHARED, 1)])
def test_backwards_are_of_what_counted(case: Case, epsilon: int) -> None:
    """Gradients of tokens and of weights are those of the masks, to the bit, also where a host has computed
    rows of homes that did without them."""
    dropped = in_vain = 0
    for seed in range(4):
        ranks = EventsOutOfStep(case, epsilon, 0.0)
        for outcome in ranks.run_calls(CALLS, seed, backward=True):
            dropped += check_outcome(case, outcome, epsilon)
            in_vain += sum(int((call.outcome_4W[1] > call.outcome_4W[2]).sum()) for call in outcome.calls)
    assert dropped > 0
    assert in_vain > 0


@pytest.mark.parametrize("late", ["", "before", "experts"])
@pytest.mark.parametrize("name", CASES)
def test_launches_in_order(name: str, late: str) -> None:
    """Whoever is late is done without, and so is the rank that shares its experts."""
    case = CASES[name]
    outcome = InOrder(case, "cpu", kernel.load).run(0, late)
    assert (check_outcome(case, outcome, 1) > 0) == bool(late)


@pytest.mark.parametrize("factor", [None, 1.5])
def test_patience_that_is_learnt(factor: float | None) -> None:
    """Of the same waits a device learns what a host does; nobody is given up before, nor too often."""
    ranks, cpu = EventsOutOfStep(PAIR, 1, 0.0), torch.device("cpu")
    ranks.patience = [Patience(math.inf, 1, 1, cpu, share=0.8, factor=factor) for _ in range(2)]
    outcomes = ranks.run_calls(FEWEST + 6, 3)
    dropped = [check_outcome(PAIR, outcome, 1) for outcome in outcomes]
    assert sum(dropped[:FEWEST]) == 0
    assert {(stage, True) for stage in Stage} <= ranks.learnt
    assert sum(n > 0 for n in dropped) <= 2 * 2 * 0.2 * len(outcomes)
