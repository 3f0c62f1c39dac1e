"""Every interleaving of the claims by which ranks do without a late peer on GPUs (kernels/events/claims.cuh).

Several calls in a row, because places for packets and replies are used again in each: forwards and, where
there are gradients, the backwards of these, the last first. A place holds the call whose rows it has, or that
it is being written; who reads looks before and behind. When patience runs out is a choice, so a rank that is
slow or stops for a while is one that others overtake.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

TURN, WRITE, SEND, TAKE, CLOSE, READ, SERVE, STORE, WAIT, SHUT, ADD, DONE, DEAD = range(13)
TORN = -1


class Seat(NamedTuple):
    """The knowledge of a rank. peers: those it still has to do this step for. went: who was sent
    its packet, here: whose packet it has, counts: whose reply, behind: on whom it gave up; bits.
    sent_calls: the last call whose packet every peer was sent. heard, counted, served: of every forward,
    whose replies came, whose count, and whose tokens count here."""

    phase: int
    call: int
    peers: int
    went: int
    here: int
    counts: int
    behind: int
    sent_calls: tuple[int, ...]
    heard: tuple[int, ...]
    counted: tuple[int, ...]
    served: tuple[int, ...]


class Heaps(NamedTuple):
    """The memory that all see, by receiver, then sender: claims of packets and of replies,
    `taken_calls`, `moved`, the call whose rows are at a place, and whether a packet's rows count."""

    packet: tuple[int, ...]
    reply: tuple[int, ...]
    taken_calls: tuple[int, ...]
    moved: tuple[int, ...]
    packets: tuple[int, ...]
    replies: tuple[int, ...]
    rows_count: tuple[int, ...]


class World(NamedTuple):
    """A state. beliefs: of every pair of a home and a host that has decided, by call, whether the choices
    count; 2 bits for what the home says, 2 for the host."""

    seats: tuple[Seat, ...]
    heaps: Heaps
    beliefs: tuple[tuple[int, ...], ...]
    fault: str | None = None


