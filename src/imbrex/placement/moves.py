"""The difference between two placements: what ranks must fetch, and which slots keep their experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from imbrex.contracts import Placement
from imbrex.placement.layouts import from_slots
from imbrex.placement.packing import Held


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch:
    """A move of one expert's weights. `slot` of the new placement, on rank `target`, gets `expert` from
    `from_slot` of the old placement, on rank `source`. If both are on one rank, it is a copy."""

    slot: int
    expert: int
    target: int
    source: int
    from_slot: int


def keep_in_place(old: Placement, replicas_WE: Held) -> Placement:
    """The placement `replicas_WE`, in which every expert that stays on its rank keeps its slot. New experts
    take the free slots in ascending order; slots without an expert are spares."""
    rows = []
    for rank, held_E in enumerate(replicas_WE):
        experts = set(np.flatnonzero(held_E).tolist())
        row = [expert if expert in experts else -1 for expert in old.local(rank)]
        newcomers = sorted(experts - set(row))
        for place, expert in enumerate(row):
            if expert < 0 and newcomers:
                row[place] = newcomers.pop(0)
        assert not newcomers, "the placements have different slots per rank"
        rows.append(row)
    return from_slots(rows, old.num_experts)


def match_ranks(old_WE: Held, new_WE: Held) -> Held:
    """The placement `new_WE` with its ranks renumbered, so that they keep much of what they hold. Among ranks
    with equally many slots, the pair that shares most experts is matched first."""
    shared = (old_WE.astype(np.int64) @ new_WE.T).astype(np.float64)
    shared[old_WE.sum(1)[:, None] != new_WE.sum(1)] = -1
    matched_WE = np.empty_like(new_WE)
    for _ in range(len(old_WE)):
        old, new = divmod(int(shared.argmax()), len(new_WE))
        matched_WE[old] = new_WE[new]
        shared[old], shared[:, new] = -2, -2
    return matched_WE


def fetches(old: Placement, new: Placement) -> list[Fetch]:
    """The experts that ranks must fetch, by slot. Of several sources the one that serves fewest fetches is
    taken, then the lowest rank.

    Raises ValueError if the placements have different experts or slots.
    """
    if old.rank_offsets != new.rank_offsets or old.num_experts != new.num_experts:
        raise ValueError(
            f"placement: from {old.num_experts} experts in slots {old.rank_offsets} to {new.num_experts} in "
            f"{new.rank_offsets}; experts move only between placements of one shape"
        )
    owner = np.repeat(np.arange(old.num_ranks), np.diff(old.rank_offsets)).tolist()
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(old.slots):
        holders.setdefault(expert, []).append(slot)
    served, copies = [0] * old.num_ranks, []
    for slot, expert in enumerate(new.slots):
        if expert < 0 or expert == old.slots[slot]:
            continue
        target = owner[slot]
        at_home = [s for s in holders[expert] if owner[s] == target]
        candidates = at_home or holders[expert]
        source_slot = min(candidates, key=lambda s: (served[owner[s]], s))
        served[owner[source_slot]] += 1
        copies.append(
            Fetch(
                slot=slot,
                expert=expert,
                target=target,
                source=owner[source_slot],
                from_slot=source_slot,
            )
        )
    return copies
