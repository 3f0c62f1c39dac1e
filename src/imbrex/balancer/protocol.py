"""The rule by which ranks decide together whether a migration is used, checked over all interleavings.

The placement and the live slots of a layer belong to the computation from the start of a forward to the call
of `step`. Only inside `step` do they belong to the balancer, which writes them. A migration under way only
reads live slots, and writes staging memory that nothing else uses.

    open ──▶ every rank moves ──▶ votes, one all-gather a step ──▶ nobody is moving ──▶ switch, or drop

The first vote is cast a step after the opening, and a vote is read a step after it was cast, so that nobody
waits for it. All ranks read the same votes, and so switch inside the same `step`. As long as one rank is
moving, no rank writes, because that rank may be reading, or being read.
`tests/unit/test_balancer_protocol.py` goes through every order of events, with failures and deaths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Vote(IntEnum):
    """The state of a rank's part of the migration. `READY` and `FAILED` are final."""

    MOVING = 0
    READY = 1
    FAILED = 2


class Verdict(IntEnum):
    """The decision about the open migration: wait for it, switch to it, or drop it."""

    WAIT = 0
    SWITCH = 1
    DROP = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The state of the open migration, the same on all ranks. age: the number of votes read. void: whether it
    is certain not to be used."""

    age: int = 0
    void: bool = False


def judge(votes: Sequence[Vote], standing: Standing, patience: int) -> tuple[Verdict, Standing]:
    """Decide about the migration, from the votes that all ranks have read.

    patience: the number of votes after which a migration still under way is void. Ranks wait for it
    nevertheless, because its memory is free only when nobody moves.
    Example: (MOVING, FAILED) waits, and is void from then on; (READY, FAILED) drops; (READY, READY) switches.
    """
    age = standing.age + 1
    moving = Vote.MOVING in votes
    void = standing.void or Vote.FAILED in votes or (moving and age >= patience)
    if moving:
        return Verdict.WAIT, Standing(age=age, void=void)
    return (Verdict.DROP if void else Verdict.SWITCH), Standing(age=age, void=void)
