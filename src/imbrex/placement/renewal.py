"""Placements for whole models, planned from recorded loads for a given split, from an old plan if there is
one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from imbrex.contracts import Placement
from imbrex.placement.descent import descend
from imbrex.placement.history import LoadHistory
from imbrex.placement.moves import keep_in_place, match_ranks
from imbrex.placement.packing import Floats, Held, pack, rank_loads, replicate
from imbrex.placement.planner import capacity_of, check_nodes, search, to_held, to_placement
from imbrex.placement.refine import count_moves, refine
from imbrex.placement.robust import PRICES, cost_of, harden

EFFORT = 3_000_000
"""The number of proposals times slots for a whole plan, at which 58 layers of 288 slots take about 1 s."""
MOST_PROPOSALS = 4000
STEP_COSTS, FEWEST_STEPS = 6, 40
"""The time of a step of `placement.descent` in proposals, and the fewest steps for which it is used. With
fewer steps 58 layers of 288 slots took a fifth of a second more, and their imbalance was 3 to 6 % lower."""
FAR = 1.15
"""The load of the fullest rank over the mean above which steps of `placement.descent` gain. Below, single
proposals come nearer to an even load."""
MOST_BATCHES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The settings of an offline plan.

    slots: the number of slots of all ranks together, or of every rank. split: the replica split in use,
    `balanced` or `even`. decay: the weight of an iteration relative to the next one; for `even` only.
    num_nodes, num_groups: as in `plan_layers`. max_moves: the most experts that ranks may have to fetch in a
    layer, compared with the old plan.
    """

    num_ranks: int
    slots: int | Sequence[int]
    num_nodes: int = 1
    num_groups: int = 1
    split: str = "balanced"
    decay: float = 1.0
    max_moves: int | None = None


