"""Every interleaving of a few ranks: the algorithm of `events` with its own ledger, and the one that was
printed.

A state is what every rank knows and the messages on their way. From the first state on, every rank that can
do something does it: begins, hears the next message of a peer, computes, gives up, or, where it is mortal,
dies. When patience runs out is a choice too, so no time is in the model: a rank that is slow or stops for a
while is one that others overtake.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Protocol

from imbrex.overlap.events.ledger import Home, Host, Kind, Ledger

State = tuple[Any, ...]
ABSENT, FORWARD, UNDECIDED, BACKWARD, DONE, DEAD = range(6)


class Algorithm(Protocol):
    """A set of states to explore: hashable ones, of which `moves` gives those that follow. `fault` says what
    is wrong with one that has none (`last`), or any; `alike` names the states that are the same."""

    def first(self) -> Any: ...
    def moves(self, state: Any) -> Iterator[Any]: ...
    def fault(self, state: Any, *, last: bool) -> str | None: ...
    def alike(self, state: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Explored:
    """An exploration: states seen, those with no move left, the first fault and the states on the way."""

    states: int
    ends: int
    fault: str | None = None
    path: tuple[State, ...] = ()


def explore(algorithm: Algorithm, most_states: int = 2_000_000) -> Explored:
    """Depth first through all states. Raises RuntimeError beyond `most_states`: then nothing is shown."""
    start = algorithm.alike(algorithm.first())
    before: dict[State, State | None] = {start: None}
    stack, ends = [start], 0
    while stack:
        state = stack.pop()
        following = [algorithm.alike(next_state) for next_state in algorithm.moves(state)]
        ends += not following
        fault = algorithm.fault(state, last=not following)
        if fault is not None:
            return Explored(states=len(before), ends=ends, fault=fault, path=_path(before, state))
        for next_state in following:
            if next_state not in before:
                before[next_state] = state
                stack.append(next_state)
        if len(before) > most_states:
            raise RuntimeError(f"more than {most_states} states; the model is too large to be gone through")
    return Explored(states=len(before), ends=ends)


def wander(algorithm: Algorithm, walks: int, seed: int = 0) -> Explored:
    """Some random interleavings to their ends, where there are too many for all of them."""
    drawn, states = random.Random(seed), 0
    for _ in range(walks):
        state, path = algorithm.first(), []
        while state is not None:
            path.append(state)
            following = list(algorithm.moves(state))
            fault = algorithm.fault(state, last=not following)
            if fault is not None:
                return Explored(states=states + len(path), ends=0, fault=fault, path=tuple(path))
            state = drawn.choice(following) if following else None
        states += len(path)
    return Explored(states=states, ends=walks)


def _path(before: dict[State, State | None], state: State) -> tuple[State, ...]:
    path, at = [], state
    while at is not None:
        path.append(at)
        at = before[at]
    return tuple(reversed(path))


class Events:
    """A forward and its backward. epsilons: of every rank. mortal: how many ranks may die. tensor: how many
    ranks, one behind the other, share experts: each computes a piece of them. far: pairs of a home and a host
    that is far behind, of which the home asks nothing.

    A rank is (phase, host words, home words, computed, gradients heard, gradients back), the last two as
    bits; messages between two ranks keep their order. Without deaths every rank has begun: one that begins
    late is one whose messages are heard late. What no decision depends on any more is heard at once.
    """

    dies: tuple[int, int] | None = None
    """A rank that dies for certain as it comes to this phase."""

    def __init__(
        self,
        epsilons: Sequence[int],
        *,
        at_once: bool,
        mortal: int = 0,
        tensor: int = 1,
        far: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.epsilons, self.at_once, self.mortal = tuple(epsilons), at_once, mortal
        self.world, self.tensor, self.far = len(epsilons), tensor, frozenset(far)
        self.ranks = range(self.world)
        self.symmetries = [order for order in permutations(self.ranks) if self._is_symmetry(order)][1:]

    def _is_symmetry(self, order: Sequence[int]) -> bool:
        """Whether ranks may be named so: by place, the rank that it stands for."""
        pairs = list(enumerate(order))
        alike = all(self.epsilons[a] == self.epsilons[b] for a, b in pairs)
        whole = all(b // self.tensor == order[a - a % self.tensor] // self.tensor for a, b in pairs)
        return alike and whole and {(order[i], order[j]) for i, j in self.far} == self.far

    def first(self) -> State:
        seats = tuple((ABSENT, *_words(self._ledger(r)), 0, 0) for r in self.ranks)
        state: State = seats, ((),) * self.world**2
        for rank in self.ranks if not self.mortal else ():
            state = self._begin(state, rank)
        return state

    def _begin(self, state: State, rank: int) -> State:
        far_ranks = [p for p in self.ranks if (rank, p) in self.far]
        ledger = self._ledger(rank, state[0][rank])
        messages = ledger.skip(far_ranks)
        messages += [(p, Kind.PACKET) for p in self.ranks if p != rank and p not in far_ranks]
        return self._with(state, rank, (FORWARD, *_words(ledger), *state[0][rank][4:]), messages)

    def alike(self, state: State) -> State:
        """The least of the states that only name the ranks otherwise."""
        return min([state, *(self._renamed(state, order) for order in self.symmetries)])

    def _renamed(self, state: State, order: Sequence[int]) -> State:
        seats, channels = state
        renamed = []
        for p in order:
            phase, host, home, computed, heard, back = seats[p]
            words = tuple(host[q] for q in order), tuple(home[q] for q in order)
            bits = (sum((mask >> q & 1) << i for i, q in enumerate(order)) for mask in (heard, back))
            renamed.append((phase, *words, computed, *bits))
        return tuple(renamed), tuple(channels[a * self.world + b] for a in order for b in order)

    def _ledger(self, rank: int, seat: tuple | None = None) -> Ledger:
        ledger = Ledger(rank, self.world, self.epsilons[rank], at_once=self.at_once)
        if seat is not None:
            ledger.host, ledger.home = [_HOSTS[n] for n in seat[1]], [_HOMES[n] for n in seat[2]]
            ledger.computed = seat[3]
        return ledger

    def moves(self, state: State) -> Iterator[State]:
        seats, channels = state
        dead = sum(seat[0] == DEAD for seat in seats)
        for rank in self.ranks:
            phase = seats[rank][0]
            if phase in (DONE, DEAD):
                continue
            if dead < self.mortal:
                yield self._quiet(self._with(state, rank, (DEAD, *seats[rank][1:]), []))
            if phase == ABSENT:
                yield self._quiet(self._begin(state, rank))
            elif phase == FORWARD:
                for peer in self.ranks:
                    if channels[peer * self.world + rank]:
                        yield self._quiet(self._hear(state, rank, peer))
                yield from map(self._quiet, self._act(state, rank))

    def _act(self, state: State, rank: int) -> Iterator[State]:
        ledger = self._ledger(rank, state[0][rank])
        ranks = ledger.task()
        if ranks:
            replies = [(p, Kind.REPLY) for p in ledger.compute(ranks)]
            yield self._go_on(state, rank, ledger, replies)
        elif ledger.may_give_up:
            yield self._go_on(state, rank, ledger, ledger.give_up())

    def _quiet(self, state: State) -> State:
        """Hear what no decision depends on: gradients, what comes too late, all of it after the forward."""
        again = True
        while again:
            again = False
            for place in range(self.world**2):
                while state[1][place]:
                    peer, rank = divmod(place, self.world)
                    phase, host, home, *_ = state[0][rank]
                    if phase == ABSENT or (
                        phase == FORWARD and _decides(state[1][place][0], host[peer], home[peer])
                    ):
                        break
                    state, again = self._hear(state, rank, peer), True
        return state

    def _hear(self, state: State, rank: int, peer: int) -> State:
        seats, channels = state
        place = peer * self.world + rank
        kind, *rest = channels[place]
        channels = (*channels[:place], tuple(rest), *channels[place + 1 :])
        phase, host, home, computed, heard, back = seats[rank]
        ledger = self._ledger(rank, seats[rank])
        heard |= (kind == Kind.GRADIENT) << peer
        back |= (kind == Kind.GRADIENT_BACK) << peer
        if kind not in (Kind.GRADIENT, Kind.GRADIENT_BACK):
            ledger.hear(peer, Kind(kind))
        seat = phase, host, home, computed, heard, back
        return self._go_on(((*seats[:rank], seat, *seats[rank + 1 :]), channels), rank, ledger, [])

    def _go_on(self, state: State, rank: int, ledger: Ledger, messages: list) -> State:
        """Take the steps in which there is no choice: leave the forward, send gradients, send them back."""
        phase, *_, heard, back = state[0][rank]
        leaves = phase == FORWARD and ledger.over
        messages = [*messages, *(self._settle(ledger) if leaves else ())]
        hosts = [p for p, c in enumerate(ledger.counts) if c and p != rank]
        if leaves:
            messages += [(p, Kind.GRADIENT) for p in hosts]
            phase = DEAD if self.dies == (rank, UNDECIDED) else UNDECIDED
        if phase == UNDECIDED and all(heard >> p & 1 for p in ledger.unknown):
            homes = [p for p in self.ranks if self._used(p, ledger.host, heard)]
            messages += [(p, Kind.GRADIENT_BACK) for p in homes]
            phase = DEAD if self.dies == (rank, BACKWARD) else BACKWARD
        if phase == BACKWARD and all(back >> p & 1 for p in hosts):
            phase = DONE
        return self._with(state, rank, (phase, *_words(ledger), heard, back), messages)

    def _settle(self, ledger: Ledger) -> list[tuple[int, Kind]]:
        return ledger.settle(self.tensor)

    def _used(self, home: int, host: Sequence[int], heard: int) -> bool:
        """Whether a home's rows are in the gradients of a host with these words."""
        return bool(heard >> home & 1) and host[home] == Host.COMPUTED

    def _with(self, state: State, rank: int, seat: tuple, messages: list[tuple[int, Kind]]) -> State:
        seats, channels = state
        lines = list(channels)
        for peer, kind in messages:
            # Nobody hears what is sent to who has left for good.
            if seats[peer][0] not in (DONE, DEAD):
                lines[rank * self.world + peer] += (int(kind),)
        if seat[0] in (DONE, DEAD):
            lines = [() if place % self.world == rank else line for place, line in enumerate(lines)]
        return (*seats[:rank], seat, *seats[rank + 1 :]), tuple(lines)

    def fault(self, state: State, *, last: bool) -> str | None:
        seats, _ = state
        for i in self.ranks:
            behind = self._ledger(i, seats[i]).behind
            if len(behind) > self.epsilons[i]:
                return f"rank {i} gave up on {len(behind)} peers"
            problems = (self._disagreement(i, seats[i], j, seats[j]) for j in self.ranks if j != i)
            problem = next(filter(None, (self._piece(i, seats[i]), *problems)), None)
            if problem is not None:
                return problem
        return self._stuck(seats) if last else None

    def _piece(self, home: int, seat: tuple) -> str | None:
        """Whether a home past its decision uses a rank's piece of an expert without all the others: so does
        its backward, and so do its hosts where they agree with it."""
        pieces = [word == Home.COUNTS for word in seat[2]] if seat[0] in (UNDECIDED, BACKWARD, DONE) else ()
        for first in range(0, len(pieces), self.tensor):
            if len(set(pieces[first : first + self.tensor])) > 1:
                return f"home {home} uses a piece of the experts of rank {first} and leaves out another"
        return None

    def _disagreement(self, i: int, home: tuple, j: int, host: tuple) -> str | None:
        """Whether home i and host j, both past their decision, say the same of i's choices at j."""
        if home[0] not in (UNDECIDED, BACKWARD, DONE) or host[0] not in (BACKWARD, DONE):
            return None
        counts, used = home[2][j] == Home.COUNTS, self._used(i, host[1], host[4])
        if counts == used:
            return None
        says = "counts" if counts else "dropped"
        return f"home {i} {says} its choices at {j}, host {j} {'used' if used else 'left out'} them"

    def _stuck(self, seats: tuple) -> str | None:
        """Who never ends though no dead rank is the reason; the time-out is for those who wait for one."""
        waits = {r: self._awaited(r, seats[r]) for r in self.ranks if seats[r][0] not in (DONE, DEAD)}
        lost = {r for r in self.ranks if seats[r][0] == DEAD}
        while more := {r for r, peers in waits.items() if peers & lost} - lost:
            lost |= more
        stuck = sorted(set(waits) - lost)
        return f"ranks {stuck} wait for ever" if stuck else None

    def _awaited(self, rank: int, seat: tuple) -> set[int]:
        ledger, heard, back = self._ledger(rank, seat), seat[4], seat[5]
        if seat[0] == FORWARD:
            return ledger.missing
        if seat[0] == UNDECIDED:
            return {p for p in ledger.unknown if not heard >> p & 1}
        return {p for p, counts in enumerate(ledger.counts) if counts and p != rank and not back >> p & 1}


