"""Larger steps for the balanced split: for an expert in a crowded set of ranks, all slots that could take a
replica of it are tried at once.

The load of the fullest rank does not see changes elsewhere, and a crowded set of ranks is relieved only as a
whole. So the search lowers another function: for every batch the norm of order 16 of the ranks' loads over
their mean, and over batches the sum of these norms' fourth powers, in which bad batches count most.

If all ranks of an expert are among a batch's fullest, it gets a slot on a rank that is not: as a further
replica, in the slot of an expert that has several, or in exchange for another expert. For each such change
the two experts' loads are split anew, and all others stay. So the gain is that of a split that exists. (The
bounds of `imbrex.placement.robust` promise too much, but see changes that this search does not.) The best
change is made if it lowers the function. Then the experts that share a rank with the two are split anew.
"""

from __future__ import annotations

import numpy as np

from imbrex.placement.packing import Floats, Held, Ints

DOUBLINGS, EMPHASIS = 4, 2
"""The norm has the order 2^DOUBLINGS, and batches are summed by its power 2^EMPHASIS. With this power the
worst layers on unseen batches come out 0.04 lower than with the norm itself (64 ranks of 128 slots)."""
MOST_TRIED = 16
"""The most slots that are tried for an expert at once. With all of some 120, a step takes seven times as
long."""
LEVEL = 1e-4
"""Ranks whose load is this close to the fullest, as a share of the mean, count as equally full."""
GIVE_UP = 60
"""The search ends after this many experts in a row for which no change gained."""
ROUNDS = 3
"""The number of rounds over all experts at the start. After a change there is one, over the experts
near it."""


