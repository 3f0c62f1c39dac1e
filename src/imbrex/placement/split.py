"""Splits of choices over replicas: how many of a rank's choices of an expert go to which of its slots."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import torch
from torch import Tensor

from imbrex.contracts import Placement, Split
from imbrex.placement.flow import split_balanced, split_nearest
from imbrex.runtime.words import words


def split_evenly(counts_WE: Tensor, placement: Placement) -> Tensor:
    """The split by which every replica takes an equal share of every rank's choices. A remainder goes to the
    replicas from the one with the source rank's number on, so that different ranks' remainders go to
    different replicas.

    counts_WE: int64, choices of every rank for every expert. Returns int64 [W, S], the same on every rank.
    Example: 2 ranks with 3 choices each of an expert with 2 replicas: [[2, 1], [1, 2]].
    """
    experts_S, replicas_S, number_S = _replicas(placement, counts_WE.device)
    source_W1 = torch.arange(counts_WE.shape[0], device=counts_WE.device)[:, None]
    counts_WS = counts_WE[:, experts_S.clamp(min=0)]
    extra = (number_S - source_W1) % replicas_S < counts_WS % replicas_S
    return torch.where(experts_S < 0, 0, counts_WS // replicas_S + extra)


@lru_cache(maxsize=1024)
def _replicas(placement: Placement, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The expert of every slot, -1 for none, how many slots that expert has, and how many of these come
    before it, int64 [S] each. Kept, and never written to: counting them at every call took a host 0.6 ms for
    256 experts, for every chunk, before the first row could move."""
    replicas, before = Counter(placement.slots), Counter[int]()
    numbers = []
    for expert in placement.slots:
        numbers.append(before[expert])
        before[expert] += 1
    columns = placement.slots, [replicas[expert] for expert in placement.slots], numbers
    experts_S, replicas_S, number_S = (words(*column).to(device) for column in columns)
    return experts_S, replicas_S, number_S


SPLITS: dict[str, Split] = {"balanced": split_balanced, "even": split_evenly, "nearest": split_nearest}
"""The splits, by name."""


def make_split(split: str | Split) -> Split:
    """A split by name, or the function itself. Raises ValueError that lists the known names."""
    if not isinstance(split, str):
        return split
    if split not in SPLITS:
        raise ValueError(f"split: {split!r} is not known; use one of {', '.join(SPLITS)}")
    return SPLITS[split]
