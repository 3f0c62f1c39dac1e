"""Steep steps: a change gives what it promised, and placements keep their shape and get better."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from imbrex.placement.descent import Shares, descend, fill
from imbrex.placement.packing import pack
from imbrex.placement.planner import search
from imbrex.placement.renewal import _once_each
from imbrex.placement.robust import cost_of, harden


def batches(num_experts: int = 24, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return draw.poisson(draw.gamma(0.7, size=num_experts) * 40, size=(8, num_experts)).astype(float)


def start(history_HE: np.ndarray, ranks: int, slots: int) -> np.ndarray:
    load_E = history_HE.sum(0)
    capacity = [slots // ranks] * ranks
    return pack(load_E, _once_each(load_E, slots, ranks), capacity)


def test_a_load_is_poured_to_one_level() -> None:
    assert fill(np.array([1.0, 2.0, 9.0]), np.array(4.0)).tolist() == [2.5, 1.5, 0.0]
    assert fill(np.array([[3.0, np.inf]]), np.array([2.0])).tolist() == [[2.0, 0.0]]


@pytest.mark.parametrize("moves_back", [False, True], ids=["a replica more", "an exchange"])
def test_a_change_costs_what_was_said_before(moves_back: bool) -> None:
    history_HE = batches()
    state, tried = Shares(history_HE, start(history_HE, 12, 36)), 0
    draw = np.random.default_rng(1)
    for batch in range(8):
        for expert in state.confined(batch).tolist():
            back_to = int(draw.choice(state.ranks_of(expert))) if moves_back else None
            losers, places = state.slots_below(batch, expert, back_to)
            costs_C = state.try_all(expert, losers, places, back_to)
            for loser, place, cost in zip(losers.tolist(), places.tolist(), costs_C.tolist(), strict=True):
                other = copy.deepcopy(state)
                of_two = Shares.split_anew
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Shares, "split_anew", lambda it, near, of=of_two: of(it, near[:2]))
                    other.change(expert, loser, place, back_to)
                assert other.cost == pytest.approx(cost, rel=1e-9)
                tried += 1
    assert tried > 50


def test_loads_are_those_of_the_split() -> None:
    history_HE = batches()
    state = Shares(history_HE, start(history_HE, 12, 36))
    before_W = state.held.sum(1)
    for batch in range(8):
        expert = int(state.confined(batch)[0])
        losers, places = state.slots_below(batch, expert, None)
        state.change(expert, int(losers[0]), int(places[0]), None)
        loads_WH = np.zeros((13, 8))
        for e, number in enumerate(state.number_E):
            ranks = state.ranks_EX[e, :number]
            assert sorted(ranks) == np.flatnonzero(state.held[:, e]).tolist()
            assert state.takes_EHX[e].sum(1) == pytest.approx(state.load_EH[e])
            np.add.at(loads_WH, ranks, state.takes_EHX[e, :, :number].T)
        assert loads_WH[:-1] == pytest.approx(state.loads_WH[:-1])
        assert (state.held.sum(1) == before_W).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_descent_keeps_the_shape_and_is_worth_more_than_proposals(seed: int) -> None:
    history_HE = batches(48, seed)
    before = start(history_HE, 32, 96)
    after = descend(history_HE, before, steps=150)
    assert (after.sum(1) == before.sum(1)).all()
    assert after.any(0).all()
    assert cost_of(history_HE, after) < cost_of(history_HE, before) - 0.02
    assert cost_of(history_HE, after) < cost_of(history_HE, harden(history_HE, before, proposals=900))
    assert (descend(history_HE, before, steps=150) == after).all()


def test_nothing_to_gain_changes_nothing() -> None:
    one, even = np.ones((1, 4), dtype=bool), np.eye(4, dtype=bool)
    assert (descend(batches(4), one, steps=10) == one).all()
    assert (descend(np.ones((3, 4)), even, steps=10) == even).all()
    assert (descend(np.zeros((3, 4)), even, steps=10) == even).all()
    load_E = batches(6).sum(0)
    alone = search(load_E, [3, 3])
    assert (descend(batches(6), alone, steps=10).sum(1) == 3).all()
