"""How evenly the balanced split can share many batches: bounds from both sides, computed for all batches at
once.

Load flows from experts to the ranks that hold them. The lowest possible load of the fullest rank is, by max
flow and min cut, the maximum over all sets A of ranks of the load that only ranks in A can take, divided by
|A|. There are 2^W sets, which are not listed. Instead all batches are split step by step, in fractions: one
expert after the other, its load is distributed anew so that the ranks it reaches have equal loads. This is
coordinate descent on the sum of squares, and converges to the most even split. After any number of rounds
there is an upper bound for every batch, the fullest rank of the split so far, and a lower one: of the sets
that hold the k fullest ranks, the one that must carry most per rank. If they are equal, both are exact.

Example: ranks 0 and 1; loads 6 on both ranks, 3 and 5 on one each. 3 + 4 and 5 + 2 is even, and the set of
both ranks must carry 14 / 2 = 7 per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from imbrex.contracts import Placement
from imbrex.placement.flow import spread_choices
from imbrex.placement.packing import Floats, Held, Ints
from imbrex.placement.planner import to_held

ROUNDS = 4
"""The number of rounds after which the two bounds are within 0.1 % of the mean of each other, on recorded
routing and 8 to 72 ranks."""
MOST_ROUNDS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Bounds on the load of the fullest rank of every batch.

    reached_H: its load under a split that exists. needed_H: the load per rank of the set `crowded_HW`, which
    it cannot give away, so that no split is below.
    """

    reached_H: Floats
    needed_H: Floats
    crowded_HW: Held


class Pouring:
    """Batches on the way to their most even split. loads_HW: the load of every rank so far."""

    def __init__(self, load_HE: Floats, replicas_WE: Held) -> None:
        self.load_HE, self.held = load_HE, replicas_WE
        number_E = replicas_WE.sum(0)
        # One rank more than there are: it is full, and stands in where an expert has fewer ranks than others.
        self._loads = np.full((len(load_HE), len(replicas_WE) + 1), np.inf)
        self._loads[:, :-1] = (load_HE * (number_E == 1)) @ replicas_WE.T.astype(np.float64)
        self._teams = [self._even_start(experts, ranks_GX) for experts, ranks_GX in _teams(replicas_WE)]

    def _even_start(self, experts: Ints, ranks_GX: Ints) -> tuple[Floats, Ints, Floats]:
        load_HG, real_GX = self.load_HE[:, experts], ranks_GX < len(self.held)
        takes_HGX = np.where(real_GX, load_HG[:, :, None] / real_GX.sum(1)[:, None], 0.0)
        for x in range(ranks_GX.shape[1]):
            self._loads[:, ranks_GX[:, x]] += takes_HGX[:, :, x]
        return load_HG, ranks_GX, takes_HGX

    @property
    def loads_HW(self) -> Floats:
        return self._loads[:, :-1]

    def pour(self) -> None:
        """Run one round: distribute the load of every replicated expert once. Experts that share no rank are
        done at the same time."""
        loads = self._loads
        for load_HG, ranks_GX, takes_HGX in self._teams:
            others = loads[:, ranks_GX] - takes_HGX
            # The level over the k lowest falls with k until the next one stands above it, then rises.
            sums = np.sort(others, axis=2).cumsum(2)
            level = ((load_HG[:, :, None] + sums) / np.arange(1, sums.shape[2] + 1)).min(2, keepdims=True)
            takes_HGX[:] = np.maximum(level - others, 0.0)
            loads[:, ranks_GX] = others + takes_HGX

    def bounds(self) -> Bounds:
        """Both bounds after the rounds so far."""
        loads, batches = self.loads_HW, np.arange(len(self.load_HE))[:, None]
        num_ranks = loads.shape[1]
        order = np.argsort(-loads, axis=1, kind="stable")
        place_HW = np.empty_like(order)
        np.put_along_axis(place_HW, order, np.arange(num_ranks)[None], axis=1)
        expert_of, rank_of = np.divmod(np.flatnonzero(self.held.T), num_ranks)
        firsts = np.searchsorted(expert_of, np.arange(self.held.shape[1]))
        last_HE = np.maximum.reduceat(place_HW[:, rank_of], firsts, axis=1)
        bins = (last_HE + batches * num_ranks).ravel()
        confined = np.bincount(bins, self.load_HE.ravel(), num_ranks * len(loads))
        needed = confined.reshape(-1, num_ranks).cumsum(1) / np.arange(1, num_ranks + 1)
        peak = needed.argmax(1)[:, None]
        return Bounds(
            reached_H=loads.max(1),
            needed_H=np.take_along_axis(needed, peak, 1)[:, 0],
            crowded_HW=place_HW <= peak,
        )


