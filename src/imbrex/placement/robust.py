"""Placement for the balanced replica split: whatever a batch brings, enough of it can still be moved.

Under that split the fullest rank is the highest, over all sets A of ranks, of the load that only A can take,
divided by |A| (max flow, min cut). So a layer is judged by what would have been the fullest rank in each of
some past batches, weighted by their tokens, and placements change one swap or one replica at a time as long
as that falls on average.
Example: two ranks, loads 6, 3, 3: with replicas of the first on both, any batch where neither of the others
exceeds half of it comes out even.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from imbrex.placement.packing import Floats, Held
from imbrex.placement.refine import count_moves

ALL_SETS_UP_TO = 6
"""Ranks; above, only single ranks and pairs are looked at."""


def sets_of_ranks(num_ranks: int) -> Held:
    """Sets that can be full, bool [A, W]: all but the whole on few ranks, else one and two ranks."""
    largest = num_ranks - 1 if num_ranks <= ALL_SETS_UP_TO else 2
    chosen = [set_ for size in range(1, largest + 1) for set_ in combinations(range(num_ranks), size)]
    sets = np.zeros((len(chosen), num_ranks), dtype=bool)
    for row, ranks in enumerate(chosen):
        sets[row, list(ranks)] = True
    return sets


class Confined:
    """Load that only a set of ranks can take, for every past batch and set, kept up to date move by move."""

    def __init__(self, history_HE: Floats, held_WE: Held) -> None:
        self.held, self.load_EH = held_WE.copy(), np.ascontiguousarray(history_HE.T)
        sets_AW = sets_of_ranks(len(held_WE))
        self.others_WA = (~sets_AW).T
        total_H = history_HE.sum(1)
        mean_H = np.maximum(total_H / len(held_WE), 1e-300)
        self.weight_H = total_H / max(float(total_H.sum()), 1e-300)
        self.scale_HA = 1 / (mean_H[:, None] * np.maximum(sets_AW.sum(1), 1))
        self.confined_HA = history_HE @ self._inside(held_WE).astype(float)
        self.cost = self._cost(self.confined_HA)

    def _inside(self, held_WE: Held) -> Held:
        """Whether all replicas of an expert are in a set, bool [E, A]."""
        return ~(held_WE.T @ self.others_WA)

    def _cost(self, confined_HA: Floats) -> float:
        fullest_H = np.maximum((confined_HA * self.scale_HA).max(1), 1)
        return float(fullest_H @ self.weight_H)

    def take(self, changed: dict[int, Held], *, must_fall: bool) -> bool:
        """Take new columns of `held` where the cost does not rise, or must fall."""
        confined = self.confined_HA.copy()
        for expert, held_W in changed.items():
            columns = np.stack([self.held[:, expert], held_W], 1)
            before, after = self._inside(columns).astype(float)
            confined += self.load_EH[expert][:, None] * (after - before)
        cost = self._cost(confined)
        if cost > self.cost or (must_fall and cost >= self.cost - 1e-9):
            return False
        self.cost, self.confined_HA = cost, confined
        for expert, held_W in changed.items():
            self.held[:, expert] = held_W
        return True


def harden(
    history_HE: Floats,
    held_WE: Held,
    *,
    proposals: int,
    seed: int = 0,
    max_moves: int | None = None,
) -> Held:
    """A placement with the same slots per rank, at least as good for the balanced split over the history.

    history_HE: tokens per expert of each of H past batches. max_moves: at most so many ranks and experts are
    in the result that are not in `held_WE`. Deterministic in all arguments.
    """
    num_ranks = len(held_WE)
    if num_ranks < 2 or not history_HE.any():
        return held_WE
    state, draw = Confined(history_HE, held_WE), np.random.default_rng(seed)
    ranks = draw.integers(num_ranks, size=(proposals, 2))
    picks = draw.random((proposals, 2))
    for (one, two), (first, second) in zip(ranks.tolist(), picks.tolist(), strict=True):
        if state.cost <= 1 + 1e-12:
            break
        propose = _propose_swap if one != two else _propose_replica
        changed = propose(state.held, one, two, first, second)
        if changed and _within(held_WE, state.held, changed, max_moves):
            state.take(changed, must_fall=max_moves is not None)
    return state.held


def _propose_swap(held: Held, one: int, two: int, first: float, second: float) -> dict[int, Held]:
    mine = np.flatnonzero(held[one] & ~held[two])
    theirs = np.flatnonzero(held[two] & ~held[one])
    if not len(mine) or not len(theirs):
        return {}
    given, taken = int(mine[int(first * len(mine))]), int(theirs[int(second * len(theirs))])
    changed = {given: held[:, given].copy(), taken: held[:, taken].copy()}
    changed[given][[one, two]] = (False, True)
    changed[taken][[one, two]] = (True, False)
    return changed


def _propose_replica(held: Held, rank: int, _: int, first: float, second: float) -> dict[int, Held]:
    """A slot of `rank` goes from an expert with several replicas to one that the rank has not."""
    given = int(first * held.shape[1])
    several = np.flatnonzero(held[rank] & (held.sum(0) > 1))
    if held[rank, given] or not len(several):
        return {}
    taken = int(several[int(second * len(several))])
    changed = {given: held[:, given].copy(), taken: held[:, taken].copy()}
    changed[given][rank], changed[taken][rank] = True, False
    return changed


def _within(old: Held, held: Held, changed: dict[int, Held], max_moves: int | None) -> bool:
    if max_moves is None:
        return True
    after = held.copy()
    for expert, held_W in changed.items():
        after[:, expert] = held_W
    return count_moves(old, after) <= max_moves
