"""One rank's account of one call: whose packet it awaits, whose reply, on whom it gave up.

Nothing here communicates or looks at a clock: the schedule and the explicit-state model that checks it
(`imbrex.reproduce.liveness`) drive the same object.

Every rank is both a host, of its experts, and a home, of its tokens. For each other rank it keeps one word
in either part. A choice counts if and only if its home heard the host's reply before it gave up, so the home
alone decides; a host learns it by the gradient that comes, or by `DROPPED`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum


class Kind(IntEnum):
    """A message's meaning."""

    PACKET = 0
    """Home to host: rows for its experts, perhaps none. At once."""
    REPLY = 1
    """Host to home: what the experts made of them."""
    REFUSED = 2
    """Host to home: your packet had not come when I gave up on it."""
    DROPPED = 3
    """Home to host: I do without your reply, forward and backward."""
    GRADIENT = 4
    """Home to host: the gradients of the reply, which counted."""
    GRADIENT_BACK = 5
    """Host to home: the gradients of the packet."""
    PROBLEM = 6
    """Rank to all: my input of this call cannot be dispatched."""
    LOST = 7
    """Rank to all: a rank is lost, and I leave."""


class Host(IntEnum):
    """A home's packet, as its host sees it."""

    AWAITED = 0
    HERE = 1
    COMPUTED = 2
    REFUSED = 3
    """The packet had not come when this rank gave up."""
    CANCELLED = 4
    """The home said that it does without, before it was computed."""
    IN_VAIN = 5
    """The home said so afterwards."""


class Home(IntEnum):
    """A host's reply, as the home sees it."""

    AWAITED = 0
    COUNTS = 1
    REFUSED = 2
    """The host gave up on the packet."""
    GIVEN_UP = 3
    ALONE = 4
    """A reply came, but that of a rank which shares its experts does not count."""


class Ledger:
    """The account. epsilon: how many peers may be missing. at_once: every packet is a task as it comes; else
    all that come are one task."""

    __slots__ = ("at_once", "computed", "epsilon", "home", "host", "rank")

    def __init__(self, rank: int, world_size: int, epsilon: int, *, at_once: bool) -> None:
        self.rank, self.epsilon, self.at_once = rank, epsilon, at_once
        self.host = [Host.AWAITED] * world_size
        self.home = [Home.AWAITED] * world_size
        self.host[rank], self.home[rank] = Host.HERE, Home.COUNTS
        self.computed = False

    def hear(self, peer: int, kind: Kind) -> bool:
        """Enter a message of this call; whether its rows are still of use."""
        if kind is Kind.PACKET and self.host[peer] is Host.AWAITED:
            self.host[peer] = Host.HERE
            return True
        if self.home[peer] is Home.AWAITED and kind in (Kind.REPLY, Kind.REFUSED):
            self.home[peer] = Home.COUNTS if kind is Kind.REPLY else Home.REFUSED
            return kind is Kind.REPLY
        if kind is Kind.DROPPED and self.host[peer] is not Host.REFUSED:
            after = self.host[peer] in (Host.COMPUTED, Host.IN_VAIN)
            self.host[peer] = Host.IN_VAIN if after else Host.CANCELLED
        return False

    def skip(self, peers: Sequence[int]) -> list[tuple[int, Kind]]:
        """Ask nothing of peers that are far behind; instead of packets. What must be said to whom."""
        assert len(peers) <= self.epsilon, "patience is for epsilon peers at most"
        for peer in peers:
            self.home[peer] = Home.GIVEN_UP
        return [(peer, Kind.DROPPED) for peer in peers]

    def task(self) -> list[int]:
        """The ranks whose rows can be computed now, this one among them; none while a packet is awaited that
        belongs to the task."""
        if not self.at_once and Host.AWAITED in self.host:
            return []
        return [rank for rank, state in enumerate(self.host) if state is Host.HERE]

    def compute(self, ranks: Iterable[int]) -> list[int]:
        """Notes that the rows of these ranks are computed; gives the peers that a `REPLY` goes to."""
        for rank in ranks:
            self.host[rank] = Host.COMPUTED
        self.computed = True
        return [rank for rank in ranks if rank != self.rank]

    @property
    def missing(self) -> set[int]:
        """Peers of whom something is awaited. A reply is, once this rank has computed what it could."""
        packets = {p for p, state in enumerate(self.host) if state is Host.AWAITED}
        if not self.at_once and not self.computed:
            return packets
        return packets | {p for p, state in enumerate(self.home) if state is Home.AWAITED}

    @property
    def open_pairs(self) -> int:
        """Packets and replies of the missing peers that are not here."""
        awaited = ((self.host[p] is Host.AWAITED) + (self.home[p] is Home.AWAITED) for p in self.missing)
        return sum(awaited)

    @property
    def behind(self) -> set[int]:
        """Peers on whom this rank has given up in this call."""
        refused = {p for p, state in enumerate(self.host) if state is Host.REFUSED}
        return refused | {p for p, state in enumerate(self.home) if state is Home.GIVEN_UP}

    @property
    def may_give_up(self) -> bool:
        """Whether no more than epsilon peers are missing: from here on patience runs out."""
        missing = self.missing
        return bool(missing) and len(missing | self.behind) <= self.epsilon

    @property
    def is_decided(self) -> bool:
        """Whether only those are missing on whom patience was spent in this call."""
        return self.may_give_up and self.missing <= self.behind

    def give_up(self) -> list[tuple[int, Kind]]:
        """Do without what is missing; what must be said to whom."""
        assert self.may_give_up, "patience is for epsilon peers at most"
        messages, replies_too = [], self.at_once or self.computed
        for peer in sorted(self.missing):
            if self.host[peer] is Host.AWAITED:
                self.host[peer] = Host.REFUSED
                messages.append((peer, Kind.REFUSED))
            if replies_too and self.home[peer] is Home.AWAITED:
                self.home[peer] = Home.GIVEN_UP
                messages.append((peer, Kind.DROPPED))
        return messages

    @property
    def over(self) -> bool:
        """Whether the forward is done: everything computed, nothing awaited."""
        return self.computed and not self.missing and not self.task()

    def settle(self, tensor_size: int) -> list[tuple[int, Kind]]:
        """Drop the choices of an expert rank where one of its tensor ranks does not count: a piece of an
        expert is none. What must be said to whom."""
        messages = []
        for first in range(0, len(self.home), tensor_size):
            ranks = range(first, first + tensor_size)
            if all(self.home[r] is Home.COUNTS for r in ranks):
                continue
            for rank in ranks:
                if self.home[rank] is Home.COUNTS:
                    self.home[rank] = Home.ALONE
                    messages += [(rank, Kind.DROPPED)] if rank != self.rank else []
        return messages

    @property
    def counts(self) -> list[bool]:
        """Whether this rank's choices at each rank count, by rank."""
        return [state is Home.COUNTS for state in self.home]

    @property
    def unknown(self) -> set[int]:
        """Homes that were served and have not said whether their choices count."""
        served = {p for p, state in enumerate(self.host) if state is Host.COMPUTED}
        return served - {self.rank}

    def key(self) -> tuple:
        """The whole state, for a set."""
        return tuple(self.host), tuple(self.home), self.computed


__all__ = ["Home", "Host", "Kind", "Ledger"]
