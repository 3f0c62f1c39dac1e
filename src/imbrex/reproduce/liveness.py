"""Aristos' theorem 3.1: does every rank come to an end, whatever the order of events?"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from imbrex.reproduce import chart
from imbrex.reproduce.claims import Claims
from imbrex.reproduce.frame import Finding, Options
from imbrex.reproduce.interleavings import (
    BACKWARD,
    FORWARD,
    UNDECIDED,
    Events,
    Explored,
    Printed,
    explore,
    routings,
    wander,
)
from imbrex.reproduce.one_order import OneOrder

PRINTED = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (1, 1, 1), (2, 2, 2))
OURS = ((0, 0), (0, 1), (1, 1), (0, 0, 0), (1, 1, 1), (2, 2, 2), (0, 1, 2))
FOUR = ((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 1), (0, 1, 1, 1), (1, 1, 1, 1))
LARGER = ((0, 1, 2, 3), (2, 2, 2, 2), (1, 1, 1, 1, 1))
"""Settings that are gone through where everything is asked for: minutes."""
PHASES = (FORWARD, UNDECIDED, BACKWARD)
DEATHS = (((0, 0, 1, 1), (1, 3)), ((1, 1, 1, 1), (3,)))
"""Settings of 4 ranks and those of them that may die, one at a time."""
SHARED = (((0, 1), 2), ((1, 1), 2), ((1, 1, 1), 3))
"""Settings of ranks that share experts, and how many do."""
FAR = (((1, 1), ((0, 1),)), ((1, 1, 1), ((0, 1), (1, 2))), ((2, 2, 2), ((0, 1), (0, 2))))
"""Settings with pairs of a home and a host that is far behind."""
FOUR_SHARED = ((4, ()), (2, ((0, 2),)), (2, ((0, 2), (1, 3))), (2, ((0, 1), (2, 1))))
"""How many of four patient ranks share experts, and who is far behind."""
WALKS = {False: 100, True: 2000}
"""Random interleavings of 4 ranks with an epsilon of 3, and of 3 GPUs, by whether everything was asked
for."""
CLAIMS = (
    Claims(2, 3, 0),
    Claims(2, 3, 1),
    Claims(2, 2, 1, mortal=1),
    Claims(3, 1, 0),
    Claims(3, 1, 1, tensor=3),
    Claims(2, 2, 0, backward=True),
    Claims(2, 2, 1, backward=True),
    Claims(2, 1, 1, mortal=1, backward=True),
    Claims(2, 2, 1, backward=True, tensor=2),
)
"""Settings of GPUs that are gone through."""
LARGER_CLAIMS = (Claims(3, 1, 1, backward=True, tensor=3),)
WALKED = (
    Claims(3, 4, 1),
    Claims(3, 4, 2),
    Claims(3, 2, 1, backward=True),
    Claims(3, 2, 2, backward=True),
    Claims(3, 2, 2, backward=True, tensor=3),
    Claims(4, 2, 2, backward=True, tensor=2),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The outcome of one algorithm with one setting. cases: explorations, faulty: those with a fault."""

    name: str
    epsilons: tuple[int, ...]
    cases: int
    faulty: int
    states: int
    seconds: float
    fault: str = ""


Pairs = Sequence[tuple[int, int]]


def ours(
    epsilons: Sequence[int], *, at_once: bool, mortal: int = 0, tensor: int = 1, far: Pairs = ()
) -> Case:
    began = time.process_time()
    explored = explore(Events(epsilons, at_once=at_once, mortal=mortal, tensor=tensor, far=far))
    name = _name(at_once, tensor, far) + (", one may die" if mortal else "")
    return _case(name, epsilons, [explored], began)


