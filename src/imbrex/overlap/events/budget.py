"""How many choices all ranks together may drop: an allowance that each earns, and that packets even out.

    budget = Budget(0.01, ranks=4)              # in every rank's seat
    budget.earn(choices)                        # a call begins; `give(peer)` goes with each packet
    budget.receive(peer, gift, choices)         # a peer's packet is here
    if budget.covers(1): ...                    # this rank may do without a reply, or a packet
    budget.refuse(peer)                         # a packet: paid for here, as if it were even
    budget.charge(dropped)                      # of this rank's own choices, when the call is over

Nothing is made or lost between ranks, so what all have dropped is what all have earned, less what they have
left and what is on its way. Where packets are in time all have the same after them, and give up alike: the
share of a rank that drops nothing itself, such as the late one, is spent by the others.

A packet that is refused has choices of its home, which pays for them when it hears of it; so that it can, the
host pays at once, and the home gets that with the next packet. The price is of an even packet of the largest
rank, as far as its peers have told.
"""

from __future__ import annotations

WHOLE = 100_000
"""Parts of a choice that an allowance is counted in; mirrored by kernels/events."""


class Budget:
    """One rank's allowance, in parts of a choice. share: of all choices that may be dropped; 1: any. It is
    negative where others gave up on more of this rank's choices than it had."""

    def __init__(self, share: float = 1.0, ranks: int = 1) -> None:
        self.parts, self.ranks = round(share * WHOLE), ranks
        self.left = self.gift = self.own = 0
        self.loads, self.owed = [0] * ranks, [0] * ranks

    def earn(self, choices: int) -> None:
        """Begin a call of so many own choices."""
        if self.parts < WHOLE:
            self.own = choices
            self.left += self.parts * choices
            self.gift = self.left // self.ranks

    def give(self, peer: int) -> int:
        """The amount that goes to a peer with its packet: an even part of what was left as the call began,
        and for packets of it that were refused."""
        gift, self.owed[peer] = self.gift + self.owed[peer], 0
        self.left -= self.gift
        return gift

    def receive(self, peer: int, gift: int, choices: int) -> None:
        """Take what came with a packet of a call in which that peer has so many choices of its own."""
        self.left += gift
        self.loads[peer] = choices

    @property
    def price(self) -> int:
        """The price of a packet or a reply."""
        return WHOLE * max(self.own, *self.loads) // self.ranks

    def covers(self, pairs: int) -> bool:
        """Whether so many packets and replies may be done without."""
        return self.parts == WHOLE or self.left >= max(pairs * self.price, 1)

    def refuse(self, peer: int) -> None:
        """Pay for a packet of this peer."""
        if self.parts < WHOLE:
            price = self.price
            self.left -= price
            self.owed[peer] += price

    def charge(self, dropped: int) -> None:
        if self.parts < WHOLE:
            self.left -= WHOLE * dropped


__all__ = ["WHOLE", "Budget"]
