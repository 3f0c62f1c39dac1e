"""Placements by hand: contiguous, or from a list of every rank's slots."""

from __future__ import annotations

from collections.abc import Sequence

from imbrex.contracts import Placement


def contiguous(num_experts: int, num_ranks: int) -> Placement:
    """The placement of experts in order, divided as evenly as possible: 5 experts on 3 ranks are 2, 2 and 1.
    A rank may have none."""
    if num_experts < 1 or num_ranks < 1:
        raise ValueError(f"placement: {num_experts} experts on {num_ranks} ranks; both must be at least 1")
    small, extra = divmod(num_experts, num_ranks)
    offsets = [0]
    for rank in range(num_ranks):
        offsets.append(offsets[-1] + small + (rank < extra))
    return Placement(slots=tuple(range(num_experts)), rank_offsets=tuple(offsets), num_experts=num_experts)


def from_slots(ranks: Sequence[Sequence[int]], num_experts: int) -> Placement:
    """A placement from the experts in every rank's slots, `-1` for a spare one: `[[0, 1], [1, 2, -1]]`.

    Raises ValueError if an expert has no slot, does not exist, or has two slots on a rank.
    """
    for rank, row in enumerate(ranks):
        experts = [e for e in row if e != -1]
        wrong = [e for e in experts if not 0 <= e < num_experts]
        if wrong:
            raise ValueError(
                f"placement: rank {rank} holds expert {wrong[0]}; use 0..{num_experts - 1}, or -1 for a spare"
            )
        if len(set(experts)) < len(experts):
            twice = next(e for e in experts if experts.count(e) > 1)
            raise ValueError(
                f"placement: rank {rank} holds expert {twice} twice; move one replica to another rank"
            )
    slots = tuple(e for row in ranks for e in row)
    missing = sorted(set(range(num_experts)) - set(slots))
    if missing:
        raise ValueError(f"placement: expert {missing[0]} has no slot; every expert needs at least one")
    offsets = [0]
    for row in ranks:
        offsets.append(offsets[-1] + len(row))
    return Placement(slots=slots, rank_offsets=tuple(offsets), num_experts=num_experts)
