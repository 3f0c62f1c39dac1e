"""Conversion of compact rows, one per received token, to expert-major rows, one per token and local expert.

Example: two local experts, padded to a multiple of 2 rows; three received rows want [0, 1], [1] and [0].
Expert 0 gets the rows 0 and 2, expert 1 the rows 0 and 1: rows [0, 2, 0, 1], counts [2, 2]. With a budget of
2 rows, expert 1 gets nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from imbrex.exchange import plan, rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Permutation:
    """Where the choices of the rows received stand.

    position_NK: int64, or int32 over NVLink; expert-major row of a choice, -1 where it is another rank's or
    was dropped.
    counts_e: int64; rows of every local expert, padding included, none past the P rows.
    overflow: int32 [1]; not 0 where rows were dropped for want of room. num_rows: P.
    on_host_e: `counts_e` on the host, where a program asked for it there.
    """

    position_NK: Tensor
    counts_e: Tensor
    overflow: Tensor
    num_rows: int
    on_host_e: Tensor | None = None

    def resize(self, num_rows: int) -> Permutation:
        """These rows with room for `num_rows`; what was dropped stays dropped."""
        fits = self.position_NK < num_rows
        return Permutation(
            position_NK=torch.where(fits, self.position_NK, -1),
            counts_e=_clip(self.counts_e, num_rows),
            overflow=self.overflow | (self.counts_e.sum() > num_rows).int(),
            num_rows=num_rows,
            on_host_e=None if self.on_host_e is None else _clip(self.on_host_e, num_rows),
        )

    def in_blocks(self, room: int) -> Permutation:
        """These rows, with those of every expert in a block of `room`. Example: blocks of 4 for counts
        [3, 1]: rows 0 to 3 become 0, 1, 2, 4."""
        ends_e = self.counts_e.cumsum(0)
        expert_NK = torch.searchsorted(ends_e, self.position_NK.long(), right=True)
        begins_e = torch.arange(len(ends_e), dtype=torch.int64, device=ends_e.device) * room
        shift_e = begins_e - ends_e + self.counts_e
        moved_NK = self.position_NK + shift_e[expert_NK.clamp(max=len(ends_e) - 1)]
        return replace(
            self,
            position_NK=torch.where(self.position_NK < 0, -1, moved_NK),
            num_rows=len(ends_e) * room,
        )

    def index(self, weights_NK: Tensor) -> tuple[Tensor, Tensor]:
        """The row received (-1: padding) and the weight (0) of every expert-major row."""
        slot_NK = torch.where(self.position_NK < 0, -1, 0)
        source_R, _, weights_R = rows.index_rows(
            slot_NK, self.position_NK, weights_NK, range(1), self.num_rows
        )
        return source_R, weights_R

    def expand(self, rows_ND: Tensor) -> Tensor:
        """Rows received to expert-major rows, padding zero; any dtype."""
        source_R, _ = self.index(torch.zeros_like(self.position_NK, dtype=torch.float32))
        # torch does not index fp8.
        values = rows_ND.view(torch.uint8) if rows_ND.dtype.itemsize == 1 else rows_ND
        return rows.expand([values], source_R).view(rows_ND.dtype)

    def expand_choices(self, weights_NK: Tensor) -> Tensor:
        """The weight of every expert-major row, 0 for padding: float32 [P]."""
        return self.index(weights_NK)[1]

    def reduce(self, rows_RD: Tensor) -> Tensor:
        """Expert-major rows summed for every row received, in float32, in ascending row order: [N, D]."""
        terms = min(self.position_NK.shape[1], len(self.counts_e))
        return rows.reduce(rows_RD, self.position_NK, None, terms)

    def pick(self, values_R: Tensor) -> Tensor:
        """The value of every choice's row, 0 where there is none: float32 [N, K]."""
        return rows.pick_scalars(values_R, self.position_NK)


def make_permutation(
    ids_NK: Tensor, local: range, pad_multiple: int, budget: int | None, *, on_host: bool
) -> Permutation:
    """Places rows by expert. ids_NK: global experts of the rows received, -1 for none. local: those of this
    rank. budget: P; without one P is what is needed. on_host: whether the counts are wanted there."""
    here = (ids_NK >= local.start) & (ids_NK < local.stop)
    slot_NK = torch.where(here, ids_NK - local.start, -1)
    counts_e = plan.count_choices(slot_NK, len(local))
    counts_e = (counts_e + pad_multiple - 1) // pad_multiple * pad_multiple
    starts_e = counts_e.cumsum(0) - counts_e
    flat = slot_NK.flatten()
    position = starts_e[flat.clamp(min=0)] + plan.order_within(flat, len(local))
    position_NK = torch.where(flat < 0, -1, position).view_as(slot_NK)
    return place_choices(position_NK, counts_e, budget, on_host=on_host)


def place_choices(position_NK: Tensor, counts_e: Tensor, budget: int | None, *, on_host: bool) -> Permutation:
    """Choices that have their rows, of which `budget` are kept; counts_e: of the local experts, padded."""
    on_host_e = None
    if on_host or budget is None:
        # host sync: the size of what is returned, and the counts for a program that wants them on the host
        on_host_e = counts_e.cpu()
    if budget is None:
        assert on_host_e is not None
        budget = int(on_host_e.sum())
    whole = Permutation(
        position_NK=position_NK,
        counts_e=counts_e,
        overflow=torch.zeros(1, dtype=torch.int32, device=position_NK.device),
        num_rows=budget,
        on_host_e=on_host_e,
    )
    return whole.resize(budget)


def _clip(counts_e: Tensor, num_rows: int) -> Tensor:
    """Cut the counts of experts whose rows lie behind one another, so that they end at `num_rows`."""
    starts_e = counts_e.cumsum(0) - counts_e
    return torch.minimum(counts_e, (num_rows - starts_e).clamp(min=0))
