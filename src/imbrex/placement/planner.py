"""The offline planner for the even replica split: which experts get replicas, and where all slots are, so
that the load of the fullest rank is as low as possible.

Small layers are solved exactly. For the others, a greedy placement is improved by exchanges (`refine`); while
the fullest rank is more than 0.1 % above the mean, the placement is changed at random and improved again. The
result is deterministic. With several nodes, groups of experts are packed on nodes first, and replicas stay
inside their node.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from imbrex.contracts import Placement
from imbrex.placement.layouts import from_slots
from imbrex.placement.packing import (
    MOST_PLACEMENTS,
    Floats,
    Held,
    best_placement,
    num_placements,
    pack,
    rank_loads,
    replicate,
    spread,
)
from imbrex.placement.refine import refine, shake

MOST_RANKS = 1 << 16
"""The most ranks; the search for more would not end in a reasonable time."""
CLOSE = 1e-3
"""The search ends if the fullest rank is this close to the mean, as a share of it."""
SEARCH = 60_000
"""The number of random restarts times the square of the number of slots; with it 58 layers of 288 slots take
about 1 s."""


def check_loads(load: Tensor | Floats | Sequence) -> Floats:
    """Loads [L, E], or [E] of one layer, as float64 [L, E]. Raises ValueError if they are negative, not
    finite or of another shape."""
    load_LE = np.asarray(load.cpu() if isinstance(load, Tensor) else load, dtype=np.float64)
    load_LE = load_LE[None] if load_LE.ndim == 1 else load_LE
    if load_LE.ndim != 2 or not load_LE.size:
        raise ValueError(
            f"placement: loads have shape {load_LE.shape}; give tokens per expert, [layers, experts]"
        )
    wrong = ~np.isfinite(load_LE) | (load_LE < 0)
    if wrong.any():
        layer, expert = (int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"placement: the load of expert {expert} in layer {layer} is {load_LE[layer, expert]}; "
            "loads are finite and not negative"
        )
    return load_LE


def capacity_of(slots: int | Sequence[int], num_ranks: int, num_experts: int) -> tuple[int, ...]:
    """The number of slots of every rank, from their sum (divided as evenly as possible) or as given. Raises
    ValueError if the experts do not fit, or if two replicas of an expert would have to be on one rank."""
    if not 1 <= num_ranks <= MOST_RANKS:
        raise ValueError(f"placement: {num_ranks} ranks; there must be 1 to {MOST_RANKS}")
    capacity = spread(slots, num_ranks) if isinstance(slots, int) else tuple(slots)
    if len(capacity) != num_ranks or min(capacity) < 0:
        raise ValueError(
            f"placement: slots {capacity} for {num_ranks} ranks; give one number from 0 up a rank"
        )
    if sum(capacity) < num_experts:
        raise ValueError(
            f"placement: {sum(capacity)} slots for {num_experts} experts; every expert needs at least one"
        )
    if max(capacity) > num_experts:
        raise ValueError(
            f"placement: a rank with {max(capacity)} slots for {num_experts} experts would hold one twice; "
            f"use at most {num_experts * num_ranks} slots, {num_experts} a rank"
        )
    return capacity


def plan_layers(
    load_LE: Tensor | Floats | Sequence,
    num_ranks: int,
    slots: int | Sequence[int],
    *,
    num_nodes: int = 1,
    num_groups: int = 1,
) -> list[Placement]:
    """Plan a placement for every layer from its load, for the even replica split.

    load_LE: tokens of every expert by layer; any numbers from 0 up. slots: the number of slots of all ranks
    together, divided as evenly as possible, or of every rank. num_nodes, num_groups: with more than 1, groups
    of neighbouring experts are packed on nodes of neighbouring ranks, equally many on each, and replicas stay
    inside the node.

    Raises ValueError if the numbers do not fit.
    """
    checked_LE = check_loads(load_LE)
    capacity = capacity_of(slots, num_ranks, checked_LE.shape[1])
    check_nodes(checked_LE.shape[1], capacity, num_nodes, num_groups)
    layers = (search(load_E, capacity, num_nodes=num_nodes, num_groups=num_groups) for load_E in checked_LE)
    return [to_placement(replicas_WE) for replicas_WE in layers]


def search(
    load_E: Floats,
    capacity_W: Sequence[int],
    *,
    num_nodes: int = 1,
    num_groups: int = 1,
    others: Sequence[Held] = (),
) -> Held:
    """The placement of one layer, bool [W, E]. others: further placements to start from; the result is at
    least as good as each of them."""
    if num_nodes > 1:
        return _search_nodes(load_E, capacity_W, num_nodes, num_groups, others)
    if num_placements(len(load_E), capacity_W) <= MOST_PLACEMENTS:
        return best_placement(load_E, capacity_W)
    num_ranks, num_slots = len(capacity_W), sum(capacity_W)
    target = load_E.sum() / num_ranks * (1 + CLOSE)
    starts = [pack(load_E, replicate(load_E, num_slots, num_ranks), capacity_W), *others]
    best, lowest = starts[0], np.inf
    for start in starts:
        candidate = refine(load_E, start, target=target / (1 + CLOSE))
        fullest = rank_loads(load_E, candidate).max()
        if fullest < lowest:
            best, lowest = candidate, fullest
    draw = np.random.default_rng(0)
    for attempt in range(min(250, SEARCH // max(num_slots, 1) ** 2)):
        if lowest <= target:
            break
        candidate = refine(load_E, shake(load_E, best, draw, 1 + attempt % 3), target=target / (1 + CLOSE))
        fullest = rank_loads(load_E, candidate).max()
        if fullest < lowest:
            best, lowest = candidate, fullest
    return best


def _search_nodes(
    load_E: Floats, capacity_W: Sequence[int], num_nodes: int, num_groups: int, others: Sequence[Held]
) -> Held:
    num_experts, ranks = len(load_E), len(capacity_W) // num_nodes
    group_load = load_E.reshape(num_groups, -1).sum(1)
    groups_NG = search(group_load, [num_groups // num_nodes] * num_nodes)
    replicas_WE = np.zeros((len(capacity_W), num_experts), dtype=bool)
    for node, groups_G in enumerate(groups_NG):
        experts = np.flatnonzero(np.repeat(groups_G, num_experts // num_groups))
        rows = slice(node * ranks, (node + 1) * ranks)
        replicas_WE[rows, experts] = search(load_E[experts], capacity_W[rows])
    return min([replicas_WE, *others], key=lambda candidate: rank_loads(load_E, candidate).max())


def check_nodes(num_experts: int, capacity: tuple[int, ...], num_nodes: int, num_groups: int) -> None:
    """Raise ValueError if ranks, experts and groups do not divide over the nodes."""
    if num_nodes < 1 or num_groups < 1:
        raise ValueError(f"placement: {num_nodes} nodes and {num_groups} groups; both are at least 1")
    if num_nodes == 1:
        return
    for what, many, parts, by in (
        ("experts", num_experts, num_groups, "groups"),
        ("groups", num_groups, num_nodes, "nodes"),
        ("ranks", len(capacity), num_nodes, "nodes"),
    ):
        if many % parts:
            raise ValueError(
                f"placement: {many} {what} do not divide over {parts} {by}; use num_nodes=1 for a global plan"
            )
    ranks, experts = len(capacity) // num_nodes, num_experts // num_nodes
    for node in range(num_nodes):
        slots = capacity[node * ranks : (node + 1) * ranks]
        if sum(slots) < experts or max(slots) > experts:
            raise ValueError(
                f"placement: node {node} has slots {slots} for {experts} experts; it needs at least one an "
                "expert, and a rank at most one an expert"
            )


def to_placement(replicas_WE: Held) -> Placement:
    """The placement of a matrix bool [W, E]; each rank's experts are in ascending order."""
    return from_slots([np.flatnonzero(held_E).tolist() for held_E in replicas_WE], replicas_WE.shape[1])


def to_held(placement: Placement) -> Held:
    """The matrix of a placement: bool [W, E], whether a rank has a replica of an expert."""
    replicas_WE = np.zeros((placement.num_ranks, placement.num_experts), dtype=bool)
    for rank in range(placement.num_ranks):
        replicas_WE[rank, [e for e in placement.local(rank) if e >= 0]] = True
    return replicas_WE


def imbalance(load_E: Floats | Tensor | Sequence, placement: Placement) -> float:
    """The load of the fullest rank over the mean, minus 1, if replicas share loads evenly; 0 without load."""
    loads = rank_loads(check_loads(load_E)[0], to_held(placement))
    return float(loads.max() / loads.mean() - 1) if loads.any() else 0.0
