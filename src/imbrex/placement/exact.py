"""The best placement of a small layer, by looking at every one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from imbrex.placement.packing import Floats, Held

MOST_PLACEMENTS = 30_000
"""About 20 ms on one core."""


def num_placements(num_experts: int, capacity_W: Sequence[int]) -> int:
    """Choices of different experts for every rank."""
    return math.prod(math.comb(num_experts, slots) for slots in capacity_W)


def best_placement(load_E: Floats, capacity_W: Sequence[int]) -> Held:
    """The lowest fullest rank, the first of equals in the order of the experts; bool [W, E]."""
    num_experts = len(load_E)
    choices = []
    for slots in capacity_W:
        rows = list(itertools.combinations(range(num_experts), slots))
        held = np.zeros((len(rows), num_experts), dtype=bool)
        np.put_along_axis(held, np.array(rows, dtype=np.int64).reshape(len(rows), slots), True, axis=1)
        choices.append(held)
    index_WN = np.indices([len(held) for held in choices]).reshape(len(choices), -1)
    held_WNE = np.stack([held[index] for held, index in zip(choices, index_WN, strict=True)])
    counts_NE = held_WNE.sum(0)
    share_NE = load_E / np.maximum(counts_NE, 1)
    fullest_N = np.einsum("wne,ne->wn", held_WNE, share_NE).max(0)
    fullest_N[(counts_NE == 0).any(1)] = np.inf
    return held_WNE[:, int(fullest_N.argmin())]
