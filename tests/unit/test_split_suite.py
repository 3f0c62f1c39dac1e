"""Every split keeps the contract, and the conformity suite finds the ones that do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from imbrex.contracts import Placement
from imbrex.placement import SPLITS, split_evenly
from imbrex.testing import ConformityError, check_split

_calls = itertools.count()


@pytest.mark.parametrize("name", SPLITS)
def test_contract(name: str) -> None:
    check_split(name)


def test_a_name_that_is_none() -> None:
    with pytest.raises(ValueError, match="'best' is not known"):
        check_split("best")


def first_replica(counts_WE: Tensor, placement: Placement) -> Tensor:
    """All choices of an expert go to its first slot: a split as good as any."""
    split_WS = counts_WE.new_zeros(len(counts_WE), placement.num_slots)
    for expert in range(placement.num_experts):
        split_WS[:, placement.slots.index(expert)] = counts_WE[:, expert]
    return split_WS


def test_a_split_of_somebodys_own() -> None:
    check_split(first_replica)


def loses_one(counts_WE: Tensor, placement: Placement) -> Tensor:
    split_WS = split_evenly(counts_WE, placement)
    return split_WS - (split_WS == split_WS.max()).long()


def writes(counts_WE: Tensor, placement: Placement) -> Tensor:
    split_WS = split_evenly(counts_WE, placement)
    counts_WE += 1
    return split_WS


BROKEN: dict[str, tuple[Callable[[Tensor, Placement], Tensor], str]] = {
    "loses a choice": (loses_one, "fewer than no choices"),
    "gives each replica all": (lambda c, p: c[:, torch.tensor(p.slots)], r"\[.*\] choices by rank, not"),
    "floats": (lambda c, p: split_evenly(c, p).float(), "torch.float32"),
    "the sum of all ranks": (lambda c, p: split_evenly(c, p).sum(0), "shape, dtype and device"),
    "wavers": (lambda c, p: split_evenly(c, p) * (next(_calls) % 2), "when asked twice"),
    "writes to the counts": (writes, "changed the counts"),
    "raises": (lambda c, p: {}[0], "KeyError"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_breaks_the_contract_is_found(broken: str) -> None:
    split, sentence = BROKEN[broken]
    with pytest.raises(ConformityError, match=sentence):
        check_split(split)
