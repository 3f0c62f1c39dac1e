"""When a migration may be used: one rule, the same on every rank, checked over all interleavings.

Who owns what. The placement and the live slots of a layer belong to the computation from the start of a
forward to the call of `step`; inside `step`, and nowhere else, to the balancer, which writes them.
A migration under way only reads live slots and writes staging memory that nobody else touches.

    open ──▶ every rank moves ──▶ votes, one all-gather a step ──▶ nobody is moving ──▶ switch, or drop

The first vote is cast a step after the opening, and a vote is read a step after it was cast, so that nobody
waits for it. All ranks read the same votes and
so switch inside the same `step`. As long as one rank moves, nobody writes: it may be reading, or be read.
`tests/unit/test_balancer_protocol.py` walks through every order of events, with failures and deaths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Vote(IntEnum):
    """Where a rank's part of the migration stands. `READY` and `FAILED` are final."""

    MOVING = 0
    READY = 1
    FAILED = 2


class Verdict(IntEnum):
    """The decision on the open migration: wait on, switch to it, or drop it."""

    WAIT = 0
    SWITCH = 1
    DROP = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The open migration as the ranks know it. age: votes read. void: it will not be used."""

    age: int = 0
    void: bool = False


def judge(votes: Sequence[Vote], standing: Standing, patience: int) -> tuple[Verdict, Standing]:
    """Decides what all ranks do about the migration, from the votes that all of them have read.

    patience: votes after which a migration still under way is void. It is waited for all the same: its
    memory is free only when nobody moves.
    Example: (MOVING, FAILED) waits, void from then on; (READY, FAILED) drops; (READY, READY) switches.
    """
    age = standing.age + 1
    moving = Vote.MOVING in votes
    void = standing.void or Vote.FAILED in votes or (moving and age >= patience)
    if moving:
        return Verdict.WAIT, Standing(age=age, void=void)
    return (Verdict.DROP if void else Verdict.SWITCH), Standing(age=age, void=void)
