"""The search for placements under the balanced split, judged by many past batches.

The cost of a placement is the load of the fullest rank over the mean that the balanced split reaches, in the
mean over batches, weighted by their tokens. To split all batches again for every change would be too slow. A
batch's fullest rank is determined by one set of crowded ranks (the minimum cut; see `placement.bounds`), and
there are too many sets to consider all. So the search keeps the crowded sets of placements that it has split
already (cutting planes). With them a change costs a small matrix product, and gives a lower bound of the true
cost. After some changes all batches are split. If the placement is not better, it is dropped; its crowded
sets are kept in any case, so that later changes are judged better.

Example: two ranks, loads 6, 3, 3. With replicas of the first expert on both ranks, every batch in which
neither of the other two exceeds half of the load is split evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from imbrex.placement.bounds import bounds
from imbrex.placement.packing import Floats, Held, Ints
from imbrex.placement.refine import count_moves

MOST_SETS = 96
"""The most crowded sets that are kept. With 192 of them a change takes a third longer, and placements are no
better."""
LOOK_COSTS = 30
"""The number of proposals that take as long as splitting all batches once."""
GIVE_UP = 60
"""The number of proposals without an accepted one after which all batches are split."""
PRICES = (1.6e-2, 8e-3, 4e-3, 2e-3, 1e-3)
"""How much an expert that ranks must fetch has to lower the fullest rank, as a share of the mean load, if a
placement is in use. The search goes from the highest price to the lowest: with the last one alone, 31
fetches gained what otherwise 16 do (8 ranks, 72 slots)."""

Change = tuple[list[int], Held]
"""Experts, and the ranks that hold them then, bool [W, experts]."""


def fullness(history_HE: Floats, replicas_WE: Held) -> Floats:
    """The load of the fullest rank over the mean under the balanced split, for every batch: float64 [H]; 1
    without load."""
    mean_H, _ = _means(history_HE, len(replicas_WE))
    return np.maximum(bounds(history_HE, replicas_WE).reached_H / mean_H, 1)


def cost_of(history_HE: Floats, replicas_WE: Held) -> float:
    """The mean of `fullness` over batches, weighted by their load; 1 without load."""
    if not history_HE.any():
        return 1.0
    return float(fullness(history_HE, replicas_WE) @ _means(history_HE, len(replicas_WE))[1])


def _means(history_HE: Floats, num_ranks: int) -> tuple[Floats, Floats]:
    """The mean load of a rank in every batch, and the batch's share of the load of all."""
    total_H = history_HE.sum(1)
    return np.maximum(total_H / num_ranks, 1e-300), total_H / max(float(total_H.sum()), 1e-300)


