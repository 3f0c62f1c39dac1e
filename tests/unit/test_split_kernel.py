"""The split kernel, emulated: to the last integer what the CPU decides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from imbrex.contracts import Placement
from imbrex.kernels.routing.split import SplitKernel
from imbrex.placement import from_slots, plan_layers, split_balanced
from tests.emulated import kernel

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")


def split_on_device(counts_WE: torch.Tensor, placement: Placement) -> torch.Tensor:
    return SplitKernel(placement, torch.device("cpu"), load=kernel.load)(counts_WE)


def test_by_hand() -> None:
    placement = from_slots([[0, 1], [0, 2]], 3)
    counts = torch.tensor([[4, 6, 0], [6, 0, 2]])
    assert split_on_device(counts, placement).tolist() == [[3, 6, 1, 0], [0, 0, 6, 2]]


@pytest.mark.parametrize("seed", range(24))
def test_random_layers(seed: int) -> None:
    """2 to 16 ranks, up to three extra slots a rank; tensor ranks and one row for all among them."""
    draw = np.random.default_rng(seed)
    ranks = int(draw.integers(2, 17))
    experts = int(draw.integers(ranks, 90))
    slots = int(min(experts * ranks, experts + draw.integers(0, 3 * ranks)))
    placement = plan_layers(draw.gamma(0.6, size=(1, experts)), ranks, slots)[0]
    sources = (ranks, 2 * ranks, 1)[seed % 3]
    counts = torch.from_numpy(draw.poisson(draw.gamma(0.6, size=experts) * 20, size=(sources, experts)))
    assert torch.equal(split_on_device(counts, placement), split_balanced(counts, placement))


def test_chains_spares_and_nothing() -> None:
    chain = from_slots([[0], [0, 1, -1], [1, 2], [2, -1]], 3)
    for counts in ([[12, 0, 0]] + [[0, 0, 0]] * 3, [[8, 4, 4]] + [[0, 0, 0]] * 3, [[0, 0, 0]] * 4):
        counts_WE = torch.tensor(counts)
        assert torch.equal(split_on_device(counts_WE, chain), split_balanced(counts_WE, chain))
    alone = from_slots([[0, 1], [2]], 3)
    assert split_on_device(torch.tensor([[1, 2, 3], [4, 5, 6]]), alone).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_too_many_ranks() -> None:
    with pytest.raises(ValueError, match="33 ranks; the kernel splits over 32"):
        SplitKernel(from_slots([[0]] * 33, 1), torch.device("cpu"), load=kernel.load)
