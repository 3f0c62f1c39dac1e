"""What an online balancer decides, pure: which layers are due, and what one layer's next placement is.

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
from imbrex.placement.packing import Floats, Held, Ints, rank_loads
from imbrex.placement.planner import to_held
from imbrex.placement.refine import refine
from imbrex.placement.robust import Confined, harden


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How often and how much an online balancer changes.

    layer_updates_per_iter: layers looked at in an iteration, in turn. decay: an iteration weighs this times
    the next one. window: past iterations remembered. threshold: a layer whose fullest rank is less than this
    above the mean is left alone; so is one that would gain less than half of it. max_moves: experts that
    ranks fetch in one update of a layer. split: the replica split in use. proposals: moves tried.
    """

    layer_updates_per_iter: int = 1
    decay: float = 0.9
    window: int = 16
    threshold: float = 0.01
    max_moves: int = 8
    split: str = "balanced"
    proposals: int = 1500

    def __post_init__(self) -> None:
        for name, least in (("layer_updates_per_iter", 0), ("window", 1), ("max_moves", 1), ("proposals", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"balancer: {name} is {getattr(self, name)}; use {least} or more")
        if not 0 < self.decay <= 1 or not self.threshold >= 0:
            raise ValueError(
                f"balancer: decay {self.decay} and threshold {self.threshold}; use a decay above 0, up to 1, "
                "and a threshold from 0 up"
            )
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
    """The last iterations' counts of one layer, and their decayed sum."""

    def __init__(self, num_experts: int, pace: Pace) -> None:
        self.num_experts, self.decay = num_experts, pace.decay
        self._recent: deque[Ints] = deque(maxlen=pace.window)

    def add(self, counts_E: Ints) -> None:
        """Choices per expert of one iteration over all ranks, int64 [E]; ignored where there are none."""
        if counts_E.shape != (self.num_experts,) or counts_E.min() < 0:
            raise ValueError(
                f"balancer: counts of shape {counts_E.shape}; give {self.num_experts} numbers from 0 up"
            )
        if counts_E.any():
            self._recent.append(counts_E)

    def __len__(self) -> int:
        return len(self._recent)

    def recent_HE(self) -> Floats:
        return weigh(self._recent, self.decay)


def weigh(recent: Iterable[Ints], decay: float) -> Floats:
    """Iterations that had choices, oldest first, each weighted by its age, float64 [H, E]."""
    counts = [counts_E for counts_E in recent if counts_E.any()]
    if not counts:
        return np.zeros((0, 0))
    weights_H = decay ** np.arange(len(counts))[::-1]
    return weights_H[:, None] * np.array(counts, dtype=np.float64)


def renew(recent_HE: Floats, placement: Placement, pace: Pace) -> Placement | None:
    """A better placement for what came lately, at most `pace.max_moves` fetches away; `None` where the layer
    is balanced, or would gain too little to move for."""
    held = to_held(placement)
    before = predicted(recent_HE, held, pace.split)
    if before < pace.threshold:
        return None
    if pace.split == "balanced":
        found = harden(recent_HE, held, proposals=pace.proposals, max_moves=pace.max_moves)
    else:
        found = refine(recent_HE.sum(0), held, old=held, max_moves=pace.max_moves)
    if before - predicted(recent_HE, found, pace.split) < pace.threshold / 2:
        return None
    return keep_in_place(placement, found)


def predicted(recent_HE: Floats, held_WE: Held, split: str) -> float:
    """Load of the fullest rank over the mean, minus 1: the mean over iterations under the balanced split, of
    their sum under the even one."""
    if split == "balanced":
        return Confined(recent_HE, held_WE).cost - 1
    loads = rank_loads(recent_HE.sum(0), held_WE)
    return float(loads.max() / loads.mean() - 1) if loads.any() else 0.0


class OnlinePlanner:
    """The placements of all layers, renewed in turn: the online balancer without weights."""

    def __init__(self, placements: Sequence[Placement], pace: Pace) -> None:
        self.placements, self.pace, self.iteration = list(placements), pace, 0
        self.windows = [LoadWindow(p.num_experts, pace) for p in self.placements]

    def step(self, counts_LE: Ints) -> dict[int, Placement]:
        """Counts of one iteration, int64 [L, E], to the placements that change, by place of the layer."""
        for window, counts_E in zip(self.windows, counts_LE, strict=True):
            window.add(counts_E)
        changed = {}
        for layer in layers_due(self.iteration, len(self.placements), self.pace.layer_updates_per_iter):
            if len(self.windows[layer]):
                new = renew(self.windows[layer].recent_HE(), self.placements[layer], self.pace)
                if new is not None:
                    self.placements[layer] = changed[layer] = new
        self.iteration += 1
        return changed