class Crowded:
    """The state of the search: a placement that is changed step by step, and the crowded sets of every batch.

    base: the placement in use; every expert that a rank must fetch compared with it counts as `price`. best:
    the placement with the lowest true cost so far.
    """

    def __init__(self, history_HE: Floats, replicas_WE: Held, base_WE: Held) -> None:
        self.held, self.base, self.price = replicas_WE.copy(), base_WE, 0.0
        self.load_HE, self.load_EH = history_HE, np.ascontiguousarray(history_HE.T)
        self.mean_H, self.weight_H = _means(history_HE, len(replicas_WE))
        self.sets_AW = np.eye(len(replicas_WE), dtype=bool)
        self.best, self.lowest = replicas_WE, np.inf
        self._judge()
        self.look()

    def _judge(self) -> None:
        """Compute the whole state anew, from `held` and the sets."""
        self.others_WA = (~self.sets_AW).T.astype(np.float32)
        self.inside_EA = self._inside(self.held)
        self.scale_HA = 1 / (self.mean_H[:, None] * self.sets_AW.sum(1))
        self.crowd_HA = (self.load_HE @ self.inside_EA.astype(np.float64)) * self.scale_HA
        self.moves = count_moves(self.base, self.held)
        self.cost = self._cost(self.crowd_HA, self.moves)
        self._find_worst()

    def _inside(self, replicas_WE: Held) -> Held:
        """Whether all replicas of an expert are in a set, bool [E, A]."""
        return (replicas_WE.T.astype(np.float32) @ self.others_WA) == 0

    def _cost(self, crowd_HA: Floats, moves: int) -> float:
        return float(np.maximum(crowd_HA.max(1), 1) @ self.weight_H) + self.price * moves

    def _find_worst(self) -> None:
        self.worst_H = self.crowd_HA.argmax(1)
        self.excess_H = (np.maximum(self.crowd_HA.max(1) - 1, 0) * self.weight_H).cumsum()
        self.several_E = self.held.sum(0) > 1

    def look(self) -> bool:
        """Split all batches by the present placement, and keep their crowded sets. Returns whether it is the
        best placement so far; if so it is kept as `best`."""
        known = bounds(self.load_HE, self.held)
        reached = float(np.maximum(known.reached_H / self.mean_H, 1) @ self.weight_H)
        self._seen = known.crowded_HW[known.needed_H > self.mean_H * (1 + 1e-9)]
        moves, moves_of_best = (count_moves(self.base, new) for new in (self.held, self.best))
        better = reached + self.price * moves <= self.lowest + self.price * moves_of_best
        if better:
            self.best, self.lowest = self.held.copy(), reached
        return better

    def restart(self) -> None:
        """Go back to the best placement, and keep what was learnt about crowded sets. If there are too many
        of them, those that have been crowded least are dropped."""
        self.held = self.best.copy()
        if len(self.sets_AW) + len(self._seen) > MOST_SETS:
            worth_A = np.maximum(self.crowd_HA - 1, 0).sum(0)
            worth_A[self.worst_H] = np.inf
            number = max(MOST_SETS - len(self._seen), MOST_SETS // 2)
            self.sets_AW = self.sets_AW[np.sort(np.argsort(-worth_A, kind="stable")[:number])]
        known = {row.tobytes() for row in self.sets_AW}
        new = {row.tobytes(): row for row in self._seen if row.tobytes() not in known}
        self.sets_AW = np.concatenate([self.sets_AW, *(row[None] for row in new.values())])
        self._judge()

    def propose(self, batch: float, rank: float, expert: float, other: float, kind: float) -> Change | None:
        """Propose a change by which a crowded set of some batch gives an expert to a rank outside of it. The
        expert either gets a further replica, in the slot of an expert that has several, or it changes
        places with an expert that the batch chooses less. The arguments are random numbers from 0 to 1
        that make the choices."""
        at = min(int(self.excess_H.searchsorted(batch * self.excess_H[-1])), len(self.excess_H) - 1)
        replicas_WE, worst = self.held, self.worst_H[at]
        outside, confined = (~self.sets_AW[worst]).nonzero()[0], self.inside_EA[:, worst].nonzero()[0]
        if not len(outside) or not len(confined):
            return None
        to, expert_back = _pick(outside, rank), _pick(confined, expert)
        theirs = (replicas_WE[to] & self.several_E).nonzero()[0]
        if kind < 0.5 and len(theirs):
            return self._replace(to, _pick(theirs, other), expert_back)
        at_home = _pick(replicas_WE[:, expert_back].nonzero()[0], 2 * kind % 1)
        lighter = self.load_HE[at] < self.load_HE[at, expert_back]
        theirs = (replicas_WE[to] & ~replicas_WE[at_home] & lighter).nonzero()[0]
        return self._swap(at_home, expert_back, to, _pick(theirs, other)) if len(theirs) else None

    def _replace(self, rank: int, loss: int, gain: int) -> Change:
        columns = self.held[:, [loss, gain]]
        columns[rank] = False, True
        return [loss, gain], columns

    def _swap(self, one: int, mine: int, two: int, theirs: int) -> Change:
        columns = self.held[:, [mine, theirs]]
        columns[one], columns[two] = (False, True), (True, False)
        return [mine, theirs], columns

    def undo(self) -> list[Change]:
        """Changes that bring one rank, or two ranks that swap, nearer to the base."""
        new, gone = self.held & ~self.base, self.base & ~self.held
        changes = []
        for rank, mine in np.argwhere(new).tolist():
            if self.several_E[mine]:
                changes += [self._replace(rank, mine, back) for back in gone[rank].nonzero()[0].tolist()]
            for other in gone[:, mine].nonzero()[0].tolist():
                back = (gone[rank] & new[other]).nonzero()[0].tolist()
                changes += [self._swap(rank, mine, other, theirs) for theirs in back if rank < other]
        return changes

    def take(self, change: Change, max_moves: int | None) -> bool:
        """Make a change if the cost does not rise or, if fetches have a price, if it falls."""
        experts, columns = change
        base, current = self.base[:, experts], self.held[:, experts]
        moves = self.moves + int((columns & ~base).sum()) - int((current & ~base).sum())
        if max_moves is not None and moves > max(max_moves, self.moves):
            return False
        inside = self._inside(columns)
        gained = inside.astype(np.float64) - self.inside_EA[experts]
        crowd_HA = self.crowd_HA + (self.load_EH[experts].T @ gained) * self.scale_HA
        cost = self._cost(crowd_HA, moves)
        if cost > self.cost - (1e-9 if self.price else 0):
            return False
        self.cost, self.moves, self.crowd_HA = cost, moves, crowd_HA
        self.held[:, experts], self.inside_EA[experts] = columns, inside
        self._find_worst()
        return True


def _pick(choices: Ints, where: float) -> int:
    return int(choices[int(where * len(choices))])


def harden(
    history_HE: Floats,
    replicas_WE: Held,
    *,
    proposals: int,
    prices: Sequence[float] = (0.0,),
    max_moves: int | None = None,
) -> Held:
    """The best placement that the search finds, with as many slots on every rank, and at least as good for
    the balanced split over past batches. Deterministic in all arguments.

    history_HE: tokens of every expert in H past batches. proposals: the number of changes to try. prices: how
    much an expert that a rank must fetch has to lower the fullest rank, as shares of the mean; one search for
    each. max_moves: the most fetches.
    """
    history_HE = history_HE[history_HE.any(1)]
    if len(replicas_WE) < 2 or not len(history_HE):
        return replicas_WE
    state = Crowded(history_HE, replicas_WE, replicas_WE)
    numbers = np.random.default_rng(0).random((proposals, 5)).tolist()
    for place, price in enumerate(prices):
        state.price = price
        _search(state, numbers, proposals * (len(prices) - 1 - place) // len(prices), max_moves)
    if state.price:
        _take_back(state)
    return state.best


def _search(state: Crowded, numbers: list[list[float]], left: int, max_moves: int | None) -> None:
    """Walk and start again from the best placement, until only `left` random numbers are left."""
    step = 4
    while len(numbers) > left and state.lowest > 1 + 1e-9:
        state.restart()
        if _walk(state, numbers, step, max_moves):
            del numbers[max(len(numbers) - LOOK_COSTS, left) :]
            step = min(2 * step, 64) if state.look() else max(step // 2, 1)


def _walk(state: Crowded, numbers: list[list[float]], step: int, max_moves: int | None) -> int:
    """Propose changes until `step` of them were taken: how many were."""
    steps = 0
    for _ in range(GIVE_UP):
        if not numbers or steps == step:
            break
        change = state.propose(*numbers.pop())
        steps += change is not None and state.take(change, max_moves)
    return steps


def _take_back(state: Crowded) -> None:
    """Undo fetches that later ones have made useless."""
    while True:
        state.restart()
        if not any(state.take(change, None) for change in state.undo()) or not state.look():
            return