class Shares:
    """A placement that is changed step by step, and a split of every batch; loads are in units of the mean
    rank's.

    ranks_EX: the ranks of every expert, padded with the number of ranks. takes_EHX: the load that each of
    them takes.
    """

    def __init__(self, history_HE: Floats, replicas_WE: Held) -> None:
        self.num_ranks, self.held = len(replicas_WE), replicas_WE.copy()
        total_H = history_HE.sum(1)
        self.weight_H = total_H / total_H.sum()
        self.load_EH = np.ascontiguousarray((history_HE * (self.num_ranks / total_H)[:, None]).T)
        self.number_E = replicas_WE.sum(0)
        self.ranks_EX = np.full((len(self.load_EH), int(self.number_E.max()) + 1), self.num_ranks)
        for expert, ranks in enumerate(replicas_WE.T):
            self.ranks_EX[expert, : self.number_E[expert]] = ranks.nonzero()[0]
        real_EX = self.ranks_EX < self.num_ranks
        self.takes_EHX = (self.load_EH / self.number_E[:, None])[:, :, None] * real_EX[:, None]
        # One rank more than there are: full, it stands in where an expert has fewer ranks than others.
        self.loads_WH = np.full((self.num_ranks + 1, len(history_HE)), np.inf)
        self.loads_WH[:-1] = (replicas_WE / self.number_E) @ self.load_EH
        for _ in range(ROUNDS):
            self.split_anew(range(len(self.load_EH)))
        self.settle()

    def split_anew(self, experts: Ints | range) -> None:
        """Make the loads of an expert's ranks even, for one expert after the other."""
        for expert in experts:
            number = self.number_E[expert]
            if number > 1:
                ranks, takes_HX = self.ranks_EX[expert, :number], self.takes_EHX[expert, :, :number]
                others_HX = self.loads_WH[ranks].T - takes_HX
                takes_HX[:] = fill(others_HX, self.load_EH[expert])
                self.loads_WH[ranks] = (others_HX + takes_HX).T

    def settle(self) -> None:
        """Compute the function that is lowered, and its parts, from the loads."""
        self.powers_WH = np.zeros_like(self.loads_WH)
        self.powers_WH[:-1] = _power(self.loads_WH[:-1])
        self.sum_H = self.powers_WH.sum(0)
        self.cost = float(self._stand_in(self.sum_H))
        self.fullest_H = self.loads_WH[:-1].max(0)
        self.reached = float(np.maximum(self.fullest_H, 1) @ self.weight_H)
        self.excess_H = (np.maximum(self.fullest_H - 1, 0) * self.weight_H).cumsum()

    def _stand_in(self, sums: Floats) -> Floats:
        for _ in range(DOUBLINGS - EMPHASIS):
            sums = np.sqrt(sums)
        return sums @ self.weight_H

    def _lower(self, batch: int) -> Held:
        return self.loads_WH[:-1, batch] < self.fullest_H[batch] - LEVEL

    def confined(self, batch: int) -> Ints:
        """The experts with load in a batch that only its fullest ranks hold."""
        lower_W = self._lower(batch)
        return np.flatnonzero((self.load_EH[:, batch] > 0) & ~self.held[lower_W].any(0))

    def slots_below(self, batch: int, expert: int, back_to: int | None) -> tuple[Ints, Ints]:
        """The slots that `expert` could take on ranks that are not full in a batch: the experts in them, and
        their indices among these experts' ranks. back_to: a rank of `expert`, to which they would move in
        exchange."""
        may_W = np.append(self._lower(batch) & ~self.held[:, expert], False)
        may_E = self.number_E > 1 if back_to is None else ~self.held[back_to]
        may_E[expert] = False
        experts, places = np.nonzero(may_W[self.ranks_EX] & may_E[:, None])
        return experts, places

    def try_all(self, expert: int, losers: Ints, places: Ints, back_to: int | None) -> Floats:
        """The function that is lowered, after each of C changes: `expert` takes the slot of `losers` at
        `places`."""
        own = self.ranks_EX[expert, : self.number_E[expert]]
        own_HK = self.takes_EHX[expert, :, : len(own)]
        before_CX, every = self.ranks_EX[losers], np.arange(len(losers))
        to_C, takes_CHX = before_CX[every, places], self.takes_EHX[losers]
        others_CHX = self.loads_WH[before_CX].transpose(0, 2, 1) - takes_CHX
        alone_CH = others_CHX[every, :, places]
        shared_CXK = (before_CX[:, :, None] == own).astype(np.float64)
        others_CHX = others_CHX - own_HK @ shared_CXK.transpose(0, 2, 1)
        rest_HK, after_CX = self.loads_WH[own].T - own_HK, before_CX.copy()
        after_CX[every, places] = self.num_ranks if back_to is None else back_to
        others_CHX[every, :, places] = np.inf if back_to is None else rest_HK[:, own == back_to].T
        new_CHX = fill(others_CHX, self.load_EH[losers])
        stays_K = own != (-1 if back_to is None else back_to)
        both_CXK = after_CX[:, :, None] == own[stays_K]
        rest_CHK = rest_HK[:, stays_K] + new_CHX @ both_CXK - takes_CHX @ shared_CXK[:, :, stays_K]
        rest_CHK = np.concatenate([rest_CHK, alone_CH[:, :, None]], axis=2)
        level_CHK = rest_CHK + fill(rest_CHK, self.load_EH[expert])
        counted_CX = (after_CX < self.num_ranks) & ~both_CXK.any(2)
        theirs_CHX = np.where(counted_CX[:, None], others_CHX + new_CHX, 0.0)
        gone_CHX = np.where(counted_CX[:, None], self.powers_WH[after_CX].transpose(0, 2, 1), 0.0)
        change_CH = (_power(theirs_CHX) - gone_CHX).sum(2) + _power(level_CHK).sum(2)
        change_CH -= self.powers_WH[own[stays_K]].sum(0) + self.powers_WH[to_C]
        return self._stand_in(np.maximum(self.sum_H + change_CH, 0.0))

    def change(self, expert: int, loser: int, place: int, back_to: int | None) -> None:
        """Make a change, and split the experts near it anew."""
        to = int(self.ranks_EX[loser, place])
        for mover, old, new in ((loser, to, back_to), (expert, back_to, to)):
            ranks = [rank for rank in self.ranks_of(mover) if rank != old]
            self._hold(mover, ranks + ([] if new is None else [new]))
        near_WE = self.held[[*self.ranks_of(loser), *self.ranks_of(expert)]]
        self.split_anew(np.array([loser, expert, *np.flatnonzero(near_WE.any(0))]))
        self.settle()

    def ranks_of(self, expert: int) -> list[int]:
        return self.ranks_EX[expert, : self.number_E[expert]].tolist()

    def _hold(self, expert: int, ranks: list[int]) -> None:
        """Put an expert on these ranks. The first takes all its choices for now."""
        old = self.ranks_of(expert)
        self.loads_WH[old] -= self.takes_EHX[expert, :, : len(old)].T
        self.held[old, expert], self.held[ranks, expert] = False, True
        if len(ranks) > self.ranks_EX.shape[1]:
            self.ranks_EX = np.pad(self.ranks_EX, ((0, 0), (0, 1)), constant_values=self.num_ranks)
            self.takes_EHX = np.pad(self.takes_EHX, ((0, 0), (0, 0), (0, 1)))
        self.number_E[expert] = len(ranks)
        self.ranks_EX[expert, : len(ranks)], self.ranks_EX[expert, len(ranks) :] = ranks, self.num_ranks
        self.takes_EHX[expert] = 0.0
        self.takes_EHX[expert, :, 0] = self.load_EH[expert]
        self.loads_WH[ranks[0]] += self.load_EH[expert]