def _teams(replicas_WE: Held) -> list[tuple[Ints, Ints]]:
    """Teams of replicated experts no two of which have a rank in common: the experts of a team, and their
    ranks, a row for each expert, filled up with the number of ranks."""
    nobody = len(replicas_WE)
    number_E = replicas_WE.sum(0)
    several = np.flatnonzero(number_E > 1)
    several = several[np.argsort(-number_E[several], kind="stable")]
    ends = number_E[several].cumsum().tolist()
    all_ranks = (np.flatnonzero(replicas_WE.T[several]) % nobody).tolist()
    busy: list[int] = []  # a bit for every rank of a team
    teams: list[list[tuple[int, list[int]]]] = []
    for expert, begin, end in zip(several.tolist(), [0, *ends], ends, strict=False):
        ranks = all_ranks[begin:end]
        ours = sum(1 << rank for rank in ranks)
        free = next((at for at, bits in enumerate(busy) if not bits & ours), len(teams))
        if free == len(teams):
            busy.append(0)
            teams.append([])
        busy[free] |= ours
        teams[free].append((expert, ranks))
    members = []
    for team in teams:
        widest = max(len(ranks) for _, ranks in team)
        rows = [ranks + [nobody] * (widest - len(ranks)) for _, ranks in team]
        members.append((np.array([expert for expert, _ in team]), np.array(rows)))
    return members


def bounds(load_HE: Floats, replicas_WE: Held, rounds: int = ROUNDS) -> Bounds:
    """The bounds of every batch. load_HE: the load of every expert, float64 [H, E]; every expert is on a
    rank."""
    pouring = Pouring(load_HE, replicas_WE)
    for _ in range(rounds):
        pouring.pour()
    return pouring.bounds()


def fullest_ranks(counts_HE: Ints, placement: Placement) -> Ints:
    """The choices of the fullest rank under `split_balanced` for every batch, int64 [H], exactly: whole
    choices can be split as evenly as fractions, up to the next whole number."""
    pouring = Pouring(counts_HE.astype(np.float64), to_held(placement))
    reached = least = np.zeros(len(counts_HE), dtype=np.int64)
    for number in range(MOST_ROUNDS + 1):
        # The number of rounds doubles between two looks.
        if number & (number - 1) == 0:
            known = pouring.bounds()
            reached, least = (np.ceil(b - 1e-6).astype(np.int64) for b in (known.reached_H, known.needed_H))
            if (reached == least).all():
                return reached
        pouring.pour()
    for at in np.flatnonzero(reached != least):
        ends = np.concatenate([[0], np.cumsum(spread_choices(counts_HE[at][None], placement)[0])])
        reached[at] = np.diff(ends[list(placement.rank_offsets)]).max()
    return reached


def imbalances(counts_HE: Ints, placement: Placement, split: str) -> Floats:
    """The load of the fullest rank over the mean, minus 1, for every batch that has choices. split:
    `balanced` or `even`, with shares in fractions."""
    counts_HE = counts_HE[counts_HE.any(1)]
    if split == "balanced":
        fullest_H = fullest_ranks(counts_HE, placement)
    else:
        replicas_WE = to_held(placement)
        fullest_H = (counts_HE @ (replicas_WE / replicas_WE.sum(0)).T).max(1, initial=0)
    return fullest_H * placement.num_ranks / counts_HE.sum(1) - 1


def least_fullest(load_E: Floats, num_ranks: int, num_slots: int) -> float:
    """A lower bound of the fullest rank's load, wherever replicas are and however they are split: the larger
    of the mean, and of the load of a replica if every slot is given to the expert with the most load per
    replica.

    Example: loads 9, 2, 1 on 2 ranks of 2 slots: 6, the mean, since two replicas of the first expert take 4.5
    each.
    """
    limit, heaviest = min(num_ranks, num_slots), np.sort(load_E)[::-1]
    number_E = np.ones(len(load_E))
    for _ in range(num_slots - len(load_E)):
        expert = int(np.where(number_E < limit, heaviest / number_E, -1.0).argmax())
        number_E[expert] += 1
    return float(max(load_E.sum() / num_ranks, (heaviest / number_E).max()))
