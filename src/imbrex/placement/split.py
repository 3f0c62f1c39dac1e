"""Which replica of an expert takes how many of a rank's choices."""

from __future__ import annotations

import torch
from torch import Tensor

from imbrex.contracts import Placement, Split
from imbrex.placement.flow import split_balanced, split_nearest


def split_evenly(counts_WE: Tensor, placement: Placement) -> Tensor:
    """Every replica takes an equal share of every rank's choices; what does not divide goes to the replicas
    from the one at the source rank's number on, so that the remainders of different ranks spread.

    counts_WE: int64, choices of every rank for every expert. Returns int64 [W, S], the same on every rank.
    Example: 2 ranks with 3 choices each of an expert with 2 replicas: [[2, 1], [1, 2]].
    """
    slots = torch.tensor(placement.slots, dtype=torch.int64, device=counts_WE.device)
    occupied_S = slots >= 0
    experts = slots.clamp(min=0)
    number_S = torch.zeros_like(slots)
    replicas_E = torch.bincount(slots[occupied_S], minlength=placement.num_experts)
    seen = [0] * placement.num_experts
    for slot, expert in enumerate(placement.slots):
        if expert >= 0:
            number_S[slot] = seen[expert]
            seen[expert] += 1
    replicas_S = replicas_E[experts]
    source_W1 = torch.arange(counts_WE.shape[0], device=counts_WE.device)[:, None]
    share = counts_WE[:, experts] // replicas_S
    extra = (number_S - source_W1) % replicas_S < counts_WE[:, experts] % replicas_S
    return torch.where(occupied_S, share + extra, 0)


SPLITS: dict[str, Split] = {"balanced": split_balanced, "even": split_evenly, "nearest": split_nearest}


def make_split(split: str | Split) -> Split:
    """A split by name, or the function itself. Raises ValueError that lists the names known."""
    if not isinstance(split, str):
        return split
    if split not in SPLITS:
        raise ValueError(f"split: {split!r} is not known; use one of {', '.join(SPLITS)}")
    return SPLITS[split]
