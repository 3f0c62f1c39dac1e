"""The fullest rank of the balanced split in many batches at once, by every set of ranks and by the split."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from imbrex.contracts import Placement
from imbrex.placement import contiguous, from_slots
from imbrex.placement.bounds import bounds, fullest_ranks, imbalances, least_fullest
from imbrex.placement.planner import to_held, to_placement
from imbrex.placement.replay import balanced_loads


def draw_placement(seed: int, ranks: int, experts: int, slots: int) -> Placement:
    """Any placement at all: some experts on many ranks."""
    draw = np.random.default_rng(seed)
    held = np.zeros((ranks, experts), dtype=bool)
    held[np.arange(experts) % ranks, np.arange(experts)] = True
    popularity = draw.dirichlet(np.full(experts, 0.3))
    while held.sum() < slots:
        held[draw.integers(ranks), draw.choice(experts, p=0.9 * popularity + 0.1 / experts)] = True
    return to_placement(held)


def draw_counts(seed: int, experts: int, batches: int = 12) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return draw.poisson(draw.gamma(0.5, size=experts) * 20, size=(batches, experts)).astype(np.int64)


def highest_cut(counts_E: np.ndarray, held_WE: np.ndarray) -> float:
    ranks = range(len(held_WE))
    sets = [list(s) for size in range(1, len(held_WE) + 1) for s in combinations(ranks, size)]
    outside = [[rank for rank in ranks if rank not in inside] for inside in sets]
    confined = [counts_E[~held_WE[others].any(0)].sum() for others in outside]
    return max(load / len(inside) for load, inside in zip(confined, sets, strict=True))


@pytest.mark.parametrize(("ranks", "slots"), [(2, 14), (5, 18), (8, 20), (8, 40)])
def test_both_bounds_meet_at_the_highest_cut(ranks: int, slots: int) -> None:
    held = to_held(draw_placement(ranks, ranks, 12, slots))
    counts = draw_counts(slots, 12)
    for rounds in (0, 1, 3):
        known = bounds(counts.astype(float), held, rounds)
        cuts = [highest_cut(row, held) for row in counts]
        assert (known.needed_H <= np.array(cuts) + 1e-9).all()
        assert (known.reached_H >= np.array(cuts) - 1e-9).all()
    known = bounds(counts.astype(float), held, 64)
    assert known.needed_H == pytest.approx(np.array(cuts), rel=1e-6)
    assert known.reached_H == pytest.approx(np.array(cuts), rel=1e-6)
    for row, crowded_W, needed in zip(counts, known.crowded_HW, known.needed_H, strict=True):
        assert row[~held[~crowded_W].any(0)].sum() / crowded_W.sum() == pytest.approx(needed)


@pytest.mark.parametrize(
    ("ranks", "experts", "slots"), [(4, 16, 20), (8, 64, 72), (16, 40, 64), (32, 64, 96), (72, 64, 144)]
)
def test_fullest_rank_is_that_of_the_split_to_the_last_choice(ranks: int, experts: int, slots: int) -> None:
    for seed in range(4):
        placement = draw_placement(seed, ranks, experts, slots)
        counts = draw_counts(seed + 9, experts)
        counts[3] = 0
        split = [balanced_loads(row, placement).max() for row in counts]
        assert fullest_ranks(counts, placement).tolist() == split


def test_a_long_chain_is_exact_too() -> None:
    """All on one end: the load has to pass through 11 experts, and few rounds do not bring it there."""
    placement = from_slots([[n, n + 1] for n in range(12)], 13)
    counts = np.array([[0] * 6 + [1201] + [0] * 6, [997, 601] + [0] * 11, [100] * 12 + [5]])
    assert fullest_ranks(counts, placement).tolist() == [
        balanced_loads(row, placement).max() for row in counts
    ]


def test_batches_without_choices_are_not_scored() -> None:
    placement = from_slots([[0, 1], [0, 2]], 3)
    counts = np.array([[0, 0, 0], [6, 3, 3], [0, 4, 0]])
    assert imbalances(counts, placement, "balanced").tolist() == [0.0, 1.0]
    assert imbalances(counts, placement, "even").tolist() == [0.0, 1.0]
    assert len(imbalances(counts[:1], placement, "balanced")) == 0
    assert imbalances(np.array([[9, 1, 5]]), placement, "even").tolist() == [9.5 / 7.5 - 1]


def test_nothing_is_below_the_least_fullest_rank() -> None:
    assert least_fullest(np.array([9.0, 2, 1]), 2, 4) == 6
    assert least_fullest(np.array([90.0, 2, 1]), 2, 4) == 46.5
    assert least_fullest(np.array([90.0, 2, 1, 1]), 8, 9) == 15
    for seed in range(6):
        counts = draw_counts(seed, 24)
        placement = draw_placement(seed, 6, 24, 30)
        least = [least_fullest(row.astype(float), 6, 30) for row in counts]
        assert (fullest_ranks(counts, placement) >= np.array(least) - 1e-9).all()
    assert least_fullest(np.ones(7), 3, 7) == pytest.approx(7 / 3)
    assert fullest_ranks(np.array([[1, 1, 1]]), contiguous(3, 3)).tolist() == [1]
