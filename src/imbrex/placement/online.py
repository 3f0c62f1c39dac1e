"""Decisions of the online balancer as pure functions: which layers are due, and a layer's next placement.

They depend only on counts that all ranks have, so every rank decides the same without communication.
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
    """The settings of an online balancer: how often it looks at a layer, and how much it may change.

    layer_updates_per_iter: the number of layers that are looked at in an iteration, in turn.
    decay: the weight of an iteration relative to the next one.
    window: the number of past iterations that count.
    threshold: a layer is left alone if its fullest rank has less than this above the mean (0.01 is 1 %), or
    if a new placement would gain less than half of it.
    max_moves: the most experts that ranks fetch in one update of a layer.
    split: how choices are shared among replicas, `balanced` or `even`.
    proposals: the number of changes that the search tries.
    sure: how many standard errors the gain must be above 0, on counts that the placement was not made from.
    So a load that only fluctuates moves nothing. 0 accepts any gain on the counts it was made from.
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
    """The layers that are looked at in an iteration. A cycle goes through all layers, and the layers of one
    iteration are far apart.

    Example: 5 layers, 2 an iteration: [0, 3], [1, 4], [2], [0, 3], ... A cycle has ceil(5 / 2) iterations.
    """
    if not per_iteration or not num_layers:
        return []
    cycle = math.ceil(num_layers / per_iteration)
    return list(range(iteration % cycle, num_layers, cycle))


class LoadWindow:
    """The counts of the last iterations of one layer, from which its next placement is made."""

    def __init__(self, num_experts: int, pace: Pace) -> None:
        self.num_experts, self.decay = num_experts, pace.decay
        self._recent: deque[Ints] = deque(maxlen=pace.window)

    def add(self, counts: Ints) -> None:
        """Add the choices of every expert in one iteration, int64: by rank [W, E], or of all ranks together
        [E]. An iteration without choices is ignored. Raises ValueError for another shape or negative
        counts."""
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
"""The least choices an expert, in the mean, in a part of an iteration. Small parts show fluctuations that
large ones hide: planned from the 64 tokens of each of 4 ranks, the ranks' loads in the next iteration
differ half as much as if planned from the 256 tokens together. Parts with fewer choices are mostly noise,
by which a layer would always be moved."""


MOST_PARTS = 64
"""The most parts in a window. With more of them a plan takes longer and is no better."""
LEAST_PARTS = 8
"""The least parts that a placement is made from, and judged by, if the window has as many: fewer do not show
how much loads fluctuate."""


def weigh(recent: Iterable[Ints], decay: float, *, apart: bool = True) -> Floats:
    """The choices of every expert in parts of iterations, oldest first, weighted by age: float64 [H, E]. A
    part has the choices of one rank, or of several neighbouring ranks.

    recent: the counts of iterations, [W, E] or [E]. apart: whether to divide iterations into parts; without,
    each iteration is one.

    Example: 2 ranks, 8 experts, 40 choices on each rank: two parts.
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
    """A better placement for recent loads, or `None` if the layer is balanced already or would gain too
    little. It needs at most `pace.max_moves` fetches.

    The placement is made from every other part of the window, and judged by the parts between. recent_HE:
    from `weigh`. whole_HE: the same by whole iterations. There the new placement must be better too, with
    half the required standard errors, because they are few.
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
    """Whether a new placement is better on batches that it was not made from, by half the threshold and by
    more than chance would make it."""
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
    """The imbalance that is expected of a placement: the load of the fullest rank over the mean, minus 1; 0
    without load. Under the balanced split it is the mean over parts, under the even split that of their
    sum."""
    if split == "balanced":
        return cost_of(recent_HE, replicas_WE) - 1
    return float(_fullness(recent_HE.sum(0)[None], replicas_WE, split)[0]) - 1 if recent_HE.any() else 0.0


class OnlinePlanner:
    """The online balancer without a model: placements of all layers, renewed in turn from counts."""

    def __init__(self, placements: Sequence[Placement], pace: Pace) -> None:
        self.placements, self.pace, self.iteration = list(placements), pace, 0
        self.windows = [LoadWindow(p.num_experts, pace) for p in self.placements]

    def step(self, counts_LWE: Sequence[Ints]) -> dict[int, Placement]:
        """The placements that change after an iteration, by index of the layer. counts_LWE: choices of every
        expert by layer, int64 [L, W, E] or [L, E]."""
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
