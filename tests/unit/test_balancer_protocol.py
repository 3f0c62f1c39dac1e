"""The hand-over, walked through in every order of events: the product's `judge`, inside a model of ranks.

A rank computes an iteration (it reads its live slots under its placement), then steps: it reads the votes of
the last step, does what `judge` says, and votes, or opens a migration where none is open. Between any two
events a migration under way may end well (once every rank has begun it) or fail, and a rank may die.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from imbrex.balancer.protocol import Standing, Verdict, Vote, judge

COMPUTES, STEPS, VOTES, LOST, DEAD = "computes", "steps", "votes", "lost", "dead"
NEW = Standing()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """at: what it does. iteration. version: of its placement. open: number of the migration, or -1.
    move: how far that is. ballots: votes cast, one after the other. cast: the last one is not read yet.
    standing: as `judge` left it."""

    at: str = COMPUTES
    iteration: int = 0
    version: int = 0
    open: int = -1
    move: Vote = Vote.READY
    ballots: tuple[Vote, ...] = ()
    cast: bool = False
    standing: Standing = NEW


State = tuple[Rank, ...]
Judge = Callable[..., tuple[Verdict, Standing]]


class Breach(AssertionError):
    pass


def successors(state: State, rules: Judge, patience: int, iterations: int, deaths: int) -> list[State]:
    found = []
    for n, rank in enumerate(state):
        if rank.at in (LOST, DEAD):
            continue
        if rank.open >= 0 and rank.move == Vote.MOVING:
            begun = all(r.open >= rank.open or r.version > rank.open for r in state)
            if begun:
                found.append(put(state, n, replace(rank, move=Vote.READY)))
            found.append(put(state, n, replace(rank, move=Vote.FAILED)))
        if sum(r.at == DEAD for r in state) < deaths:
            found.append(put(state, n, replace(rank, at=DEAD)))
        found += advance(state, n, rules, patience, iterations)
    return found


def advance(state: State, n: int, rules: Judge, patience: int, iterations: int) -> list[State]:
    """What the main thread of rank n does next; nothing where it waits."""
    rank = state[n]
    if rank.at == COMPUTES:
        if rank.iteration == iterations:
            return []
        # The counts of iteration i are exchanged inside it, so a live rank is met by all or loses them.
        return meet(state, n, lambda other: other.iteration >= rank.iteration, replace(rank, at=STEPS))
    if rank.at == STEPS:
        if rank.open < 0:
            begun = replace(rank, open=rank.version, move=Vote.MOVING, standing=Standing())
            return [put(state, n, replace(begun, at=COMPUTES, iteration=rank.iteration + 1))]
        if not rank.cast:
            return [put(state, n, replace(rank, at=VOTES))]
        need = len(rank.ballots)
        ready = [r for r in state if len(r.ballots) >= need]
        if len(ready) < len(state):
            gone = any(r.at in (LOST, DEAD) and len(r.ballots) < need for r in state)
            return [put(state, n, replace(rank, at=LOST))] if gone else []
        votes = [r.move if rules is peeking else r.ballots[need - 1] for r in state]
        verdict, standing = rules(votes, rank.standing, patience)
        if verdict == Verdict.WAIT:
            return [put(state, n, replace(rank, at=VOTES, cast=False, standing=standing))]
        if verdict == Verdict.SWITCH:
            check_write(state, n)
        # A dropped migration counts as a version too, of the same placement: only numbers matter here.
        used = replace(rank, open=-1, version=rank.version + 1, cast=False, standing=Standing())
        return [put(state, n, replace(used, at=STEPS))]
    ballots = (*rank.ballots, rank.move)
    return [
        put(state, n, replace(rank, at=COMPUTES, iteration=rank.iteration + 1, ballots=ballots, cast=True))
    ]


def meet(state: State, n: int, there: Callable[[Rank], bool], then: Rank) -> list[State]:
    others = [r for m, r in enumerate(state) if m != n]
    missing = [r for r in others if not there(r)]
    if any(r.at in (LOST, DEAD) for r in missing):
        return [put(state, n, replace(state[n], at=LOST))]
    if missing:
        return []
    for other in others:
        if (
            other.at == COMPUTES
            and other.iteration == state[n].iteration
            and other.version != state[n].version
        ):
            raise Breach("two ranks compute one iteration under different placements")
    return [put(state, n, then)]


def check_write(state: State, n: int) -> None:
    """Rank n writes its live slots and throws its staging memory away."""
    rank = state[n]
    if rank.move != Vote.READY:
        raise Breach("weights are used that have not arrived")
    for other in state:
        if other.open == rank.open and other.move == Vote.MOVING and other.at != DEAD:
            raise Breach("slots are written while a migration may read them")


def put(state: State, n: int, rank: Rank) -> State:
    return (*state[:n], rank, *state[n + 1 :])


def by_any_order(state: State) -> State:
    """The ranks are alike: states that differ in who is who are one."""
    return tuple(
        sorted(
            state,
            key=lambda r: (r.at, r.iteration, r.version, r.open, r.move, r.ballots, r.cast, r.standing.age),
        )
    )


def walk(rules: Judge, *, ranks: int, iterations: int, patience: int = 2, deaths: int = 0) -> tuple[int, set]:
    """Number of states, and the final states; raises Breach where something is wrong."""
    start = (Rank(),) * ranks
    seen, todo, ends = {start}, [start], set()
    while todo:
        state = todo.pop()
        following = successors(state, rules, patience, iterations, deaths)
        main = [r for r in state if r.at not in (LOST, DEAD) and r.iteration < iterations]
        if not following:
            if main:
                raise Breach(f"a rank waits for ever: {state}")
            ends.add(state)
        for after in map(by_any_order, following):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return len(seen), ends


@pytest.mark.untraced
@pytest.mark.parametrize(("ranks", "iterations", "deaths"), [(2, 6, 0), (2, 5, 1), (3, 4, 0), (3, 4, 1)])
def test_every_order_of_events_is_safe(ranks: int, iterations: int, deaths: int) -> None:
    states, ends = walk(judge, ranks=ranks, iterations=iterations, deaths=deaths)
    assert states > 100
    alive = [[r for r in end if r.at not in (LOST, DEAD)] for end in ends]
    assert all(len({r.version for r in rs}) <= 1 for rs in alive)
    if not deaths:
        assert {end[0].version for end in ends} > {0}


def own_vote_decides(votes, standing, patience):
    """Wrong: a rank does not wait for the others."""
    del standing, patience
    return (Verdict.SWITCH, Standing()) if Vote.READY in votes else (Verdict.WAIT, Standing())


def failures_are_forgotten(votes, standing, patience):
    """Wrong: a rank that failed switches too."""
    del patience
    return (Verdict.WAIT if Vote.MOVING in votes else Verdict.SWITCH), standing


def late_is_switched(votes, standing, patience):
    """Wrong: after `patience` votes it is used, whoever still moves."""
    age = standing.age + 1
    if Vote.MOVING in votes and age < patience:
        return Verdict.WAIT, Standing(age=age)
    return Verdict.SWITCH, Standing()


def peeking(votes, standing, patience):
    """Wrong: `advance` gives it how far the migrations are now, which ranks see at different moments."""
    return judge(votes, standing, patience)


@pytest.mark.parametrize(
    ("wrong", "breach"),
    [
        (own_vote_decides, "weights are used that have not arrived"),
        (failures_are_forgotten, "weights are used that have not arrived"),
        (late_is_switched, "weights are used that have not arrived"),
        (peeking, "two ranks compute one iteration under different placements"),
    ],
)
def test_the_model_finds_wrong_rules(wrong: Judge, breach: str) -> None:
    with pytest.raises(Breach, match=breach):
        walk(wrong, ranks=2, iterations=4)


def test_judge_by_hand() -> None:
    moving, ready, failed = Vote.MOVING, Vote.READY, Vote.FAILED
    fresh = Standing()
    assert judge([ready, ready], fresh, 5) == (Verdict.SWITCH, Standing(age=1))
    assert judge([ready, failed], fresh, 5) == (Verdict.DROP, Standing(age=1, void=True))
    verdict, void = judge([moving, failed], fresh, 5)
    assert (verdict, void.void) == (Verdict.WAIT, True)
    assert judge([ready, ready], void, 5)[0] == Verdict.DROP
    assert judge([moving, ready], Standing(age=4), 5) == (Verdict.WAIT, Standing(age=5, void=True))
    assert judge([ready, ready], Standing(age=9), 5)[0] == Verdict.SWITCH