def plan_history(
    history: LoadHistory,
    target: Target,
    old: Mapping[int, Placement] | None = None,
    *,
    layers: Sequence[int] | None = None,
) -> dict[int, Placement]:
    """Plan a placement for every layer of recorded loads. Returns placements by number of the layer.

    old: the plan in use. Then a fetch is planned only if it lowers the fullest rank by a thousandth of the
    mean, and experts that stay on a rank keep their slots. layers: plan only these; each gets the placement
    it has in a plan of all layers.

    Raises ValueError if the numbers do not fit, or if the old plan has another shape or lacks a layer.
    """
    if target.split not in ("balanced", "even"):
        raise ValueError(f"plan: split {target.split!r}; use balanced or even")
    if target.max_moves is not None and (target.max_moves < 0 or old is None):
        raise ValueError("plan: max_moves is a number from 0 up, counted from an old plan; give both")
    capacity = capacity_of(target.slots, target.num_ranks, history.num_experts)
    check_nodes(history.num_experts, capacity, target.num_nodes, target.num_groups)
    load_LE = history.load(target.decay)
    if target.split == "balanced" and target.decay != 1:
        raise ValueError(
            "plan: decay is of the even split, and the balanced one is planned for every iteration alike; "
            "leave it out, or give the last iterations alone"
        )
    planned = {}
    for at, layer in enumerate(history.layers):
        if layers is not None and layer not in layers:
            continue
        before = None if old is None else _check_old(old, layer, capacity, history.num_experts)
        start = None if before is None else to_held(before)
        batches = _thin(history.counts_ILE[:, at].astype(np.float64))
        proposals = min(EFFORT // (len(history.layers) * sum(capacity)), MOST_PROPOSALS)
        replicas_WE = _plan_layer(batches, load_LE[at], capacity, target, start, proposals)
        planned[layer] = to_placement(replicas_WE) if before is None else keep_in_place(before, replicas_WE)
    return planned


def _plan_layer(
    batches_HE: Floats,
    load_E: Floats,
    capacity_W: Sequence[int],
    target: Target,
    old: Held | None,
    proposals: int,
) -> Held:
    """Plan one layer. batches_HE: tokens per expert of past iterations; load_E: their sum, weighted."""
    if target.num_nodes > 1 and target.max_moves is not None and target.split == "balanced":
        raise ValueError("plan: max_moves with the balanced split works on one node; use split even")
    if old is not None and target.num_nodes == 1:
        return _renew_layer(batches_HE, load_E, capacity_W, target, old, proposals)
    if old is not None and target.max_moves is not None:
        return refine(load_E, old, old=old, max_moves=target.max_moves)
    return _plan_anew(batches_HE, load_E, capacity_W, target, proposals)


def _renew_layer(
    batches_HE: Floats,
    load_E: Floats,
    capacity_W: Sequence[int],
    target: Target,
    old: Held,
    proposals: int,
) -> Held:
    """Plan a layer from the old placement, and from a new one where so many fetches are allowed; what costs
    least, each fetch counted."""
    if target.split == "even":
        renewed = refine(load_E, old, old=old, max_moves=target.max_moves)
    else:
        limit = target.max_moves
        renewed = harden(batches_HE, old, proposals=proposals, prices=PRICES, max_moves=limit)
    if target.max_moves is not None:
        return renewed

    def cost(new: Held) -> float:
        if target.split == "even":
            fullest = float(rank_loads(load_E, new).max()) * len(new) / max(float(load_E.sum()), 1e-300)
        else:
            fullest = cost_of(batches_HE, new)
        return fullest + PRICES[-1] * count_moves(old, new)

    anew = match_ranks(old, _plan_anew(batches_HE, load_E, capacity_W, target, proposals))
    return min(renewed, anew, key=cost)


def _plan_anew(
    batches_HE: Floats, load_E: Floats, capacity_W: Sequence[int], target: Target, proposals: int
) -> Held:
    nodes, groups = target.num_nodes, target.num_groups
    replicas_WE = search(load_E, capacity_W, num_nodes=nodes, num_groups=groups)
    if target.split == "even":
        return replicas_WE
    if nodes == 1:
        once = pack(load_E, _once_each(load_E, sum(capacity_W), len(capacity_W)), capacity_W)
        replicas_WE = min((replicas_WE, once), key=lambda start: cost_of(batches_HE, start))
    ranks = len(capacity_W) // nodes
    for node in range(nodes):
        rows = slice(node * ranks, (node + 1) * ranks)
        experts = np.flatnonzero(replicas_WE[rows].any(0))
        block = replicas_WE[rows][:, experts]
        replicas_WE[rows, experts] = _search_block(batches_HE[:, experts], block, proposals)
    return replicas_WE


def _search_block(batches_HE: Floats, replicas_WE: Held, proposals: int) -> Held:
    """Spend half of the effort on steps of descent, if that is enough for some and the start is far from
    even, and the rest on proposals."""
    steps = proposals // STEP_COSTS
    if steps < FEWEST_STEPS or cost_of(batches_HE, replicas_WE) < FAR:
        return harden(batches_HE, replicas_WE, proposals=proposals)
    return harden(batches_HE, descend(batches_HE, replicas_WE, steps=steps), proposals=proposals // 2)


def moves_between(old: Mapping[int, Placement], new: Mapping[int, Placement]) -> int:
    """The number of experts that ranks must fetch, summed over the layers of the new plan."""
    return sum(count_moves(to_held(old[layer]), to_held(new[layer])) for layer in new)


def _once_each(load_E: Floats, num_slots: int, limit: int) -> np.ndarray:
    """The number of replicas of every expert: one more for as many as there are slots left, those with the
    most load first. So many experts can shift a little."""
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
        raise ValueError(f"plan: the old plan has no layer {layer}; give one of the same model, or none")
    placement = old[layer]
    slots = tuple(int(n) for n in np.diff(placement.rank_offsets))
    if slots != capacity or placement.num_experts != num_experts:
        raise ValueError(
            f"plan: layer {layer} of the old plan has {placement.num_experts} experts in {slots} slots, not "
            f"{num_experts} in {capacity}; leave --from out to plan anew"
        )
    return placement
