"""Who is where, and how rows are laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from imbrex.contracts import Placement, Split


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Who is where, and how rows are laid out: what the plans of an exchange have in common.

    rows_per_slot: from the tokens of the group to the rows that every slot is padded to; `None`: as needed.
    """

    placement: Placement
    rank: int
    tensor_parallel: int
    hidden_size: int
    top_k: int
    split: Split
    alignment: int
    rows_per_slot: Callable[[int], int] | None = None

    @property
    def local_slots(self) -> range:
        expert_rank = self.rank // self.tensor_parallel
        return range(*self.placement.rank_offsets[expert_rank : expert_rank + 2])

    @property
    def most_rows(self) -> int:
        """Most rows that one token can have on this rank."""
        return min(self.top_k, len(self.local_slots))
