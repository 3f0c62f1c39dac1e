"""Splits of choices over replicas: how many of a rank's choices of an expert go to which of its slots."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any

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
    if isinstance(split, str) and split in SPLITS:
        return SPLITS[split]
    if isinstance(split, str) or not callable(split):
        raise ValueError(f"split: {split!r} is not known; use one of {', '.join(SPLITS)}, or a function")
    return split


def checked(split: Split) -> Split:
    """The split, whose every answer is checked if it is somebody's own: by a wrong one ranks would wait for
    rows that nobody sends. The answer is the same on all ranks, and so is the ValueError."""
    if split in SPLITS.values():
        return split
    name = getattr(split, "__name__", type(split).__name__)

    def ask(counts_WE: Tensor, placement: Placement) -> Tensor:
        split_WS: Any = split(counts_WE, placement)
        reason = fault_of(split_WS, counts_WE, placement)
        if reason is not None:
            raise ValueError(f"split: {name} gave {reason}; imbrex.testing.check_split checks a split")
        return split_WS

    ask.__name__ = name
    return ask


def fault_of(split_WS: Any, counts_WE: Tensor, placement: Placement) -> str | None:
    """The answer of a split of these counts, in words, if it is wrong, or `None`."""
    expected = (len(counts_WE), placement.num_slots), torch.int64, counts_WE.device
    if not isinstance(split_WS, Tensor):
        return f"a {type(split_WS).__name__} in the place of int64 [W, S], here {list(expected[0])}"
    actual = tuple(split_WS.shape), split_WS.dtype, split_WS.device
    if actual != expected:
        return f"shape, dtype and device {actual}, not {expected}"
    if bool((split_WS < 0).any()):
        return "a slot fewer than no choices"
    # Spare slots last, to which nobody's choices go.
    experts_S, _, _ = _replicas(placement, counts_WE.device)
    choices_WE = torch.nn.functional.pad(counts_WE, (0, 1))
    shares_WE = torch.zeros_like(choices_WE).index_add_(1, experts_S % choices_WE.shape[1], split_WS)
    wrong_WE = shares_WE != choices_WE
    if not bool(wrong_WE.any()):
        return None
    expert = int(wrong_WE.any(0).nonzero()[0])
    name = f"expert {expert}" if expert < counts_WE.shape[1] else "spare slots"
    shares, choices = (each_WE[:, expert].tolist() for each_WE in (shares_WE, choices_WE))
    return f"{name} {shares} choices by rank, not {choices}"
