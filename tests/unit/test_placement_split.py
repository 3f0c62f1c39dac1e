"""Which replica takes which choice: sums, the exact optimum, locality."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from imbrex.placement import (
    contiguous,
    from_slots,
    make_split,
    plan_layers,
    split_balanced,
    split_evenly,
    split_nearest,
)
from imbrex.placement.planner import to_held


def per_rank(split_WS: torch.Tensor, placement) -> list[int]:
    total = split_WS.sum(0)
    return [int(total[b:e].sum()) for b, e in itertools.pairwise(placement.rank_offsets)]


def least_fullest(counts_WE: torch.Tensor, placement) -> int:
    """Max flow, min cut: over all sets of ranks, what only they can take, shared out evenly."""
    held = to_held(placement)
    load = counts_WE.sum(0).numpy()
    best = 0
    for size in range(1, placement.num_ranks + 1):
        for ranks in itertools.combinations(range(placement.num_ranks), size):
            outside = np.ones(placement.num_ranks, dtype=bool)
            outside[list(ranks)] = False
            confined = int(load[~held[outside].any(0)].sum())
            best = max(best, -(-confined // size))
    return best


def case(seed: int, num_ranks: int = 4, num_experts: int = 11, slots: int = 17):
    draw = np.random.default_rng(seed)
    placement = plan_layers(draw.gamma(0.6, size=(1, num_experts)), num_ranks, slots)[0]
    popularity = draw.gamma(0.6, size=num_experts)
    counts = draw.poisson(popularity * 20, size=(num_ranks, num_experts))
    return torch.from_numpy(counts.astype(np.int64)), placement


@pytest.mark.parametrize("split", [split_balanced, split_evenly, split_nearest])
@pytest.mark.parametrize("seed", range(4))
def test_shares_sum_to_the_counts(split, seed: int) -> None:
    counts, placement = case(seed)
    shares = split(counts, placement)
    assert shares.dtype == torch.int64
    assert (shares >= 0).all()
    for expert in range(placement.num_experts):
        slots = [s for s, e in enumerate(placement.slots) if e == expert]
        assert torch.equal(shares[:, slots].sum(1), counts[:, expert])


@pytest.mark.parametrize("seed", range(30))
def test_balanced_is_the_optimum(seed: int) -> None:
    counts, placement = case(seed, num_ranks=2 + seed % 5, num_experts=7 + seed % 7, slots=14 + seed % 3)
    assert max(per_rank(split_balanced(counts, placement), placement)) == least_fullest(counts, placement)


def test_balanced_by_hand() -> None:
    placement = from_slots([[0, 1], [0, 2]], 3)
    counts = torch.tensor([[4, 6, 0], [6, 0, 2]])
    assert split_balanced(counts, placement).tolist() == [[3, 6, 1, 0], [0, 0, 6, 2]]
    assert per_rank(split_evenly(counts, placement), placement) == [11, 7]


def test_balanced_pushes_along_a_chain() -> None:
    """Rank 0 shares with 1, 1 with 2, 2 with 3: 12 tokens even out only along the whole chain."""
    placement = from_slots([[0], [0, 1], [1, 2], [2]], 3)
    assert per_rank(split_balanced(torch.tensor([[12, 0, 0]] + [[0, 0, 0]] * 3), placement), placement) == [
        6,
        6,
        0,
        0,
    ]
    assert (
        per_rank(split_balanced(torch.tensor([[8, 4, 4]] + [[0, 0, 0]] * 3), placement), placement) == [4] * 4
    )


def test_tokens_stay_where_they_can() -> None:
    placement = from_slots([[0, 1], [0, 1]], 2)
    counts = torch.tensor([[5, 0], [0, 5]])
    for split in (split_balanced, split_nearest):
        assert split(counts, placement).tolist() == [[5, 0, 0, 0], [0, 0, 0, 5]]


def test_tensor_ranks_and_one_row_for_all() -> None:
    placement = from_slots([[0, 1], [0, 2]], 3)
    counts = torch.tensor([[2, 1, 0], [2, 0, 1], [0, 3, 0], [4, 0, 2]])
    assert per_rank(split_balanced(counts, placement), placement) == [8, 7]
    single = split_balanced(counts.sum(0, keepdim=True), placement)
    assert single.shape == (1, 4)
    first, second = per_rank(single, placement)
    assert abs(first - second) <= 1


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


def test_even_shares_cost_a_host_the_same_for_any_number_of_experts() -> None:
    """Every chunk asks before its rows can move."""
    counted = []
    for experts in (8, 256):
        counts, placement = torch.ones(2, experts, dtype=torch.int64), contiguous(experts, 2)
        split_evenly(counts, placement)
        with Operators() as operators:
            split_evenly(counts, placement)
        counted.append(operators.count)
    assert counted[0] == counted[1] < 20


def test_even_shares_by_hand() -> None:
    placement = from_slots([[0, -1, 1], [-1, 2, 0]], 3)
    shares = split_evenly(torch.tensor([[3, 4, 5], [3, 0, 7]]), placement)
    assert shares.tolist() == [[2, 0, 4, 0, 5, 1], [1, 0, 0, 0, 7, 2]]


def test_names() -> None:
    assert make_split("balanced") is split_balanced
    assert make_split(split_nearest) is split_nearest
    with pytest.raises(ValueError, match="use one of balanced, even, nearest"):
        make_split("best")