def ordered(
    epsilons: Sequence[int], *, at_once: bool, deaths: Pairs = (), tensor: int = 1, far: Pairs = ()
) -> Case:
    """One order of independent actions for all; where ranks may die, one exploration a death."""
    began = time.process_time()
    explored = [
        explore(OneOrder(epsilons, at_once=at_once, dies=dies, tensor=tensor, far=far))
        for dies in (deaths if deaths else (None,))
    ]
    name = _name(at_once, tensor, far) + (", one may die" if deaths else "")
    return _case(f"{name}, one order", epsilons, explored, began, (1,) * len(explored))


def _name(at_once: bool, tensor: int, far: Pairs) -> str:
    name = "ours, " + ("inference" if at_once else "training")
    name += "" if tensor == 1 else f", experts shared by {tensor}"
    return name + "".join(f", {host} far behind for {home}" for home, host in far)


def walked(epsilons: Sequence[int], *, at_once: bool, walks: int, mortal: int = 0) -> Case:
    began = time.process_time()
    explored = wander(Events(epsilons, at_once=at_once, mortal=mortal), walks)
    name = "ours, " + ("inference" if at_once else "training") + f", {walks} random walks"
    return _case(name, epsilons, [explored], began)


def claimed(claims: Claims, *, walks: int = 0) -> Case:
    """The claims of GPUs in all interleavings, or in random ones."""
    began = time.process_time()
    explored = wander(claims, walks) if walks else explore(claims)
    kind = "training" if claims.backward else "inference"
    name = f"ours on GPUs, {kind}, {claims.calls} calls"
    name += "" if claims.tensor == 1 else f", experts shared by {claims.tensor}"
    name += (", one may die" if claims.mortal else "") + (f", {walks} random walks" if walks else "")
    return _case(name, (claims.epsilon,) * claims.world, [explored], began)


def printed(epsilons: Sequence[int]) -> Case:
    """The printed algorithm over all routings; of those that only name the workers otherwise, one."""
    began, world = time.process_time(), len(epsilons)
    weights: dict[tuple, int] = {}
    orders = [
        o for o in permutations(range(world)) if all(epsilons[a] == epsilons[b] for a, b in enumerate(o))
    ]
    for routing in routings(world):
        names = [
            tuple(sorted(order.index(peer) for peer in routing[worker]) for worker in order)
            for order in orders
        ]
        least = min(map(_frozen, names))
        weights[least] = weights.get(least, 0) + 1
    explored, counts = [], []
    for routing, count in weights.items():
        explored.append(explore(Printed(epsilons, [frozenset(peers) for peers in routing])))
        counts.append(count)
    return _case("printed", epsilons, explored, began, counts)


def _frozen(routing: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(peers) for peers in routing)


def _case(
    name: str,
    epsilons: Sequence[int],
    explored: Sequence[Explored],
    began: float,
    counts: Sequence[int] = (1,),
) -> Case:
    faults = [one_run.fault for one_run in explored if one_run.fault]
    return Case(
        name=name,
        epsilons=tuple(epsilons),
        cases=sum(counts),
        faulty=sum(n for n, run in zip(counts, explored, strict=True) if run.fault),
        states=sum(run.states for run in explored),
        seconds=time.process_time() - began,
        fault=faults[0] if faults else "",
    )


