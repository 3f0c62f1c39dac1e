"""First placements for the even replica split: the number of replicas of every expert, then greedy packing;
the best placement of all for small layers.

Loads are float64 [E]. `replicas_WE` is bool: whether rank w has a replica of expert e. Every replica of an
expert carries the same share of its load, and no rank has two replicas of an expert.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Held = NDArray[np.bool_]
MOST_PLACEMENTS = 30_000
"""The most placements that are all compared; it takes about 20 ms on one core."""


def spread(num_slots: int, num_ranks: int) -> tuple[int, ...]:
    """The number of slots of every rank, as even as possible: 10 slots on 4 ranks are 3, 3, 2, 2."""
    small, extra = divmod(num_slots, num_ranks)
    return tuple(small + (rank < extra) for rank in range(num_ranks))


def replicate(load_E: Floats, num_slots: int, limit: int) -> Ints:
    """The number of replicas of every expert, at most `limit` each. Each further slot goes to the expert with
    the most load per replica, the first of equal ones (Adams' method of apportionment, as in DeepSeek's
    EPLB).

    Example: loads [6, 3, 2], 5 slots: [1, 1, 1] -> [2, 1, 1] -> [3, 1, 1], as 3 = 6 / 2 comes before 3 / 1.
    """
    counts = [1] * len(load_E)
    heap = [(-float(load), expert) for expert, load in enumerate(load_E)] if limit > 1 else []
    heapq.heapify(heap)
    for _ in range(num_slots - len(load_E)):
        _, expert = heapq.heappop(heap)
        counts[expert] += 1
        if counts[expert] < limit:
            heapq.heappush(heap, (-float(load_E[expert]) / counts[expert], expert))
    return np.array(counts, dtype=np.int64)


def pack(load_E: Floats, counts_E: Ints, capacity_W: Sequence[int]) -> Held:
    """Put the replica with the highest load first on the rank with the least load that has a free slot and
    does not have the expert yet. Of equal ones, the lower expert and the lower rank come first.

    If only ranks that have the expert are left, the slot goes to another expert, so the result may have other
    numbers of replicas than `counts_E`. capacity_W: the slots of every rank, at most E each, at least E
    together.
    """
    num_ranks, num_experts = len(capacity_W), len(load_E)
    replicas_WE = np.zeros((num_ranks, num_experts), dtype=bool)
    share_E = load_E / counts_E
    free = list(capacity_W)
    # Ranks with a free slot, the least loaded first.
    open_ranks = [(0.0, rank) for rank in range(num_ranks) if free[rank]]
    for expert in np.argsort(-share_E, kind="stable").tolist():
        # The next lowest ranks are other ranks, so none of them has the expert.
        lowest = [heapq.heappop(open_ranks) for _ in range(min(int(counts_E[expert]), len(open_ranks)))]
        for load, rank in lowest:
            replicas_WE[rank, expert] = True
            free[rank] -= 1
            if free[rank]:
                heapq.heappush(open_ranks, (load + float(share_E[expert]), rank))
    for rank in range(num_ranks):
        for _ in range(free[rank]):
            share = np.where(replicas_WE[rank], -1.0, load_E / np.maximum(replicas_WE.sum(0), 1))
            replicas_WE[rank, int(share.argmax())] = True
    assert (replicas_WE.sum(1) == capacity_W).all()
    assert replicas_WE.any(0).all()
    return replicas_WE


def rank_loads(load_E: Floats, replicas_WE: Held) -> Floats:
    """The load of every rank, float64 [W], if replicas share it evenly."""
    return replicas_WE @ (load_E / replicas_WE.sum(0))


def num_placements(num_experts: int, capacity_W: Sequence[int]) -> int:
    """The number of ways to give every rank as many different experts as it has slots."""
    return math.prod(math.comb(num_experts, slots) for slots in capacity_W)


def best_placement(load_E: Floats, capacity_W: Sequence[int]) -> Held:
    """The placement with the lowest load of the fullest rank, bool [W, E], the first of equal ones in the
    order of the experts."""
    num_experts = len(load_E)
    choices = []
    for slots in capacity_W:
        rows = list(itertools.combinations(range(num_experts), slots))
        sets_NE = np.zeros((len(rows), num_experts), dtype=bool)
        np.put_along_axis(sets_NE, np.array(rows, dtype=np.int64).reshape(len(rows), slots), True, axis=1)
        choices.append(sets_NE)
    index_WN = np.indices([len(sets_NE) for sets_NE in choices]).reshape(len(choices), -1)
    replicas_WNE = np.stack([sets_NE[index] for sets_NE, index in zip(choices, index_WN, strict=True)])
    counts_NE = replicas_WNE.sum(0)
    share_NE = load_E / np.maximum(counts_NE, 1)
    fullest_N = np.einsum("wne,ne->wn", replicas_WNE, share_NE).max(0)
    fullest_N[(counts_NE == 0).any(1)] = np.inf
    return replicas_WNE[:, int(fullest_N.argmin())]
