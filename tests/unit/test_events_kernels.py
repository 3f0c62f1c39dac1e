"""The kernels of events, emulated: ranks out of step, of whom those that are late are done without."""

from __future__ import annotations

import math
import re

import pytest
import torch

from imbrex.kernels import jit
from imbrex.kernels.events.events import EVENTS, WHOLE, Patience
from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.overlap.events.seat import FEWEST, Stage
from imbrex.placement import contiguous, from_slots
from tests.emulated import kernel
from tests.emulated.events import EventsOutOfStep, Outcome, check_outcome
from tests.emulated.events_in_order import CASES, FORWARD, InOrder, take_turns
from tests.emulated.scenario import Case, make_inputs

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
CASE = Case(placement=contiguous(6, 3), tokens=(5, 0, 19), choices=2, width=64)
UNEVEN = Case(placement=from_slots([[0, 1, 2], [3, 4, 5], [-1]], 6), tokens=(7, 4, 3), choices=3, width=72)
SHARED = Case(placement=contiguous(4, 2), tokens=(4, 3, 2, 5), choices=2, width=64, tensor=2)
PAIR = Case(placement=contiguous(4, 2), tokens=(3, 4), choices=2, width=64)
MANY = Case(placement=contiguous(136, 2), tokens=(150, 70), choices=4, width=8)
"""Each of two warps numbers more choices than it asks for at once, of more slots."""
CALLS = 4


@pytest.mark.parametrize("case", [CASE, UNEVEN, SHARED])
def test_patience_without_an_end_drops_nothing(case: Case) -> None:
    for outcome in EventsOutOfStep(case, 1, math.inf).run_calls(CALLS, 1):
        assert check_outcome(case, outcome, 0) == 0


@pytest.mark.parametrize(("case", "epsilon"), [(CASE, 1), (CASE, 2), (UNEVEN, 2), (SHARED, 1)])
def test_whoever_is_late_is_done_without(case: Case, epsilon: int) -> None:
    """With a tau of 0 who counts is the adversary's: outputs are those of the masks, to the bit, no rank
    gives up on more than epsilon, and both sides of every claim know the same."""
    dropped = 0
    for seed in range(2):
        ranks = EventsOutOfStep(case, epsilon, 0.0)
        for outcome in ranks.run_calls(CALLS, seed):
            dropped += check_outcome(case, outcome, epsilon)
    assert dropped > 0


@pytest.mark.parametrize("case", [CASE, UNEVEN, SHARED])
def test_without_patience_nothing_is_dropped(case: Case) -> None:
    """In forwards and their backwards."""
    for outcome in EventsOutOfStep(case, 0, 0.0).run_calls(CALLS, 1, backward=True):
        assert len(outcome.backs) == case.ranks
        assert check_outcome(case, outcome, 0) == 0


def test_many_choices_of_many_experts() -> None:
    (outcome,) = EventsOutOfStep(MANY, 0, 0.0).run_calls(1, 0, backward=True)
    assert check_outcome(MANY, outcome, 0) == 0


@pytest.mark.parametrize(("case", "epsilon"), [(CASE, 1), (CASE, 2), (UNEVEN, 2), (SHARED, 1)])
def test_backwards_are_of_what_counted(case: Case, epsilon: int) -> None:
    """Gradients of tokens and of weights are those of the masks, to the bit, also where a host has computed
    rows of homes that did without them."""
    dropped = in_vain = 0
    for seed in range(2):
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


def test_a_wrong_input_ends_the_calls_of_all_ranks() -> None:
    """Wherever they are. The lanes of a warp, some of which may hear of it before others, stay together: that
    they would not is one interleaving in a hundred, so the text is looked at too."""
    for seed in range(4):
        with pytest.raises(
            ExchangeError, match=r"in events call 1 of layer 0 .*: (a peer gave up|it was given)"
        ):
            EventsOutOfStep(CASE, 0, 0.0).run_refusal(seed)
    texts = [text for name, text in jit.sources_of(EVENTS).items() if name.startswith("events/")]
    assert sum(len(re.findall(r"\bfailed\(call\)", text)) for text in texts) == 1


@pytest.mark.parametrize(("steps", "lacking"), [(0, "the packet"), (3, "the reply")])
def test_who_dies_in_a_backward_leaves_no_gradients(
    steps: int, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank goes so many steps back. The others say so, and have NaN for gradients: of tokens, of
    their weights, and of the rows that those of the experts' weights are made of."""
    case = CASES["three ranks"]
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    ranks, outcome = InOrder(case, "cpu", kernel.load, timeout=0.3), Outcome([], make_inputs(case))
    going = ranks.begin(outcome)
    take_turns(going, FORWARD + steps)
    take_turns(going[:-1], None)
    with pytest.raises(ExchangeError, match=rf"rank 0 in events call 2 .*: timed out, .*{lacking} of rank 2"):
        ranks.kernels[0].check()
    with pytest.raises(ExchangeError, match=r"rank 1 in events call 2 .*: a peer gave up"):
        ranks.kernels[1].check()
    for back in outcome.backs:
        assert back.d_x_TD.isnan().all()
        assert back.d_weights_TK.isnan().all()
        rows = int(back.call.routed.totals_L4[0, 0])
        assert bool(back.rows_RD[:rows].isnan().all()) == (steps == 0)


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


@pytest.mark.parametrize(("case", "epsilon"), [(PAIR, 1), (CASE, 2), (SHARED, 1)])
def test_a_budget_of_dropped_choices(case: Case, epsilon: int) -> None:
    """Allowances are those of the host's budget in every call, and all ranks together drop no more than their
    share and less than a call's."""
    ranks, cpu, share = EventsOutOfStep(case, epsilon, 0.0), torch.device("cpu"), 0.4
    ranks.patience = [Patience(0.0, epsilon, 1, cpu, budget=share) for _ in range(case.ranks)]
    outcomes = ranks.run_calls(20, 3)
    of_a_call = case.choices * sum(case.tokens)
    dropped = sum(check_outcome(case, outcome, epsilon) for outcome in outcomes)
    memories = [ranks.memory(rank) for rank in range(case.ranks)]
    choices = of_a_call * len(outcomes)
    assert 0 < dropped < share * choices + of_a_call
    unpaid = sum(memory.dropped for memory in memories)
    earned = sum(memory.earned for memory in memories)
    assert earned == ranks.patience[0].budget * choices - WHOLE * (dropped - unpaid)
