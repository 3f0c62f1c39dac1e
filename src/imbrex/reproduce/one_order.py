"""Four ranks: interleavings that differ only in the order of independent actions are gone through once.

What a rank does depends on its own words and on the messages it hears; channels keep their order, so actions
of two ranks commute. What is left is every rank's own choice: which messages it hears before it gives up. A
state here holds that choice ahead of time: of every peer that may still say something, either its next
message is awaited, or it is held back until this rank has given up. Then a rank's next action is known,
nobody else can change it, and it may be done first: one order of all ranks stands for all (an ample set of
one action).

Nothing is lost. Take any interleaving to its end, and of every rank the messages it heard before each time
that it gave up: these choices are among those gone through, and with them every rank does the same in
whatever order, so the end is the same. A rank that does nothing more awaits everybody. Faults are looked for
in all states here, and those of the ledger stay until the end. Nothing is added either: every state here is
one of the whole model, and a choice that cannot come true leaves its rank waiting though it could act. Such
an end is none, and is not judged.

Four things are no choices. A task without a backward is computed at once: to be late with it is to be heard
late. A peer's second message, before this rank has computed, changes nothing that the rank then does. To hold
back more peers than epsilon leads nowhere, unless the rank dies. A `DROPPED` is heard when its packet was
computed: heard sooner it would save that work and a reply to a home that has given up, and its word would be
CANCELLED in place of IN_VAIN, which no condition of the ledger tells apart. So ends are those of the whole
model with these two words as one; this alone makes 6,085 states of four patient ranks' 299,974.

A rank that may die does so after any of its actions, and it may hold back whom it likes: it dies before it
hears them.

Tests compare all ends with those of the whole model, at two and three ranks, deaths included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, permutations, product
from typing import Any

from imbrex.overlap.events.ledger import Home, Host, Kind
from imbrex.reproduce.interleavings import ABSENT, DEAD, FORWARD, Events, State


class OneOrder(Events):
    """A forward and its backward, as `Events`, of which a state has a third part: by rank, the peers that are
    held back and those that are awaited, as bits.

    dies: a rank and a phase: with `FORWARD` it may die at any time before it has left its forward, with
    `UNDECIDED` or `BACKWARD` it dies for certain as it comes to it.
    """

    def __init__(
        self,
        epsilons: Sequence[int],
        *,
        at_once: bool,
        dies: tuple[int, int] | None = None,
        tensor: int = 1,
        far: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(epsilons, at_once=at_once, tensor=tensor, far=far)
        self.dies = dies
        kinds = [[self._kind(rank) for rank in group] for group in self._groups(self.ranks)]
        if kinds != sorted(map(sorted, kinds)):
            raise ValueError("liveness: name ranks by growing epsilon, of equal ones the mortal last")

    def _groups(self, order: Sequence[int]) -> list[Sequence[int]]:
        """Ranks that share experts."""
        return [order[first : first + self.tensor] for first in range(0, self.world, self.tensor)]

    def _kind(self, rank: int) -> tuple[int, bool]:
        return self.epsilons[rank], self.dies is not None and self.dies[0] == rank

    def first(self) -> State:
        seats, lines = super().first()
        if self.dies is not None and self.dies[1] == FORWARD:
            rank = self.dies[0]
            seats = (*seats[:rank], (ABSENT, *seats[rank][1:]), *seats[rank + 1 :])
            lines = tuple(() if place // self.world == rank else line for place, line in enumerate(lines))
        return seats, lines, ((0, 0),) * self.world

    def moves(self, state: State) -> Iterator[State]:
        """The first rank's next action where one has none to choose, else a choice of one rank."""
        choices: list[tuple[bool, int, int]] = []
        for rank in self.ranks:
            phase = state[0][rank][0]
            if phase == ABSENT:
                began = self._then(state, self._begin(state[:2], rank), rank, (0, 0))
                yield from (began, self._dead(state, rank), self._dead(began, rank))
                return
            following = self._next(state, rank) if phase == FORWARD else None
            if following is not None:
                yield from following
                if self.dies == (rank, FORWARD):
                    yield from (self._dead(s, rank) for s in following if s[0][rank][0] == FORWARD)
                return
            choices += self._choices(state, rank) if phase == FORWARD else ()
        if not choices:
            return
        _, rank, peer = min(choices)
        holds, waits = state[2][rank]
        if self._may_hold(state, rank, holds | 1 << peer):
            yield self._chosen(state, rank, (holds | 1 << peer, waits))
        yield self._chosen(state, rank, (holds, waits | 1 << peer))

    def _next(self, state: State, rank: int) -> list[State] | None:
        """The states after what this rank does next; `None` where it waits, or has to choose first."""
        seats, lines, words = state
        holds, waits = words[rank]
        for peer in self.ranks:
            if waits >> peer & 1 and lines[peer * self.world + rank]:
                after = self._hear(state[:2], rank, peer)
                return [self._then(state, after, rank, (holds, waits & ~(1 << peer)))]
        ledger = self._ledger(rank, seats[rank])
        tasks = ledger.task()
        if self.at_once and tasks:
            replies = [(p, Kind.REPLY) for p in ledger.compute(tasks)]
            computed = self._go_on(state[:2], rank, ledger, replies)
            return [self._then(state, computed, rank, (holds, waits))]
        if waits or next(self._choices(state, rank), None) is not None:
            return None
        acts = [self._then(state, after, rank, (0, 0)) for after in self._act(state[:2], rank)]
        return acts if acts or holds else None

    def _choices(self, state: State, rank: int) -> Iterator[tuple[bool, int, int]]:
        """Peers of which this rank has still to choose, those first who have said something."""
        seats, lines, words = state
        _, host, home, computed, *_ = seats[rank]
        for peer in self.ranks:
            if peer == rank or (words[rank][0] | words[rank][1]) >> peer & 1:
                continue
            line = lines[peer * self.world + rank]
            matters = host[peer] == Host.AWAITED
            matters |= (self.at_once or computed) and home[peer] == Home.AWAITED
            if matters and (line or seats[peer][0] in (ABSENT, FORWARD)):
                yield not line, rank, peer

    def _may_hold(self, state: State, rank: int, holds: int) -> bool:
        if self.dies == (rank, FORWARD):
            return True
        ledger = self._ledger(rank, state[0][rank])
        return len(ledger.behind | {p for p in ledger.missing if holds >> p & 1}) <= self.epsilons[rank]

    def _then(self, state: State, after: State, rank: int, choice: tuple[int, int]) -> State:
        return self._chosen((*self._quiet(after), state[2]), rank, choice)

    def _chosen(self, state: State, rank: int, choice: tuple[int, int]) -> State:
        seats, lines, words = state
        return seats, lines, (*words[:rank], choice, *words[rank + 1 :])

    def _dead(self, state: State, rank: int) -> State:
        after = self._with(state[:2], rank, (DEAD, *state[0][rank][1:]), [])
        return self._then(state, after, rank, (0, 0))

    def alike(self, state: State) -> State:
        """The least of the states that name alike ranks otherwise: only those names are tried that put
        ranks in the order of what any name leaves as it is."""
        if self.far:
            return min(self._named(state, order) for order in (self.ranks, *self.symmetries))
        marks = [
            (*self._kind(r), seat[0], seat[3], sorted(seat[1]), sorted(seat[2]), holds.bit_count())
            for r, (seat, (holds, _)) in enumerate(zip(state[0], state[2], strict=True))
        ]
        kinds = [mark[:2] for mark in marks]
        named_groups = [
            ([kinds[r] for r in order], [marks[r] for r in order], list(_orders(order, marks)))
            for order in (sorted(group, key=marks.__getitem__) for group in self._groups(self.ranks))
        ]
        named_groups.sort(key=lambda group: group[:2])
        places = range(len(named_groups))
        orders = (
            [r for part in parts for r in part]
            for order in _orders(places, [group[:2] for group in named_groups])
            for parts in product(*(named_groups[place][2] for place in order))
        )
        return min(self._named(state, order) for order in orders)

    def _named(self, state: State, order: Sequence[int]) -> State:
        def renamed(mask: int) -> int:
            return sum((mask >> q & 1) << i for i, q in enumerate(order))

        words = tuple((renamed(state[2][p][0]), renamed(state[2][p][1])) for p in order)
        return *self._renamed(state[:2], order), words

    def end(self, state: State) -> State | None:
        """The whole model's state after everything that is on its way was heard; `None` where somebody can
        still act, so that a choice was wrong."""
        after = state[:2]
        for place in range(self.world**2):
            peer, rank = divmod(place, self.world)
            while after[0][rank][0] == FORWARD and after[1][place]:
                after = self._hear(after, rank, peer)
        after = self._quiet(after)
        return after if next(super().moves(after), None) is None else None

    def fault(self, state: State, *, last: bool) -> str | None:
        end = self.end(state) if last else None
        return super().fault(state[:2] if end is None else end, last=end is not None)


def _orders(ordered: Sequence[int], marks: Sequence[Any]) -> Iterator[list[int]]:
    """The orders of things in the order of their marks that only name alike ones otherwise."""
    ties = [list(group) for _, group in groupby(ordered, key=lambda thing: marks[thing])]
    for parts in product(*map(permutations, ties)):
        yield [thing for part in parts for thing in part]


__all__ = ["OneOrder"]