_HOSTS, _HOMES = tuple(Host), tuple(Home)


def _words(ledger: Ledger) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    return tuple(map(int, ledger.host)), tuple(map(int, ledger.home)), ledger.computed


def _decides(kind: int, host: int, home: int) -> bool:
    """Whether a message can change what a rank in its forward does next."""
    if kind == Kind.PACKET:
        return host == Host.AWAITED
    if kind in (Kind.REPLY, Kind.REFUSED):
        return home == Home.AWAITED
    return kind == Kind.DROPPED and host in (Host.AWAITED, Host.HERE)


class Printed:
    """Algorithm 1 of the paper. routing: the workers that every worker's tokens want, itself perhaps.

    The text reached us damaged: lines 8 to 10 are read as xi <- epsilon, and one more where a worker is among
    its own. mu counts what is still expected, xi the replies that one insists on before the countdown. All
    workers host experts. A worker is (mu, xi, counting down, unserved, phase).
    """

    def __init__(self, epsilons: Sequence[int], routing: Sequence[frozenset[int]]) -> None:
        self.epsilons, self.routing, self.world = tuple(epsilons), tuple(routing), len(epsilons)
        self.ranks = range(self.world)

    def first(self) -> State:
        seats, lines = [], []
        for rank, wanted_ranks in enumerate(self.routing):
            own = rank in wanted_ranks
            mu = len(wanted_ranks) + self.world - 1 + own
            seats.append((mu, self.epsilons[rank] + own, False, frozenset(self.ranks), FORWARD))
            lines += [("request",) if peer in wanted_ranks else () for peer in self.ranks]
        return tuple(seats), tuple(lines)

    def alike(self, state: State) -> State:
        return state

    def moves(self, state: State) -> Iterator[State]:
        seats, channels = state
        for rank in self.ranks:
            mu, xi, counting, unserved, phase = seats[rank]
            if phase == DONE:
                continue
            counting = counting or xi == 0
            if counting:
                # Line 28: without this broadcast where epsilon is 0.
                peers = unserved - {rank} if self.epsilons[rank] > 0 else ()
                yield self._with(
                    state, rank, (mu, xi, counting, unserved, DONE), [(p, "reply") for p in peers]
                )
            for peer in self.ranks:
                place = peer * self.world + rank
                if not channels[place]:
                    continue
                kind, *rest = channels[place]
                after = (seats, (*channels[:place], tuple(rest), *channels[place + 1 :]))
                left, sent_kind = unserved, []
                if kind == "request":
                    left, sent_kind = unserved - {peer}, [(peer, "reply")]
                xi_after = xi - (kind == "reply")
                ends = DONE if mu - 1 <= 0 else FORWARD
                yield self._with(after, rank, (mu - 1, xi_after, counting, left, ends), sent_kind)

    def _with(self, state: State, rank: int, seat: tuple, messages: list) -> State:
        seats, channels = state
        lines = list(channels)
        for peer, kind in messages:
            if seats[peer][4] != DONE:
                lines[rank * self.world + peer] += (kind,)
        if seat[4] == DONE:
            lines = [() if place % self.world == rank else line for place, line in enumerate(lines)]
        return (*seats[:rank], seat, *seats[rank + 1 :]), tuple(lines)

    def fault(self, state: State, *, last: bool) -> str | None:
        stuck = [rank for rank in self.ranks if state[0][rank][4] != DONE]
        return f"workers {stuck} wait for ever" if last and stuck else None


def routings(world: int) -> Iterator[tuple[frozenset[int], ...]]:
    """Every choice of workers that want some workers each."""
    some = [frozenset(r for r in range(world) if n >> r & 1) for n in range(1, 2**world)]

    def of(ranks: int) -> Iterator[tuple[frozenset[int], ...]]:
        if ranks == 0:
            yield ()
            return
        for before in of(ranks - 1):
            yield from ((*before, one_set) for one_set in some)

    return of(world)


__all__ = ["Events", "Explored", "Printed", "explore", "routings", "wander"]
