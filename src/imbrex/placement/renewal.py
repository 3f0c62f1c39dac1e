"""Plans for whole models from their statistics, for the replica split that will be used, from an old plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from imbrex.contracts import Placement
from imbrex.placement.history import LoadHistory
from imbrex.placement.moves import keep_in_place
from imbrex.placement.packing import Floats, Held, pack, replicate
from imbrex.placement.planner import capacity_of, check_nodes, search, to_held, to_placement
from imbrex.placement.refine import count_moves, refine
from imbrex.placement.robust import Confined, harden

PROPOSALS = 4000
"""Random moves tried for a layer under the balanced split; 26 real layers of 64 experts settled by 1500."""
MOST_BATCHES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The target of a plan. slots: of all ranks together, or of every rank. split: `balanced` or `even`.
    decay: an iteration weighs this times the next one (under `even`). Nodes and groups as in `plan_layers`.
    max_moves: experts that ranks may have to fetch in a layer, compared with the old plan."""

    num_ranks: int
    slots: int | Sequence[int]
    num_nodes: int = 1
    num_groups: int = 1
    split: str = "balanced"
    decay: float = 1.0
    max_moves: int | None = None


def plan_history(
    history: LoadHistory, target: Target, old: Mapping[int, Placement] | None = None
) -> dict[int, Placement]:
    """A placement for every layer of the statistics, by its number.

    old: the plan to start from; experts that stay on a rank keep their slot. With `target.max_moves`, the
    search starts there and stops at so many fetches, else it is free.
    Raises ValueError where the numbers do not fit or the old plan is of another shape or lacks a layer.
    """
    if target.split not in ("balanced", "even"):
        raise ValueError(f"plan: split {target.split!r}; use balanced or even")
    if target.max_moves is not None and (target.max_moves < 0 or old is None):
        raise ValueError("plan: max_moves is a number from 0 up, counted from an old plan; give both")
    capacity = capacity_of(target.slots, target.num_ranks, history.num_experts)
    check_nodes(history.num_experts, capacity, target.num_nodes, target.num_groups)
    load_LE = history.load(target.decay)
    planned = {}
    for at, layer in enumerate(history.layers):
        before = None if old is None else _check_old(old, layer, capacity, history.num_experts)
        start = None if before is None else to_held(before)
        held = plan_layer(history.counts_ILE[:, at], load_LE[at], capacity, target, start)
        planned[layer] = to_placement(held) if before is None else keep_in_place(before, held)
    return planned


def plan_layer(
    counts_IE: np.ndarray, load_E: Floats, capacity_W: Sequence[int], target: Target, old: Held | None = None
) -> Held:
    """One layer. counts_IE: tokens per expert of past iterations; load_E: their sum, weighted."""
    batches = _thin(np.asarray(counts_IE, dtype=np.float64))
    if old is not None and target.max_moves is not None:
        if target.split == "even":
            return refine(load_E, old, old=old, max_moves=target.max_moves)
        if target.num_nodes > 1:
            raise ValueError("plan: max_moves with the balanced split works on one node; use split even")
        return harden(batches, old, proposals=PROPOSALS, max_moves=target.max_moves)
    nodes, groups = target.num_nodes, target.num_groups
    held = search(load_E, capacity_W, num_nodes=nodes, num_groups=groups)
    if target.split == "even":
        return held
    if nodes == 1:
        held = min(
            (held, pack(load_E, _once_each(load_E, sum(capacity_W), len(capacity_W)), capacity_W)),
            key=lambda start: Confined(batches, start).cost,
        )
    ranks = len(capacity_W) // nodes
    for node in range(nodes):
        rows = slice(node * ranks, (node + 1) * ranks)
        experts = np.flatnonzero(held[rows].any(0))
        block = held[rows][:, experts]
        held[rows, experts] = harden(batches[:, experts], block, proposals=PROPOSALS)
    return held


def moves_between(old: Mapping[int, Placement], new: Mapping[int, Placement]) -> int:
    """Experts that ranks must fetch, over the layers of the new plan."""
    return sum(count_moves(to_held(old[layer]), to_held(new[layer])) for layer in new)


def _once_each(load_E: Floats, num_slots: int, limit: int) -> np.ndarray:
    """Replicas as evenly as they go, the most wanted experts first: many experts that can shift a little."""
    extra = num_slots - len(load_E)
    if extra > len(load_E) or limit < 2:
        return replicate(load_E, num_slots, limit)
    counts = np.ones(len(load_E), dtype=np.int64)
    counts[np.argsort(-load_E, kind="stable")[:extra]] = 2
    return counts


def _thin(batches_IE: Floats) -> Floats:
    """Sum neighbouring batches until there are at most so many."""
    if len(batches_IE) <= MOST_BATCHES:
        return batches_IE
    edges = np.linspace(0, len(batches_IE), MOST_BATCHES + 1).astype(int)[:-1]
    return np.add.reduceat(batches_IE, edges, axis=0)


def _check_old(
    old: Mapping[int, Placement], layer: int, capacity: tuple[int, ...], num_experts: int
) -> Placement:
    if layer not in old:
        raise ValueError(f"plan: the old plan has no layer {layer}")
    placement = old[layer]
    slots = tuple(int(n) for n in np.diff(placement.rank_offsets))
    if slots != capacity or placement.num_experts != num_experts:
        raise ValueError(
            f"plan: layer {layer} of the old plan has {placement.num_experts} experts in {slots} slots, not "
            f"{num_experts} in {capacity}; leave --from out to plan anew"
        )
    return placement
