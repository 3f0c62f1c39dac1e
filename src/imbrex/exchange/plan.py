"""The position of every row before any data moves: index arithmetic, on any device.

Example, two ranks, experts 0 1 | 2 3, top-1, tokens of rank 0 want [2, 0, 2], of rank 1 want [2, 1].
Rank 0 sends tokens 0 and 2 to rank 1; they become rows 0 and 1 there, and rank 1's own token 0 row 2,
since rows of a slot are ordered by source rank, then token. Rank 0 holds one row of expert 0 (its own
token 1, in place) and one of expert 1 (rank 1's token 1): counts [1, 1] and, on rank 1, [3, 0].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from imbrex.contracts import Placement, Plan, Traffic
from imbrex.runtime.words import words

__all__ = ["chosen_twice", "count_choices", "order_within"]
"""The names for adapters."""


def count_choices(ids_TK: Tensor, num_bins: int) -> Tensor:
    """How often every id in `[0, num_bins)` occurs; `-1` is not counted. int64 [num_bins], no host sync."""
    flat = torch.where(ids_TK < 0, num_bins, ids_TK).flatten()
    bins = torch.zeros(num_bins + 1, dtype=torch.int64, device=ids_TK.device)
    return bins.scatter_add_(0, flat, torch.ones_like(flat))[:num_bins]


def count_pairs(ids_TK: Tensor, num_bins: int) -> Tensor:
    """How many tokens chose both of two ids: int64 [num_bins, num_bins], with those that chose one on the
    diagonal; -1 is not counted. Exact up to 2^24 tokens, no host sync.
    Example: [[0, 2], [2, -1]] of 3: [[1, 0, 1], [0, 0, 0], [1, 0, 2]].
    """
    chosen_TE = torch.zeros(len(ids_TK), num_bins + 1, dtype=torch.float32, device=ids_TK.device)
    chosen_TE = chosen_TE.scatter_(1, torch.where(ids_TK < 0, num_bins, ids_TK), 1.0)[:, :num_bins]
    with torch.autocast(ids_TK.device.type, enabled=False):
        return (chosen_TE.T @ chosen_TE).long()


def order_within(ids_N: Tensor, num_bins: int) -> Tensor:
    """The number of earlier entries with the same id, for every entry: [1, 0, 1, 1] gives [0, 0, 1, 2]."""
    keys = torch.where(ids_N < 0, num_bins, ids_N)
    order = torch.argsort(keys, stable=True)
    starts = torch.searchsorted(keys[order], torch.arange(num_bins + 1, device=ids_N.device))
    within = torch.empty_like(order)
    within[order] = torch.arange(len(order), device=order.device) - starts[keys[order]]
    return within


def choose_slots(ids_TK: Tensor, split_S: Tensor, placement: Placement) -> Tensor:
    """The slot that takes every choice, int64 [T, K], `-1` for a dropped one.

    The i-th choice of an expert on this rank, in token order, goes to the slot in whose share of the
    cumulated `split_S` (int64 [S], this rank's choices per slot) it falls, slots in ascending order.
    """
    if not placement.has_replicas:
        return only_slots(ids_TK, placement)
    device = ids_TK.device
    slots = words(*placement.slots)
    by_expert = torch.argsort(torch.where(slots < 0, placement.num_experts, slots), stable=True)
    experts = slots[by_expert]
    by_expert = by_expert[experts >= 0]
    first = torch.searchsorted(slots[by_expert], torch.arange(placement.num_experts, device="cpu"))
    ends = torch.cumsum(split_S[by_expert], 0)
    base = torch.cat([ends.new_zeros(1), ends])[first]
    flat = ids_TK.flatten()
    safe = flat.clamp(min=0)
    nth = order_within(flat, placement.num_experts) + base.to(device, non_blocking=True)[safe]
    index = torch.searchsorted(ends.to(device, non_blocking=True), nth, right=True)
    slot = by_expert.to(device, non_blocking=True)[index.clamp(max=max(len(by_expert) - 1, 0))]
    return torch.where(flat < 0, -1, slot).view_as(ids_TK)


def only_slots(ids_TK: Tensor, placement: Placement) -> Tensor:
    """The slot of every choice where no expert has two, int64 [T, K], `-1` for a dropped one."""
    return slot_of_expert(placement, ids_TK.device)[ids_TK]


def chosen_twice(ids_TK: Tensor) -> tuple[Tensor, Tensor]:
    """The choices of every token in order, and which of them but the last stand there once more: bool
    [T, K - 1]. -1 is no choice."""
    ordered_TK, _ = ids_TK.sort(1)
    return ordered_TK, (ordered_TK[:, 1:] == ordered_TK[:, :-1]) & (ordered_TK[:, 1:] >= 0)


@lru_cache(maxsize=1024)
def slot_of_expert(placement: Placement, device: torch.device) -> Tensor:
    """The slot of every expert that has one, int64 [E + 1]; the last is -1, for ids of -1, which count from
    the end. Kept for the placements in use, and never written to: a copy to a GPU waits for its stream."""
    slots = [-1] * (placement.num_experts + 1)
    for slot, expert in enumerate(placement.slots):
        if expert >= 0:
            slots[expert] = slot
    return words(*slots).to(device)


def ranks_wanted(slot_TK: Tensor, placement: Placement, tensor_size: int) -> Tensor:
    """Which ranks a token must reach, bool [T, W]: every tensor rank of every expert-parallel rank that owns
    one of its slots. W = placement.num_ranks * tensor_size; rank r is tensor rank r % tensor_size."""
    owner, ranks = owner_of_slot(placement, slot_TK.device), placement.num_ranks
    rank_TK = torch.where(slot_TK < 0, ranks, owner[slot_TK.clamp(min=0)])
    wants_TW = torch.zeros(slot_TK.shape[0], ranks + 1, dtype=torch.bool, device=slot_TK.device)
    wants_TW.scatter_(1, rank_TK, True)
    wants_TW = wants_TW[:, :-1]
    return wants_TW if tensor_size == 1 else wants_TW.repeat_interleave(tensor_size, dim=1)


def read_state(state: Sequence[Tensor]) -> tuple[Tensor, Tensor, Traffic]:
    """source_R, position_PK and traffic from the state of a `Handle` over a transport that moves bytes.

    The pool of a rank is its own T tokens followed by the M rows received, by source rank, then token.
    source_R: int64; pool row that a row was copied from, `-1` for padding.
    position_PK: int64; row of every choice of a pool row on this rank, `-1` where it is another rank's.
    """
    source_R, position_PK, sent_tokens_N, splits_2W, *hops = state
    traffic = Traffic(sent_tokens_N=sent_tokens_N, splits_2W=splits_2W, hops=tuple(hops))
    return source_R, position_PK, traffic


@lru_cache(maxsize=1024)
def owner_of_slot(placement: Placement, device: torch.device) -> Tensor:
    """Expert-parallel rank that owns every slot, int64 [S]. Kept, and never written to, as `slot_of_expert`.

    Counted in Python: torch's `repeat_interleave` opens a team of threads for two values, which took 5 to
    13 ms a call where threads wake slowly.
    """
    begin_end = zip(placement.rank_offsets, placement.rank_offsets[1:], strict=False)
    return words(*(rank for rank, (begin, end) in enumerate(begin_end) for _ in range(begin, end))).to(device)


def slot_rows(split_WS: Tensor, alignment: int, rows_per_slot: int | None) -> Tensor:
    """Rows of every slot, padding included, int64 [S]: a multiple of `alignment`, or `rows_per_slot`
    each, more only where a slot has more."""
    total_S = split_WS.sum(0)
    if rows_per_slot is not None:
        return torch.full_like(total_S, max([rows_per_slot, *total_S.tolist()]))
    return (total_S + alignment - 1) // alignment * alignment


def make_plan(
    slot_TK: Tensor,
    split_WS: Tensor,
    traffic: Traffic,
    placement: Placement,
    rank: int,
    *,
    tensor_size: int = 1,
    alignment: int = 1,
    rows_per_slot: int | None = None,
) -> Plan:
    """The plan of `rank`.

    slot_TK: of this rank, on its device. split_WS: choices of every rank for every slot, host int64.
    alignment: rows of a slot are padded to a multiple. rows_per_slot: padded to this many instead.
    """
    device = slot_TK.device
    rows_S = slot_rows(split_WS, alignment, rows_per_slot)
    starts_S = torch.cumsum(rows_S, 0) - rows_S
    owner_S = owner_of_slot(placement, split_WS.device)
    first_slot = words(*placement.rank_offsets)[owner_S]
    base_S = starts_S - starts_S[first_slot] + split_WS[:rank].sum(0)
    flat = slot_TK.flatten()
    # Not blocking: a copy that waits for the stream would keep the host from queueing ahead.
    base_S = base_S.to(device, non_blocking=True)
    position = base_S[flat.clamp(min=0)] + order_within(flat, placement.num_slots)
    position_TK = torch.where(flat < 0, -1, position).view_as(slot_TK)
    expert_rank = rank // tensor_size
    local = slice(placement.rank_offsets[expert_rank], placement.rank_offsets[expert_rank + 1])
    return Plan(
        slot_TK=slot_TK,
        position_TK=position_TK,
        traffic=traffic,
        counts_e=rows_S[local].clone().to(device, non_blocking=True),
        num_rows=int(rows_S[local].sum()),
    )
