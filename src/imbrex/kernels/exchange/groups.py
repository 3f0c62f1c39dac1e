"""Groups of rows as a small dispatch writes them for the experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class RowGroups(NamedTuple):
    """The gate weights of a dispatch's rows, float32 [L, R], unset where no choice has the row; how many rows
    every slot has, int64 [L, e]; and int32 [L, counters + e], zeros and then where they end."""

    weights_LR: Tensor
    counts_Le: Tensor
    plan_LC: Tensor


def empty_groups(local_ranks: int, rows: int, slots: int, counters: int, device: torch.device) -> RowGroups:
    return RowGroups(
        torch.empty(local_ranks, rows, dtype=torch.float32, device=device),
        torch.empty(local_ranks, slots, dtype=torch.int64, device=device),
        torch.empty(local_ranks, counters + slots, dtype=torch.int32, device=device),
    )


def group_fields(groups: RowGroups | None) -> dict[str, Any]:
    """The fields of a small dispatch's argument that say where they go; `None`: nowhere."""
    weights, counts, plan = groups or (None, None, None)
    slots = 0 if counts is None else counts.shape[1]
    return {
        "row_weights": weights,
        "slot_counts": counts,
        "plan": plan,
        "rows": 0 if weights is None else weights.shape[1],
        "slots": slots,
        "counters": 0 if plan is None else plan.shape[1] - slots,
    }
