"""A budget of dropped choices: what ranks that even it out may drop over histories of late ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import permutations

import pytest

from imbrex.overlap.events.budget import WHOLE, Budget

TOP_K = 2


class History:
    """Calls of ranks of whom some are late, drawn. What a late rank posts comes `behind` calls later, and it
    hears as late what was refused; who may do without it drops its choices there, and refuses its packet in a
    share of the pairs, `refused`. even: every rank has as many tokens in each call, and as many choices at
    each."""

    def __init__(self, seed: int, *, even: bool, refused: float, behind: int = 0) -> None:
        self.drawn, self.even, self.refused, self.behind = random.Random(seed), even, refused, behind
        self.ranks = self.drawn.randint(2, 5)
        self.share = self.drawn.choice([0.003, 0.01, 0.05, 0.2])
        self.seldom = self.drawn.choice([0.1, 0.5, 1])
        self.most_late, self.most = self.drawn.randint(1, self.ranks - 1), self.ranks * 12
        self.budgets = [Budget(self.share, self.ranks) for _ in range(self.ranks)]
        self.posted: list[tuple[int, Callable[[], None]]] = []
        self.calls = self.dropped = self.unpaid = self.choices = 0

    def call(self) -> None:
        everyone, drawn = range(self.ranks), self.drawn
        late = set(drawn.sample(everyone, drawn.randint(1, self.most_late)))
        late = late if drawn.random() < self.seldom else set()
        there = [self._choices() for _ in everyone]
        self._deliver()
        self.calls += 1
        for rank in everyone:
            self.budgets[rank].earn(sum(there[rank]))
            self.choices += sum(there[rank])
        for giver, peer in permutations(everyone, 2):
            word = giver, self.budgets[giver].give(peer), sum(there[giver])
            self._post(giver in late, partial(self.budgets[peer].receive, *word))
        self._deliver()
        gone: set[tuple[int, int]] = set()
        for rank in set(everyone) - late if late else ():
            refuses = [drawn.random() < self.refused for _ in late]
            if self.budgets[rank].covers(len(late) + sum(refuses)):
                gone |= {(rank, peer) for peer in late}
                for peer, does in zip(late, refuses, strict=True):
                    if does:
                        self.budgets[rank].refuse(peer)
                        gone.add((peer, rank))
        for home, host in gone:
            self.dropped += there[home][host]
            self.unpaid += there[home][host]
            self._post(home in late, partial(self._pay, home, there[home][host]))
        self._deliver()

    def _pay(self, home: int, dropped: int) -> None:
        self.budgets[home].charge(dropped)
        self.unpaid -= dropped

    def _choices(self) -> list[int]:
        """How many choices a rank has at each."""
        if self.even:
            return [TOP_K * self.most // self.ranks] * self.ranks
        there, drawn = [0] * self.ranks, self.drawn
        for _ in range(TOP_K * drawn.randint(0, self.most)):
            there[int(drawn.random() ** 2 * self.ranks)] += 1
        return there

    def _post(self, is_late: bool, word: Callable[[], None]) -> None:
        self.posted.append((self.calls + (1 + self.behind if is_late else 0), word))

    def _deliver(self) -> None:
        due = [word for when, word in self.posted if when <= self.calls]
        self.posted = [(when, word) for when, word in self.posted if when > self.calls]
        for word in due:
            word()

    @property
    def over(self) -> float:
        """Choices dropped beyond the budget, in calls of all ranks at their largest."""
        return (self.dropped - self.share * self.choices) / (TOP_K * self.most * self.ranks)


def largest_over(check: Callable[[History], None], *, even: bool, refused: float, behind: int) -> float:
    largest = -1.0
    for seed in range(30):
        history = History(seed, even=even, refused=refused, behind=behind)
        for _ in range(120):
            history.call()
            largest = max(largest, history.over)
            check(history)
    return largest


def conserved(history: History) -> None:
    """What all have earned is what all have left, what is on its way and what all have paid for."""
    if history.posted:
        return
    left = sum(budget.left + sum(budget.owed) for budget in history.budgets)
    assert left == history.budgets[0].parts * history.choices - WHOLE * history.dropped


@pytest.mark.parametrize("behind", [0, 1, 30])
@pytest.mark.parametrize("refused", [0.0, 1.0])
def test_even_choices_stay_within_the_share_at_any_time(refused: float, behind: int) -> None:
    assert largest_over(conserved, even=True, refused=refused, behind=behind) <= 0


@pytest.mark.parametrize("behind", [0, 1, 10])
@pytest.mark.parametrize("refused", [0.0, 0.5, 1.0])
def test_any_choices_exceed_the_share_by_a_part_of_a_call(refused: float, behind: int) -> None:
    assert largest_over(conserved, even=False, refused=refused, behind=behind) < 0.3


def test_who_has_no_tokens_does_not_refuse_for_nothing() -> None:
    """A rank that runs ahead of all others: it pays for what it refuses before anybody hears."""
    (ahead, home), refused = (Budget(0.1, 2) for _ in range(2)), 0
    for call in range(400):
        ahead.earn(0)
        if call < 100:
            home.earn(20)
            ahead.receive(1, home.give(1), 20)
        elif ahead.covers(1):
            ahead.refuse(1)
            refused += 1
    assert 0 < refused * 10 <= 100 * 0.1 * 20
    home.receive(0, ahead.give(1), 0)
    home.charge(refused * 10)
    assert home.left >= 0


def test_what_a_late_rank_earns_is_spent_by_the_others_together() -> None:
    """Rank 3 of 4 is late in every tenth call: 1 % lets the others do without it in every 18.75th call, all
    in the same ones, where each by itself could in every 25th. A rank that gave up alone is in step again."""
    budgets, spent = [Budget(0.01, 4) for _ in range(4)], []
    for call in range(1900):
        for budget in budgets:
            budget.earn(4096)
        for giver, peer in permutations(range(4), 2):
            budgets[peer].receive(giver, budgets[giver].give(peer), 4096)
        may = [budget.covers(1) for budget in budgets[:3]]
        assert len(set(may)) == 1
        for rank in range(3 if call % 10 == 3 else call % 200 == 7):
            if may[rank]:
                budgets[rank].charge(1024)
                spent.append((call, rank))
    together = [call for call in range(1900) if spent.count((call, 2))]
    assert len(together) >= 96
    assert len(spent) * 1024 < 0.01 * 1900 * 4 * 4096


def test_a_budget_of_everything_is_none() -> None:
    budget = Budget()
    budget.earn(8)
    budget.charge(8)
    assert budget.covers(3)
