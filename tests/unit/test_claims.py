"""The model of the claims by which GPUs do without a late peer: no fault, and those that are put in found."""

from __future__ import annotations

import pytest

from imbrex.reproduce.claims import Claims
from imbrex.reproduce.interleavings import explore, wander


@pytest.mark.parametrize(
    ("world", "calls", "epsilon", "mortal"),
    [(2, 3, 0, 0), (2, 3, 1, 0), (2, 2, 1, 1), (2, 2, 0, 1), (3, 1, 0, 0)],
)
def test_every_interleaving(world: int, calls: int, epsilon: int, mortal: int) -> None:
    """Ranks that are slow, stop for a while or die: nobody waits for ever, reads rows of another call, or
    uses what the other side believes dropped."""
    explored = explore(Claims(world, calls, epsilon, mortal))
    assert explored.fault is None, explored.path[-1]
    assert explored.ends > 0


@pytest.mark.untraced
@pytest.mark.parametrize(("epsilon", "mortal"), [(1, 0), (2, 0), (1, 1)])
def test_random_interleavings_of_three(epsilon: int, mortal: int) -> None:
    wandered = wander(Claims(3, 4, epsilon, mortal), 300)
    assert wandered.fault is None
    assert wandered.states > 10_000


@pytest.mark.parametrize(
    ("claims", "fault"),
    [
        (Claims(2, 3, 1, no_credit=True), "not of its call"),
        (Claims(2, 3, 1, no_claim=True), "which the host does not"),
    ],
)
def test_faults_that_are_put_in_are_found(claims: Claims, fault: str) -> None:
    """Packets that are written without asking who has read the last; replies that count without a claim."""
    explored = explore(claims)
    assert explored.fault is not None
    assert explored.fault.endswith(fault)
