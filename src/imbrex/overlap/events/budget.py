"""How many choices all ranks together may drop: an allowance that each earns, and that packets even out.

    budget = Budget(0.01, ranks=4)          # in every rank's seat
    budget.earn(choices)                    # a call begins
    budget.receive(gift)                    # a peer's packet is here; own ones took `give()` along
    if budget.covers(1): ...                # this rank may do without one peer
    budget.charge(dropped)                  # of this rank's own choices, whoever gave them up

Nothing is made or lost between ranks, so what all have dropped is what all have earned, less what they have
left and what is on its way. Where packets are in time all have the same after them, and give up alike: the
share of a rank that drops nothing itself, such as the late one, is spent by the others.
"""

from __future__ import annotations

WHOLE = 100_000
"""Parts of a choice that an allowance is counted in; mirrored by kernels/events."""


class Budget:
    """One rank's allowance, in parts of a choice. share: of all choices that may be dropped; 1: any. It is
    negative where others gave up on more of this rank's choices than it had earned."""

    def __init__(self, share: float = 1.0, ranks: int = 1) -> None:
        self.parts, self.ranks = round(share * WHOLE), ranks
        self.left = self.gift = self.even = 0

    def earn(self, choices: int) -> None:
        """Begin a call of so many own choices."""
        self.left += self.parts * choices
        self.even = WHOLE * choices // self.ranks
        self.gift = self.left // self.ranks

    def give(self) -> int:
        """The part of what was left as the call began that goes to a peer with its packet."""
        self.left -= self.gift
        return self.gift

    def receive(self, gift: int) -> None:
        self.left += gift

    def covers(self, peers: int) -> bool:
        """Whether the choices that so many peers would have, were they even, may be dropped."""
        return self.parts == WHOLE or self.left >= peers * self.even

    def charge(self, dropped: int) -> None:
        self.left -= WHOLE * dropped


__all__ = ["WHOLE", "Budget"]
