"""The model of the claims by which GPUs do without a late peer: no fault, and those that are put in found."""

from __future__ import annotations

import pytest

from imbrex.reproduce.claims import Claims
from imbrex.reproduce.interleavings import explore, wander
from imbrex.reproduce.liveness import claimed


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("world", "calls", "epsilon", "mortal"),
    [(2, 2, 1, 1), (2, 2, 0, 1), (2, 3, 0, 0), (2, 3, 1, 0), (3, 1, 0, 0)],
)
def test_every_interleaving(world: int, calls: int, epsilon: int, mortal: int) -> None:
    """Ranks that are slow, stop for a while or die: nobody waits for ever, reads rows of another call, or
    uses what the other side believes dropped."""
    explored = explore(Claims(world, calls, epsilon, mortal))
    assert explored.fault is None, explored.path[-1]
    assert explored.ends > 0


@pytest.mark.parametrize(("calls", "epsilon", "mortal"), [(2, 0, 0), (2, 1, 0), (1, 1, 1)])
def test_every_interleaving_with_backwards(calls: int, epsilon: int, mortal: int) -> None:
    case = claimed(Claims(2, calls, epsilon, mortal, backward=True))
    assert (case.fault, case.faulty) == ("", 0)
    assert case.states > 500


@pytest.mark.untraced
@pytest.mark.parametrize(("epsilon", "mortal"), [(1, 0), (2, 0), (1, 1)])
def test_random_interleavings_of_three(epsilon: int, mortal: int) -> None:
    for claims in (Claims(3, 4, epsilon, mortal), Claims(3, 2, epsilon, mortal, backward=True)):
        wandered = wander(claims, 120)
        assert wandered.fault is None
        assert wandered.states > 10_000


@pytest.mark.untraced
@pytest.mark.parametrize(("world", "tensor", "epsilon", "mortal"), [(3, 3, 2, 0), (4, 2, 1, 1), (4, 2, 2, 0)])
def test_random_interleavings_of_ranks_that_share_experts(
    world: int, tensor: int, epsilon: int, mortal: int
) -> None:
    wandered = wander(Claims(world, 2, epsilon, mortal, backward=True, tensor=tensor), 50)
    assert wandered.fault is None
    assert wandered.states > 5_000


@pytest.mark.parametrize(
    ("claims", "fault"),
    [
        (Claims(2, 1, 1, tensor=2, alone=True), "uses a piece of an expert without another"),
        (Claims(4, 1, 1, backward=True, tensor=2, unasked=True), "which the host does not"),
        (Claims(2, 3, 1, no_credit=True), "not of its call"),
        (Claims(2, 3, 1, no_claim=True), "which the host does not"),
        (Claims(2, 1, 1, backward=True, hasty=True), "that counts"),
    ],
)
def test_faults_that_are_put_in_are_found(claims: Claims, fault: str) -> None:
    """Packets that are written without asking who has read the last; replies that count without a claim;
    backwards that do without a rank; ranks that share experts and do not ask, or count alone."""
    explored = explore(claims) if claims.world == 2 else wander(claims, 100)
    assert explored.fault is not None
    assert explored.fault.endswith(fault)
