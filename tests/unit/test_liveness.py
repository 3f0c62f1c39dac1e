"""The explicit-state model: the printed algorithm's deadlock, none in ours, and faults that are put in."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from imbrex.overlap.events.ledger import Home, Host, Kind, Ledger
from imbrex.reproduce.interleavings import (
    BACKWARD,
    DEAD,
    FORWARD,
    UNDECIDED,
    Events,
    Printed,
    explore,
    routings,
)
from imbrex.reproduce.liveness import ordered, ours, printed, walked
from imbrex.reproduce.one_order import OneOrder


@pytest.mark.parametrize(("epsilons", "deadlocks"), [((0, 0), 0), ((0, 1), 7), ((1, 0), 7), ((1, 1), 1)])
def test_the_printed_algorithm_has_the_deadlocks_of_its_own_example(epsilons: Any, deadlocks: int) -> None:
    assert sum(explore(Printed(epsilons, r)).fault is not None for r in routings(2)) == deadlocks
    assert (printed(epsilons).cases, printed(epsilons).faulty) == (9, deadlocks)


def test_the_printed_algorithm_strands_a_third_with_equal_epsilon() -> None:
    """A last broadcast is taken for a reply that was counted already."""
    everyone = frozenset(range(3))
    explored = explore(Printed((2, 2, 2), [everyone, everyone, frozenset({2})]))
    assert explored.fault is not None
    assert explored.fault.endswith("wait for ever")


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("epsilons", [(0, 1), (1, 1)])
def test_ours_has_none_in_any_interleaving(epsilons: Any, at_once: bool) -> None:
    case = ours(epsilons, at_once=at_once)
    assert (case.fault, case.faulty) == ("", 0)
    assert case.states > 5


@pytest.mark.parametrize("at_once", [True, False])
def test_a_rank_may_die(at_once: bool) -> None:
    assert ours((1, 1), at_once=at_once, mortal=1).fault == ""
    assert ours((1, 1), at_once=at_once, mortal=1, tensor=2).fault == ""


@pytest.mark.parametrize("far", [((0, 1),), ((0, 1), (1, 2)), ((0, 1), (1, 2), (2, 0))])
def test_peers_that_are_far_behind_are_asked_nothing(far: Any) -> None:
    case = ours((1, 1, 1), at_once=False, far=far)
    assert (case.fault, case.faulty) == ("", 0)
    assert case.states > 200


def decided(whole: Events, end: Any) -> Any:
    """What every rank that lives has decided, without the ranks' names: a packet that was cancelled, or
    computed in vain, is the same."""
    none = (0,) * whole.world
    seats = []
    for phase, host, *rest in end[0]:
        words = tuple(Host.IN_VAIN if word == Host.CANCELLED else word for word in host)
        seats.append((DEAD, none, none, False, 0, 0) if phase == DEAD else (phase, words, *rest))
    return whole.alike((tuple(seats), ((),) * whole.world**2))


def ends(whole: Events, model: Events) -> set[Any]:
    """Every end of a model."""
    start = model.alike(model.first())
    seen, stack, decisions = {start}, [start], set()
    while stack:
        state = stack.pop()
        following = {model.alike(next_state) for next_state in model.moves(state)}
        assert model.fault(state, last=not following) is None
        end = model.end(state) if isinstance(model, OneOrder) else state
        if not following and end is not None:
            decisions.add(decided(whole, end))
        stack += following - seen
        seen |= following
    return decisions


@pytest.mark.untraced
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("epsilons", [(0, 0), (0, 1), (1, 1), (0, 0, 0), (0, 0, 1), (1, 1, 1), (0, 1, 2)])
def test_one_order_comes_to_the_same_ends_as_all(epsilons: Any, at_once: bool) -> None:
    whole = Events(epsilons, at_once=at_once)
    all_ends = ends(whole, whole)
    assert all_ends
    assert ends(whole, OneOrder(epsilons, at_once=at_once)) == all_ends


@pytest.mark.untraced
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("epsilons", "tensor", "far"), [((0, 1), 2, ()), ((1, 1, 1), 3, ()), ((1, 1, 1), 1, ((0, 1), (1, 2)))]
)
def test_one_order_comes_to_the_same_ends_of_ranks_that_share_experts(
    epsilons: Any, tensor: int, far: Any, at_once: bool
) -> None:
    """And where one is far behind."""
    setting: dict[str, Any] = {"at_once": at_once, "tensor": tensor, "far": far}
    whole = Events(epsilons, **setting)
    assert ends(whole, OneOrder(epsilons, **setting)) == ends(whole, whole)


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("epsilons", "mortals", "at_once"),
    [
        ((0, 1), (0, 1), True),
        ((0, 1), (0, 1), False),
        ((0, 0, 1), (1, 2), True),
        ((0, 0, 1), (1, 2), False),
    ],
)
def test_one_order_loses_no_end_where_one_dies(epsilons: Any, mortals: Any, at_once: bool) -> None:
    """It has more: there a rank also dies between two steps that are one in the whole model."""
    whole = Events(epsilons, at_once=at_once, mortal=1)
    ordered_ends = ends(whole, OneOrder(epsilons, at_once=at_once))
    for dies in product(mortals, (FORWARD, UNDECIDED, BACKWARD)):
        ordered_ends |= ends(whole, OneOrder(epsilons, at_once=at_once, dies=dies))
    assert ends(whole, whole) <= ordered_ends


@pytest.mark.untraced
@pytest.mark.parametrize("at_once", [True, False])
def test_four_patient_ranks_in_one_order(at_once: bool) -> None:
    case = ordered((1, 1, 1, 1), at_once=at_once)
    assert (case.fault, case.faulty) == ("", 0)
    assert case.states > 4000
    case = ordered((0, 0, 1, 1), at_once=at_once, deaths=((3, FORWARD), (3, UNDECIDED)))
    assert (case.fault, case.faulty, case.cases) == ("", 0, 2)


@pytest.mark.untraced
@pytest.mark.parametrize(("tensor", "far", "at_once"), [(2, ((0, 2),), False), (4, (), True)])
def test_four_ranks_that_share_experts(tensor: int, far: Any, at_once: bool) -> None:
    case = ordered((1, 1, 1, 1), at_once=at_once, tensor=tensor, far=far)
    assert (case.fault, case.faulty) == ("", 0)
    assert case.states > 4000
    case = ordered((0, 0, 1, 1), at_once=at_once, tensor=2, deaths=((3, FORWARD), (3, BACKWARD)))
    assert (case.fault, case.faulty, case.cases) == ("", 0, 2)


SHARED = [(Events, (1, 1, 1), 3), (OneOrder, (1, 1, 1), 3), (OneOrder, (0, 0, 1, 1), 2)]


@pytest.mark.parametrize(("model", "epsilons", "tensor"), SHARED)
def test_a_piece_of_an_expert_that_counts_alone_is_found(model: Any, epsilons: Any, tensor: int) -> None:
    """The rule removed, or its words: then the rank that had replied waits for a gradient."""

    class Alone(model):
        def _settle(self, ledger: Ledger) -> list[tuple[int, Kind]]:
            return []

    class Wordless(model):
        def _settle(self, ledger: Ledger) -> list[tuple[int, Kind]]:
            super()._settle(ledger)
            return []

    alone, wordless = (
        explore(kind(epsilons, at_once=False, tensor=tensor)).fault for kind in (Alone, Wordless)
    )
    assert alone is not None
    assert "uses a piece of the experts" in alone
    assert wordless is not None
    assert wordless.endswith("wait for ever")


def test_random_walks_of_four_ranks() -> None:
    case = walked((3, 3, 3, 3), at_once=False, walks=5, mortal=1)
    assert (case.fault, case.faulty) == ("", 0)


def silent(ledger: Ledger) -> list[tuple[int, Kind]]:
    """Give up on packets without a word, as who counts messages may."""
    return [(p, kind) for p, kind in Ledger.give_up(ledger) if kind is not Kind.REFUSED]


def forgetful(ledger: Ledger) -> list[tuple[int, Kind]]:
    """Give up on replies without a word."""
    return [(p, kind) for p, kind in Ledger.give_up(ledger) if kind is not Kind.DROPPED]


@pytest.mark.parametrize(
    ("model", "epsilons"), [(Events, (0, 1)), (OneOrder, (0, 1)), (OneOrder, (0, 0, 0, 1))]
)
@pytest.mark.parametrize("give_up", [silent, forgetful])
def test_who_gives_up_without_a_word_strands_the_others(give_up: Any, model: Any, epsilons: Any) -> None:
    class Broken(Ledger):
        __slots__ = ()

    Broken.give_up = give_up

    class Wordless(model):
        def _ledger(self, rank: int, seat: Any = None) -> Ledger:
            right = super()._ledger(rank, seat)
            ledger = Broken(rank, self.world, self.epsilons[rank], at_once=self.at_once)
            ledger.host, ledger.home, ledger.computed = right.host, right.home, right.computed
            return ledger

    fault = explore(Wordless(epsilons, at_once=False)).fault
    assert fault is not None
    assert fault.endswith("wait for ever")


@pytest.mark.parametrize(
    ("model", "epsilons"), [(Events, (1, 1)), (OneOrder, (1, 1)), (OneOrder, (0, 0, 1, 1))]
)
def test_a_host_that_uses_what_it_computed_in_vain_disagrees(model: Any, epsilons: Any) -> None:
    class Careless(model):
        def _used(self, home: int, host: Any, heard: int) -> bool:
            return host[home] in (Host.COMPUTED, Host.IN_VAIN)

    fault = explore(Careless(epsilons, at_once=False)).fault
    assert fault is not None
    assert "dropped its choices" in fault


def test_a_late_reply_does_not_count() -> None:
    ledger = Ledger(0, 2, 1, at_once=False)
    ledger.hear(1, Kind.PACKET)
    ledger.compute(ledger.task())
    assert ledger.give_up() == [(1, Kind.DROPPED)]
    assert not ledger.hear(1, Kind.REPLY)
    assert ledger.home[1] is Home.GIVEN_UP
    assert ledger.over