def fill(others: Floats, load: Floats) -> Floats:
    """The load that each of some ranks takes, so that all that take any are level afterwards.

    others: the ranks' loads before, [..., H, X], infinite where there is no rank. load: what is distributed,
    [..., H].

    Example: 4 to ranks that have 1, 2 and 9: 2.5, 1.5 and 0, level at 3.5.
    """
    sums = np.sort(others, axis=-1).cumsum(-1)
    # The level over the k lowest falls with k until the next one stands above it, then rises.
    level = ((load[..., None] + sums) / np.arange(1, sums.shape[-1] + 1)).min(-1, keepdims=True)
    return np.maximum(level - others, 0.0)


def _power(loads: Floats) -> Floats:
    for _ in range(DOUBLINGS):
        loads = loads * loads
    return loads


def descend(history_HE: Floats, replicas_WE: Held, *, steps: int) -> Held:
    """A placement with as many slots on every rank, whose fullest ranks have no more load in the mean over
    batches. Deterministic in all arguments.

    history_HE: tokens of every expert in H past batches. steps: the most changes.
    """
    history_HE = history_HE[history_HE.any(1)]
    if len(replicas_WE) < 2 or not len(history_HE):
        return replicas_WE
    state, draw = Shares(history_HE, replicas_WE), np.random.default_rng(0)
    best, lowest, failures = replicas_WE, state.reached, 0
    for _ in range(steps):
        if state.excess_H[-1] < 1e-9 or failures == GIVE_UP:
            break
        failures += 1
        batch = int(state.excess_H.searchsorted(draw.random() * state.excess_H[-1]))
        batch = min(batch, len(state.excess_H) - 1)
        crowded = state.confined(batch)
        if not len(crowded):  # the split is not even yet
            state.split_anew(range(history_HE.shape[1]))
            state.settle()
            continue
        expert = int(draw.choice(crowded))
        back_to = None if draw.random() < 0.5 else int(draw.choice(state.ranks_of(expert)))
        losers, places = state.slots_below(batch, expert, back_to)
        if not len(losers):
            continue
        some = draw.permutation(len(losers))[:MOST_TRIED]
        costs_C = state.try_all(expert, losers[some], places[some], back_to)
        at = int(costs_C.argmin())
        if costs_C[at] < state.cost * (1 - 1e-7):
            state.change(expert, int(losers[some[at]]), int(places[some[at]]), back_to)
            failures = 0
            if state.reached < lowest:
                best, lowest = state.held.copy(), state.reached
    return best