def every_case(full: bool) -> list[Case]:
    cases = [printed(epsilons) for epsilons in PRINTED]
    for epsilons in OURS:
        cases += [ours(epsilons, at_once=at_once) for at_once in (True, False)]
    for at_once in (True, False):
        cases += [ordered(epsilons, at_once=at_once) for epsilons in (*FOUR, *(LARGER if full else ()))]
        for epsilons, mortals in DEATHS:
            deaths = [(rank, phase) for rank in mortals for phase in PHASES]
            cases += [ordered(epsilons, at_once=at_once, deaths=deaths)]
        cases += [walked((3, 3, 3, 3), at_once=at_once, walks=WALKS[full])]
    for at_once in (True, False):
        cases += [ours(epsilons, at_once=at_once, tensor=tensor) for epsilons, tensor in SHARED]
        cases += [ours(epsilons, at_once=at_once, far=far) for epsilons, far in FAR]
        cases += [ordered(epsilons, at_once=at_once, tensor=2) for epsilons in FOUR]
        cases += [ordered(FOUR[-1], at_once=at_once, tensor=tensor, far=far) for tensor, far in FOUR_SHARED]
        epsilons, mortals = DEATHS[0]
        deaths = [(rank, phase) for rank in mortals for phase in PHASES]
        cases += [ordered(epsilons, at_once=at_once, tensor=2, deaths=deaths)]
    for epsilons in ((1, 1), (1, 1, 1)):
        cases += [ours(epsilons, at_once=at_once, mortal=1) for at_once in (True, False)]
    cases += [claimed(claims) for claims in (*CLAIMS, *(LARGER_CLAIMS if full else ()))]
    return cases + [claimed(claims, walks=WALKS[full]) for claims in WALKED]


def find(options: Options) -> Finding:
    cases = every_case(options.full)
    bad = sum(case.faulty for case in cases if case.name != "printed")
    equal = [case for case in cases if case.name == "printed" and len(set(case.epsilons)) == 1]
    shares = {" ".join(_line(case)[:2]): {"share": case.faulty / case.cases} for case in cases}
    return Finding(
        title="Aristos, theorem 3.1: liveness",
        question="Does every rank come to an end, and do home and host agree, in every interleaving?",
        head=("algorithm", "epsilon by rank", "routings", "with a deadlock", "states", "s"),
        table=tuple(_line(case) for case in cases),
        differs=(
            "Algorithm 1 reached us with lines lost; the initial xi is read as epsilon, and one more for a "
            "worker that is among its own. Its epsilon counts the replies that one insists on, ours the "
            "peers that may be missing.",
            "Ours has one state space whatever the routing is, since a packet without rows is sent as well.",
            "All interleavings of 2 and 3 ranks, of one forward and its backward. Of 4 ranks, each with an "
            "epsilon of 0 or 1 (--full: up to 3, and five ranks), those that differ in more than the order "
            "of independent actions; random ones of 4 where all have 3. Not a proof for more.",
            "Where ranks share experts (tensor parallelism), each is a home and hosts a piece. Who is far "
            "behind is given.",
            "On GPUs, where claims decide: several calls in a row, because their places in memory are used "
            "again; of three GPUs in one forward (--full: and its backward), else random ones.",
        ),
        verdict=(
            f"As printed, with equal epsilon everywhere, {sum(c.faulty for c in equal)} of "
            f"{sum(c.cases for c in equal)} routings have a deadlock: {_first_fault(equal)}. The theorem "
            "says that there is none.",
            f"Ours: {bad} faults. Looked for: a deadlock, a row that one rank uses and another believes "
            "dropped, a piece of an expert used without the others, more than epsilon peers given up; on "
            "GPUs also rows of another call that are read. "
            "Where a rank dies, those that wait for it, and those who wait for them, are what the time-out "
            "ends.",
        ),
        rows=[_row(case) for case in cases],
        chart=chart.bars(shares, "share of routings with a deadlock"),
    )


def _line(case: Case) -> tuple[str, ...]:
    routed = f"{case.cases}" if case.name == "printed" else "any"
    epsilons = " ".join(map(str, case.epsilons))
    return case.name, epsilons, routed, f"{case.faulty}", f"{case.states}", f"{case.seconds:.1f}"


def _first_fault(cases: Sequence[Case]) -> str:
    return next((case.fault for case in cases if case.fault), "none")


def _row(case: Case) -> dict[str, Any]:
    return {
        "op": "liveness",
        "impl": case.name,
        "case": {"epsilons": list(case.epsilons), "W": len(case.epsilons)},
        "routings": case.cases,
        "deadlocks": case.faulty,
        "states": case.states,
        "n": 1,
    }
