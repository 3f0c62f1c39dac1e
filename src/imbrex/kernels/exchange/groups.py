"""Groups of rows as a dispatch leaves them for the experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from imbrex.kernels.ffn.glue import hit_words


class RowGroups(NamedTuple):
    """The gate weights of a dispatch's rows, float32 [L, R], unset where no choice has the row; how many rows
    every slot has, int64 [L, e]; int32 [L, counters + e], zeros and then where they end; and which slots have
    any, int32 (ffn/hits.cuh), unset but by a small dispatch. Of one rank without the dimension L."""

    weights: Tensor
    counts: Tensor
    plan: Tensor
    hits: Tensor


def empty_groups(local_ranks: int, rows: int, slots: int, counters: int, device: torch.device) -> RowGroups:
    """Room for what a small dispatch says of its rows: weights, counts, plan of the products, slots hit."""
    local = (local_ranks,) if local_ranks > 1 else ()
    return RowGroups(
        torch.empty((*local, rows), dtype=torch.float32, device=device),
        torch.empty((*local, slots), dtype=torch.int64, device=device),
        torch.empty((*local, counters + slots), dtype=torch.int32, device=device),
        torch.empty((*local, hit_words(slots)), dtype=torch.int32, device=device),
    )


def group_fields(groups: RowGroups | None) -> dict[str, Any]:
    """The fields of a small dispatch's argument that say where they go; `None`: nowhere."""
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
