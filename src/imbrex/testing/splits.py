"""Does a split of choices over replicas keep its contract?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import Placement, Split
from imbrex.placement import from_slots, make_split
from imbrex.placement.split import fault_of
from imbrex.testing.conformity import on, require

PLACEMENTS = {
    "one slot an expert": ([[0, 1], [2]], 3),
    "replicas on all ranks": ([[0, 1], [0, 2], [2, 0]], 3),
    "spare slots and a rank without any": ([[1, -1], [], [0, 1]], 2),
}
"""Slots of every rank, `-1` for a spare one, and the number of experts, by what is special about them."""


def check_split(split: str | Split, *, device: torch.device | str = "cpu", seed: int = 0) -> None:
    """Check a split, by name or the function.

    It must give int64 [W, S] on the device of the counts; numbers from 0 up; shares of an expert's slots that
    sum to its choices, for every rank; nothing to spare slots; the same when asked twice; and leave the
    counts as they are. There are counts of as many ranks as the placement has, of twice as many (two tensor
    ranks), and of one (all ranks have the same tokens).

    Raises ConformityError that says what does not hold, and on what input; ValueError for an unknown name.
    """
    split, drawn = make_split(split), torch.Generator().manual_seed(seed)
    for name, (slots, num_experts) in PLACEMENTS.items():
        placement = from_slots(slots, num_experts)
        for kind, counts_WE in _counts(placement, drawn):
            where = f"{name}, {kind}"
            with on(where):
                _check(split, counts_WE.to(device), placement, where)


def _counts(placement: Placement, drawn: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Choices of every rank for every expert, int64 [W, E], with a name."""
    ranks, experts = placement.num_ranks, placement.num_experts
    for number in (ranks, 2 * ranks, 1):
        shape = number, experts
        yield f"no choices of {number} ranks", torch.zeros(shape, dtype=torch.int64, device="cpu")
        random = torch.randint(0, 100, shape, generator=drawn, device="cpu", dtype=torch.int64)
        yield f"random choices of {number} ranks", random
        yield f"one choice an expert of {number} ranks", torch.ones(shape, dtype=torch.int64, device="cpu")


def _check(split: Split, counts_WE: Tensor, placement: Placement, where: str) -> None:
    before = counts_WE.clone()
    split_WS: Any = split(counts_WE, placement)
    require(torch.equal(counts_WE, before), f"{where}: changed the counts that it was given")
    if isinstance(split_WS, Tensor):
        again = torch.equal(split(counts_WE, placement), split_WS)
        require(again, f"{where}: gave something else when asked twice")
    fault = fault_of(split_WS, counts_WE, placement)
    require(fault is None, f"{where}: gave {fault}")
