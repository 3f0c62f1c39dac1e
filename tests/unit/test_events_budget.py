"""A budget of dropped choices: what ranks that even it out may drop over histories of late ranks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from imbrex.overlap.events.budget import WHOLE, Budget

TOP_K = 2


class History:
    """Calls of ranks of whom some are late, drawn. Packets of the late ones come when the others are done;
    who may do without them drops its choices there, and refuses theirs in a share of the pairs, `refused`.
    even: every rank has as many tokens in each call, and as many choices at each."""

    def __init__(self, seed: int, *, even: bool, refused: float) -> None:
        self.drawn, self.even, self.refused = random.Random(seed), even, refused
        self.ranks = self.drawn.randint(2, 5)
        self.share, self.seldom = (
            self.drawn.choice([0.003, 0.01, 0.05, 0.2]),
            self.drawn.choice([0.1, 0.5, 1]),
        )
        self.most_late, self.most = self.drawn.randint(1, self.ranks - 1), self.ranks * 12
        self.budgets = [Budget(self.share, self.ranks) for _ in range(self.ranks)]
        self.dropped = self.choices = 0

    def call(self) -> None:
        everyone, drawn = range(self.ranks), self.drawn
        late = set(drawn.sample(everyone, drawn.randint(1, self.most_late)))
        late = late if drawn.random() < self.seldom else set()
        there = [self._choices() for _ in everyone]
        for budget, of_rank in zip(self.budgets, there, strict=True):
            budget.earn(sum(of_rank))
            self.choices += sum(of_rank)
        posted = [(r in late, p, self.budgets[r].give()) for r in everyone for p in everyone if p != r]
        self._deliver(posted, late=False)
        gone: set[tuple[int, int]] = set()
        for rank in everyone:
            if rank not in late and late and self.budgets[rank].covers(len(late)):
                gone |= {(rank, p) for p in late}
                gone |= {(p, rank) for p in late if drawn.random() < self.refused}
        for home, host in gone:
            self.budgets[home].charge(there[home][host])
            self.dropped += there[home][host]
        self._deliver(posted, late=True)

    def _choices(self) -> list[int]:
        """How many choices a rank has at each."""
        if self.even:
            return [TOP_K * self.most // self.ranks] * self.ranks
        there, drawn = [0] * self.ranks, self.drawn
        for _ in range(TOP_K * drawn.randint(0, self.most)):
            there[int(drawn.random() ** 2 * self.ranks)] += 1
        return there

    def _deliver(self, posted: list[tuple[bool, int, int]], *, late: bool) -> None:
        for is_late, peer, gift in posted:
            if is_late is late:
                self.budgets[peer].receive(gift)

    @property
    def over(self) -> float:
        """Choices dropped beyond the budget, in calls of all ranks at their largest."""
        return (self.dropped - self.share * self.choices) / (TOP_K * self.most * self.ranks)


def largest_over(check: Callable[[History], None], *, even: bool, refused: float) -> float:
    largest = -1.0
    for seed in range(30):
        history = History(seed, even=even, refused=refused)
        for _ in range(120):
            history.call()
            largest = max(largest, history.over)
            check(history)
    return largest


def conserved(history: History) -> None:
    """What all have earned is what all have left and what all have dropped."""
    left = sum(budget.left for budget in history.budgets)
    assert left == history.budgets[0].parts * history.choices - WHOLE * history.dropped


def test_even_choices_stay_within_the_share_at_any_time() -> None:
    assert largest_over(conserved, even=True, refused=0.0) <= 0


@pytest.mark.parametrize("refused", [0.0, 0.5, 1.0])
def test_any_choices_exceed_the_share_by_less_than_a_call(refused: float) -> None:
    assert 0 < largest_over(conserved, even=False, refused=refused) < 1


def test_what_a_late_rank_earns_is_spent_by_the_others_together() -> None:
    """Rank 3 of 4 is late in every tenth call: 1 % lets the others do without it in every 18.75th call, all
    in the same ones, where each by itself could in every 25th. A rank that gave up alone is in step again."""
    budgets, spent = [Budget(0.01, 4) for _ in range(4)], []
    for call in range(1900):
        for budget in budgets:
            budget.earn(4096)
        for giver in range(4):
            for peer in set(range(4)) - {giver}:
                budgets[peer].receive(budgets[giver].give())
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
