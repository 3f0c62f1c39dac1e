"""Tensors that the routing kernel takes and gives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from imbrex.contracts import Placement


class Routed(NamedTuple):
    """Positions of every row. L is the number of ranks in this process (1, except for virtual ranks).

    position_LWTK: int32; expert-major row, on this rank, of every choice of every rank's tokens; -1: not
        here.
    weights_LWTK: float32; the gate weights of every rank's tokens.
    recv_row_LWT: int32; compact row received for a token of another rank; -1: none.
    send_row_LTW: int32; the row of an own token at every rank, -1: not sent; own column 0 where a choice is
        local.
    counts_Le: int32; rows of every local slot, padding included.
    totals_L4: int32; expert-major rows R, rows received M, 1 on overflow (then rows past the capacity are
        dropped), 0.
    tokens_LW: int32; tokens of every rank.
    """

    position_LWTK: Tensor
    weights_LWTK: Tensor
    recv_row_LWT: Tensor
    send_row_LTW: Tensor
    counts_Le: Tensor
    totals_L4: Tensor
    tokens_LW: Tensor


Tables = tuple[Tensor, Tensor, Tensor]
"""A placement on the device; see `placement_tables`."""


def placement_tables(placement: Placement, device: torch.device) -> Tables:
    """first_replica [E + 1], replica_slots [S], rank_offsets [W + 1]; int32."""
    by_expert: list[list[int]] = [[] for _ in range(placement.num_experts)]
    for slot, expert in enumerate(placement.slots):
        if expert >= 0:
            by_expert[expert].append(slot)
    first = [0]
    for slots in by_expert:
        first.append(first[-1] + len(slots))
    flat = [slot for slots in by_expert for slot in slots]
    flat += [-1] * (placement.num_slots - len(flat))
    first_replica, slots, offsets = (
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in (first, flat, placement.rank_offsets)
    )
    return first_replica, slots, offsets


def write_tables(tables: Tables, placement: Placement) -> None:
    """Another placement of as many experts in the same slots into `tables`, queued without waiting: a
    captured call follows."""
    for old, new in zip(tables, placement_tables(placement, torch.device("cpu")), strict=True):
        old.copy_(new.pin_memory() if old.is_cuda else new, non_blocking=True)
