"""The groups of rows, one a slot, that a dispatch leaves for the experts' products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from imbrex.kernels.ffn.glue import hit_words


class RowGroups(NamedTuple):
    """The groups of a dispatch's rows; tensors of one rank lack the dimension L.

    weights: float32 [L, R], gate weights of the rows; unset for rows of no choice.
    counts: int64 [L, e], rows of every slot.
    plan: int32 [L, counters + e], zeros, then the end of every slot's rows.
    hits: int32, the slots that have rows (ffn/hits.cuh); only a small dispatch sets it.
    """

    weights: Tensor
    counts: Tensor
    plan: Tensor
    hits: Tensor


def empty_groups(local_ranks: int, rows: int, slots: int, counters: int, device: torch.device) -> RowGroups:
    """Unset memory for the groups of a small dispatch."""
    local = (local_ranks,) if local_ranks > 1 else ()
    return RowGroups(
        torch.empty((*local, rows), dtype=torch.float32, device=device),
        torch.empty((*local, slots), dtype=torch.int64, device=device),
        torch.empty((*local, counters + slots), dtype=torch.int32, device=device),
        torch.empty((*local, hit_words(slots)), dtype=torch.int32, device=device),
    )


def group_fields(groups: RowGroups | None) -> dict[str, Any]:
    """The fields of a small dispatch's argument that hold the groups' addresses; `None`: nulls."""
    weights, counts, plan, hits = groups or (None, None, None, None)
    slots = 0 if counts is None else counts.shape[-1]
    return {
        "row_weights": weights,
        "slot_counts": counts,
        "plan": plan,
        "hits": hits,
        "rows": 0 if weights is None else weights.shape[-1],
        "slots": slots,
        "counters": 0 if plan is None else plan.shape[-1] - slots,
    }
