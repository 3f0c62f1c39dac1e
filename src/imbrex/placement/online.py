"""The decisions of an online balancer, pure: which layers are due, and what one layer's next placement is.

Everything here depends only on counts that all ranks know, so every rank decides the same without asking.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from imbrex.contracts import Placement
from imbrex.placement.moves import keep_in_place
from imbrex.placement.packing import Floats, Held, Ints
from imbrex.placement.planner import to_held
from imbrex.placement.refine import refine
from imbrex.placement.robust import PRICES, cost_of, fullness, harden


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How often and how much an online balancer changes.

    layer_updates_per_iter: layers looked at in an iteration, in turn. decay: an iteration weighs this times
    the next one. window: past iterations remembered. threshold: a layer whose fullest rank is less than this
    above the mean in its iterations is left alone; so is one that would gain less than half of it.
    max_moves: experts that ranks fetch in one update of a layer. split: the replica split in use. proposals:
    moves tried. sure: standard errors that the gain is above on counts that the placement was not made from,
    so that a load that only wavers moves nothing; 0 moves for any gain on those it was made from.
    """

    layer_updates_per_iter: int = 1
    decay: float = 0.8
    window: int = 16
    threshold: float = 0.01
    max_moves: int = 8
    split: str = "balanced"
    proposals: int = 1500
    sure: float = 4.0

    def __post_init__(self) -> None:
        for name, least in (("layer_updates_per_iter", 0), ("window", 1), ("max_moves", 1), ("proposals", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"balancer: {name} is {getattr(self, name)}; use {least} or more")
        if not 0 < self.decay <= 1 or not self.threshold >= 0:
            raise ValueError(
                f"balancer: decay {self.decay} and threshold {self.threshold}; use a decay above 0, up to 1, "
                "and a threshold from 0 up"
            )
        if not self.sure >= 0:
            raise ValueError(f"balancer: sure {self.sure}; use a number from 0 up")
        if self.split not in ("balanced", "even"):
            raise ValueError(f"balancer: split {self.split!r}; use balanced or even")


def layers_due(iteration: int, num_layers: int, per_iteration: int) -> list[int]:
    """Layers looked at in an iteration: a cycle goes through all, and layers of one turn lie far apart.

    Example: 5 layers, 2 an iteration: [0, 3], [1, 4], [2], [0, 3], ... A cycle is ceil(5 / 2) iterations.
    """
    if not per_iteration or not num_layers:
        return []
    cycle = math.ceil(num_layers / per_iteration)
    return list(range(iteration % cycle, num_layers, cycle))


class LoadWindow:
    """The last iterations' counts of one layer, weighted by age."""

    def __init__(self, num_experts: int, pace: Pace) -> None:
        self.num_experts, self.decay = num_experts, pace.decay
        self._recent: deque[Ints] = deque(maxlen=pace.window)

    def add(self, counts: Ints) -> None:
        """Choices per expert of one iteration, of every rank's tokens [W, E] or of all together [E], int64;
        ignored where there are none."""
        if counts.shape[-1:] != (self.num_experts,) or counts.ndim > 2 or counts.min() < 0:
            raise ValueError(
                f"balancer: counts of shape {counts.shape}; give {self.num_experts} numbers from 0 up"
            )
        if counts.any():
            self._recent.append(counts)

    def __len__(self) -> int:
        return len(self._recent)

    def recent_HE(self) -> Floats:
        return weigh(self._recent, self.decay)

    def whole_HE(self) -> Floats:
        return weigh(self._recent, self.decay, apart=False)


CHOICES_A_PART = 4
"""Choices an expert that a part of an iteration has at least. Small batches teach what large ones hide:
planned from 64 tokens of each of 4 ranks, the next iteration's ranks differ by half of what they do when
planned from the 256 together. Parts of fewer choices are noise, and would never let a layer rest."""


MOST_PARTS = 64
"""The parts of a window at most; with more a plan takes longer and is no better."""
LEAST_PARTS = 8
"""A placement is made from and judged by so many, or as many as the window has: fewer do not show chance."""


def weigh(recent: Iterable[Ints], decay: float, *, apart: bool = True) -> Floats:
    """Parts of iterations that had choices, oldest first, weighted by age, float64 [H, E]: what single ranks,
    or neighbours together, wanted.

    recent: iterations, [W, E] or [E]. apart: false for whole iterations, as the split sees them.
    Example: 2 ranks, 8 experts, 40 choices of each rank: two parts.
    """
    known = [np.atleast_2d(counts) for counts in recent if counts.any()]
    if not known:
        return np.zeros((0, 0))
    limit = max(MOST_PARTS // len(known), 1) if apart else 1
    parts = [_parts(counts, limit) for counts in known]
    ages = range(len(parts) - 1, -1, -1)
    weighted = [decay**age * parts_PE for age, parts_PE in zip(ages, parts, strict=True)]
    return np.concatenate(weighted, dtype=np.float64)


def _parts(counts_WE: Ints, max_parts: int) -> Ints:
    ranks, experts = counts_WE.shape
    number = max(1, min(ranks, max_parts, int(counts_WE.sum()) // (CHOICES_A_PART * experts)))
    firsts = np.arange(number) * ranks // number
    return np.add.reduceat(counts_WE, firsts, axis=0)


def renew(
    recent_HE: Floats, placement: Placement, pace: Pace, *, whole_HE: Floats | None = None
) -> Placement | None:
    """A better placement for what came lately, at most `pace.max_moves` fetches away; `None` where the layer
    is balanced, or would gain too little to move for.

    It is made from every other part of what came and judged by the parts between. whole_HE: the iterations
    that the parts are of, in which it must pay as well, though it be half as sure: there are few of them.
    """
    wholes_HE = recent_HE if whole_HE is None else whole_HE
    replicas_WE = to_held(placement)
    # After a change of the load the whole window speaks of both, and is sure of neither.
    enough = pace.sure and len(recent_HE) - len(recent_HE) * 3 // 4 >= 2 * LEAST_PARTS
    for quarters in (3, 0) if enough else (0,):
        judged_HE, whole_HE = (of[len(of) * quarters // 4 :] for of in (recent_HE, wholes_HE))
        if predicted(whole_HE, replicas_WE, pace.split) < pace.threshold:
            continue
        new = _renewed(judged_HE, replicas_WE, pace)
        if new is not None and _pays(whole_HE, replicas_WE, new, pace, pace.sure / 2):
            return keep_in_place(placement, new)
    return None


def _renewed(recent_HE: Floats, replicas_WE: Held, pace: Pace) -> Held | None:
    if predicted(recent_HE, replicas_WE, pace.split) < pace.threshold:
        return None
    if pace.sure and len(recent_HE) < min(LEAST_PARTS, pace.window):
        return None
    apart = pace.sure and len(recent_HE) > 1
    seen_HE, unseen_HE = (recent_HE[::2], recent_HE[1::2]) if apart else (recent_HE, recent_HE)
    if pace.split == "balanced":
        limit = pace.max_moves
        new = harden(seen_HE, replicas_WE, proposals=pace.proposals, prices=PRICES, max_moves=limit)
    else:
        new = refine(seen_HE.sum(0), replicas_WE, old=replicas_WE, max_moves=pace.max_moves)
    return new if _pays(unseen_HE, replicas_WE, new, pace, pace.sure) else None


def _pays(unseen_HE: Floats, replicas_WE: Held, new_WE: Held, pace: Pace, sure: float) -> bool:
    """Whether a placement is better by half the threshold on what it was not made from, and by more than
    chance would make it."""
    if (replicas_WE == new_WE).all():
        return False
    gain_H = _fullness(unseen_HE, replicas_WE, pace.split) - _fullness(unseen_HE, new_WE, pace.split)
    weight_H = unseen_HE.sum(1) / unseen_HE.sum()
    gain = float(gain_H @ weight_H)
    chance = math.sqrt(float(((gain_H - gain) ** 2) @ weight_H**2))
    return gain >= max(pace.threshold / 2, sure * chance)


def _fullness(history_HE: Floats, replicas_WE: Held, split: str) -> Floats:
    if split == "balanced":
        return fullness(history_HE, replicas_WE)
    loads_HW = history_HE @ (replicas_WE / replicas_WE.sum(0)).T
    return loads_HW.max(1) / np.maximum(loads_HW.mean(1), 1e-300)


def predicted(recent_HE: Floats, replicas_WE: Held, split: str) -> float:
    """Load of the fullest rank over the mean, minus 1: the mean over parts under the balanced split, of their
    sum under the even one; 0 without load."""
    if split == "balanced":
        return cost_of(recent_HE, replicas_WE) - 1
    return float(_fullness(recent_HE.sum(0)[None], replicas_WE, split)[0]) - 1 if recent_HE.any() else 0.0


class OnlinePlanner:
    """The placements of all layers, renewed in turn: the online balancer without weights."""

    def __init__(self, placements: Sequence[Placement], pace: Pace) -> None:
        self.placements, self.pace, self.iteration = list(placements), pace, 0
        self.windows = [LoadWindow(p.num_experts, pace) for p in self.placements]

    def step(self, counts_LWE: Sequence[Ints]) -> dict[int, Placement]:
        """Counts of one iteration, int64 [L, W, E] or [L, E], to the placements that change, by place of the
        layer."""
        for window, counts in zip(self.windows, counts_LWE, strict=True):
            window.add(counts)
        changed = {}
        for layer in layers_due(self.iteration, len(self.placements), self.pace.layer_updates_per_iter):
            if len(self.windows[layer]):
                window = self.windows[layer]
                recent_HE, whole_HE = window.recent_HE(), window.whole_HE()
                new = renew(recent_HE, self.placements[layer], self.pace, whole_HE=whole_HE)
                if new is not None:
                    self.placements[layer] = changed[layer] = new
        self.iteration += 1
        return changed