@dataclass(frozen=True)
class Claims:
    """Some forwards of some ranks; backward: and their backwards. epsilon: of all ranks. mortal: how many may
    die. tensor: how many ranks, one behind the other, share experts.

    no_credit, no_claim, hasty, unasked, alone: faults to find: packets are written without asking who has
    read the last, replies count without a claim, backwards give up as forwards do, hosts that share experts
    do not ask in the backward who counts, and a piece of an expert counts without the others.
    """

    world: int
    calls: int
    epsilon: int
    mortal: int = 0
    backward: bool = False
    no_credit: bool = False
    no_claim: bool = False
    hasty: bool = False
    tensor: int = 1
    unasked: bool = False
    alone: bool = False

    def first(self) -> World:
        none = (0,) * self.calls
        seat = Seat(TURN, 1, self._others(0), 0, 0, 0, 0, (0,) * self.world, none, none, none)
        seats = tuple(seat._replace(peers=self._others(rank)) for rank in range(self.world))
        square = (0,) * self.world**2
        return World(seats, Heaps(*[square] * 7), (square,) * self.calls)

    def alike(self, state: World) -> World:
        return state

    def _others(self, rank: int) -> int:
        return (1 << self.world) - 1 & ~(1 << rank)

    def _forward_of(self, call: int) -> int | None:
        """The forward that a call is the backward of; `None`: it is a forward."""
        return None if call <= self.calls else 2 * self.calls - call

    def _peers_of(self, rank: int, seat: Seat, stage: int) -> int:
        """Ranks that a call is with, in its first two stages."""
        forward = self._forward_of(seat.call)
        if forward is None:
            return self._others(rank)
        return (seat.heard if stage == TURN else seat.served)[forward]

    def _at(self, receiver: int, sender: int) -> int:
        return receiver * self.world + sender

    def moves(self, state: World) -> Iterator[World]:
        if state.fault:
            return
        dead = sum(seat.phase == DEAD for seat in state.seats)
        for rank, seat in enumerate(state.seats):
            if seat.phase in (DONE, DEAD):
                continue
            if dead < self.mortal:
                yield self._with(state, rank, seat._replace(phase=DEAD))
            yield from self._steps(state, rank, seat)

    def _steps(self, state: World, rank: int, seat: Seat) -> Iterator[World]:
        if seat.phase in (TURN, TAKE, WAIT):
            yield from self._wait(state, rank, seat)
        elif not seat.peers:
            yield self._next(state, rank, seat)
        else:
            peer = seat.peers.bit_length() - 1
            left = seat._replace(peers=seat.peers & ~(1 << peer))
            yield self._step(state, rank, left, peer)

    def _missing(self, state: World, rank: int, seat: Seat) -> int:
        """Peers that have not come yet, of those that this stage waits for."""
        heaps, missing = state.heaps, 0
        for peer in range(self.world):
            at = self._at(rank, peer)
            if not seat.peers >> peer & 1:
                continue
            if seat.phase == TURN:
                there = self.no_credit or heaps.taken_calls[at] >= seat.sent_calls[peer]
            elif seat.phase == TAKE:
                there = heaps.packet[at] == 2 * seat.call + 1 or heaps.moved[at] >= seat.call
            else:
                there = heaps.reply[at] == 2 * seat.call + 1
            missing |= (not there) << peer
        return missing

    def _wait(self, state: World, rank: int, seat: Seat) -> Iterator[World]:
        missing = self._missing(state, rank, seat)
        epsilon = self.epsilon if self.hasty or self._forward_of(seat.call) is None else 0
        if missing and (missing | seat.behind).bit_count() > epsilon:
            return
        come = seat.peers & ~missing
        if seat.phase == TURN:
            yield self._with(state, rank, seat._replace(phase=WRITE, peers=come, behind=missing, went=come))
        elif seat.phase == TAKE:
            yield self._with(state, rank, seat._replace(phase=CLOSE, here=come, peers=missing))
        else:
            yield self._with(state, rank, seat._replace(phase=SHUT, counts=come, peers=missing))

    def _next(self, state: World, rank: int, seat: Seat) -> World:
        """The next phase, once this one is done for all peers."""
        if seat.phase == WRITE:
            return self._with(state, rank, seat._replace(phase=SEND, peers=self._others(rank)))
        if seat.phase == SEND:
            return self._with(state, rank, seat._replace(phase=TAKE, peers=self._peers_of(rank, seat, TAKE)))
        if seat.phase == CLOSE:
            # Those that moved on without a packet are no more here than those that were closed.
            places = [self._at(rank, p) for p in range(self.world)]
            here = sum(
                1 << p
                for p in range(self.world)
                if seat.here >> p & 1 and state.heaps.packet[places[p]] == 2 * seat.call + 1
            )
            return self._begin_reading(state, rank, seat._replace(here=here))
        if seat.phase == READ:
            return self._with(state, rank, seat._replace(phase=SERVE, peers=seat.here))
        if seat.phase == SERVE:
            return self._with(state, rank, seat._replace(phase=STORE, peers=seat.here))
        if seat.phase == STORE:
            forward = self._forward_of(seat.call)
            peers = seat.went if forward is None else seat.went & seat.counted[forward]
            return self._with(state, rank, seat._replace(phase=WAIT, peers=peers))
        if seat.phase == SHUT:
            return self._begin_adding(state, rank, seat)
        last = seat.call == self.calls * (1 + self.backward)
        following = seat._replace(
            phase=DONE if last else TURN, call=seat.call + 1, went=0, here=0, counts=0, behind=0
        )
        peers = 0 if last else self._peers_of(rank, following, TURN)
        return self._with(state, rank, following._replace(peers=peers))

    def _begin_reading(self, state: World, rank: int, seat: Seat) -> World:
        forward = self._forward_of(seat.call)
        if forward is not None and seat.here != seat.served[forward]:
            return state._replace(fault=f"rank {rank} goes back without gradients of rows that count")
        if forward is not None and self.tensor > 1:
            state, seat = self._ask(state, rank, seat, forward)
        state = self._check(state, rank, seat, seat.here, state.heaps.packets, "packet")
        return self._with(state, rank, seat._replace(phase=READ, peers=self._others(rank)))

    def _begin_adding(self, state: World, rank: int, seat: Seat) -> World:
        state = self._check(state, rank, seat, seat.counts, state.heaps.replies, "reply")
        forward = self._forward_of(seat.call)
        if forward is not None:
            if seat.counts != seat.counted[forward] & ~(1 << rank):
                return state._replace(fault=f"rank {rank} lacks gradients of a host that counts")
            return self._with(state, rank, seat._replace(phase=ADD, peers=seat.counts))
        at, heard = seat.call - 1, seat.counts
        counted = self._whole(heard | 1 << rank)
        if self._whole(counted, rule=True) != counted:
            return state._replace(fault=f"rank {rank} uses a piece of an expert without another")
        seat = seat._replace(heard=_set(seat.heard, at, heard), counted=_set(seat.counted, at, counted))
        for host in range(self.world):
            if host != rank:
                state = self._say(state, seat.call, rank, host, by=0, counts=bool(counted >> host & 1))
        return self._with(state, rank, seat._replace(phase=ADD, peers=counted & heard))

    def _whole(self, ranks: int, *, rule: bool = False) -> int:
        """The ranks of a set in which all are that share their experts."""
        for first in range(0, self.world, self.tensor):
            pieces = (1 << self.tensor) - 1 << first
            if ranks & pieces != pieces and (rule or not self.alone):
                ranks &= ~pieces
        return ranks

    def _ask(self, state: World, rank: int, seat: Seat, forward: int) -> tuple[World, Seat]:
        """Packets say which homes count what they were sent, of those that were served."""
        for home in range(self.world):
            if seat.here >> home & 1:
                counts = self.unasked or bool(state.heaps.rows_count[self._at(rank, home)])
                state = self._say(state, forward + 1, home, rank, by=2, counts=counts)
                seat = seat._replace(here=seat.here & ~(1 << home) | counts << home)
        return state, seat._replace(served=_set(seat.served, forward, seat.here))

    def _check(
        self, state: World, rank: int, seat: Seat, peers: int, places: tuple[int, ...], what: str
    ) -> World:
        for peer in range(self.world):
            if peers >> peer & 1 and places[self._at(rank, peer)] != seat.call:
                return state._replace(fault=f"rank {rank} reads a {what} of {peer} that is not of its call")
        return state

    def _step(self, state: World, rank: int, left: Seat, peer: int) -> World:
        heaps, there, here = state.heaps, self._at(peer, rank), self._at(rank, peer)
        if left.phase == WRITE:
            heaps = heaps._replace(packets=_set(heaps.packets, there, TORN))
        elif left.phase == SEND:
            heaps, left = self._send(heaps, left, there, peer)
        elif left.phase == CLOSE:
            word, done = _claim(heaps.packet[here], 2 * left.call)
            heaps = heaps._replace(packet=_set(heaps.packet, here, word))
            came = word == 2 * left.call + 1
            left = left._replace(here=left.here | came << peer, behind=left.behind | done << peer)
        elif left.phase == READ:
            state = self._check(state, rank, left, left.here & 1 << peer, heaps.packets, "packet")
            heaps = heaps._replace(taken_calls=_set(heaps.taken_calls, there, left.call))
        elif left.phase == SERVE:
            heaps = heaps._replace(replies=_set(heaps.replies, there, TORN))
        elif left.phase == STORE:
            heaps = heaps._replace(replies=_set(heaps.replies, there, left.call))
            word, served = _claim(heaps.reply[there], 2 * left.call + 1)
            heaps = heaps._replace(reply=_set(heaps.reply, there, word))
            if self._forward_of(left.call) is None:
                counts = served or self.no_claim
                of_call = left.served[left.call - 1] | counts << peer
                left = left._replace(served=_set(left.served, left.call - 1, of_call))
                if self.tensor == 1 or not counts:
                    state = self._say(state, left.call, peer, rank, by=2, counts=counts)
        elif left.phase == SHUT:
            word, done = _claim(heaps.reply[here], 2 * left.call)
            heaps = heaps._replace(reply=_set(heaps.reply, here, word))
            came = word == 2 * left.call + 1
            left = left._replace(counts=left.counts | came << peer, behind=left.behind | done << peer)
        else:
            state = self._check(state, rank, left, 1 << peer, heaps.replies, "reply")
        return self._with(state._replace(heaps=heaps), rank, left)

    def _send(self, heaps: Heaps, left: Seat, there: int, peer: int) -> tuple[Heaps, Seat]:
        if left.went >> peer & 1:
            forward = self._forward_of(left.call)
            counts = forward is None or left.counted[forward] >> peer & 1
            heaps = heaps._replace(rows_count=_set(heaps.rows_count, there, int(counts)))
            heaps = heaps._replace(packets=_set(heaps.packets, there, left.call))
            word, done = _claim(heaps.packet[there], 2 * left.call + 1)
            heaps = heaps._replace(packet=_set(heaps.packet, there, word))
            sent_calls = _set(left.sent_calls, peer, left.call) if done else left.sent_calls
            left = left._replace(went=left.went & ~(1 << peer) | done << peer, sent_calls=sent_calls)
        return heaps._replace(moved=_set(heaps.moved, there, left.call)), left

    def _say(self, state: World, call: int, home: int, host: int, *, by: int, counts: bool) -> World:
        """Notes what one side believes of a home's choices at a host, and compares."""
        pairs, at = state.beliefs[call - 1], self._at(home, host)
        word = pairs[at] | (2 + counts) << by
        fault = state.fault
        if word & 3 and word >> 2 and (word & 3) != word >> 2:
            says = "count" if word & 1 else "are dropped"
            fault = f"home {home} says that its choices at {host} {says}, which the host does not"
        return state._replace(beliefs=_set(state.beliefs, call - 1, _set(pairs, at, word)), fault=fault)

    def _with(self, state: World, rank: int, seat: Seat) -> World:
        return state._replace(seats=_set(state.seats, rank, seat))

    def fault(self, state: World, *, last: bool) -> str | None:
        if state.fault:
            return state.fault
        for rank, seat in enumerate(state.seats):
            if seat.behind.bit_count() > self.epsilon:
                return f"rank {rank} gave up on {seat.behind.bit_count()} peers"
        if not last or any(seat.phase == DEAD for seat in state.seats):
            return self._stranded(state) if last else None
        stuck = [rank for rank, seat in enumerate(state.seats) if seat.phase != DONE]
        return f"ranks {stuck} wait for ever" if stuck else None

    def _stranded(self, state: World) -> str | None:
        """Who waits for ever though no dead rank is the reason; the deadline ends other waits."""
        lost = {r for r, seat in enumerate(state.seats) if seat.phase == DEAD}
        waits = {
            r: {p for p in range(self.world) if self._missing(state, r, seat) >> p & 1}
            for r, seat in enumerate(state.seats)
            if seat.phase not in (DONE, DEAD)
        }
        while more := {r for r, peers in waits.items() if peers & lost} - lost:
            lost |= more
        stuck = sorted(set(waits) - lost)
        return f"ranks {stuck} wait for ever" if stuck else None


def _set(values: tuple, at: int, value: object) -> tuple:
    return (*values[:at], value, *values[at + 1 :])


def _claim(word: int, value: int) -> tuple[int, bool]:
    """The word after one compare-and-swap, and whether that decided it."""
    return (value, True) if word < value & ~1 else (word, False)


__all__ = ["Claims"]
