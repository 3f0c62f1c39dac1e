"""The splits `balanced` and `nearest`: how many choices of an expert go to which of its slots. `balanced` is
exact.

Choices of an expert can go to any of the ranks that hold it. From the fullest rank, choices are pushed along
a path of ranks that share experts to the emptiest rank that can be reached, until no rank that can be reached
is two below it. Then the load of the ranks that can be reached cannot leave them, so no split has a lower
fullest rank. This is the argument for optimal semi-matchings (Harvey, Ladner, Lovasz and Tamir 2006), here
with many choices at once: a step between two ranks takes as much as all experts they share can give, and a
push brings a rank to the mean of those that it reaches. `kernels/routing/split.cuh` gives the same integers
on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from imbrex.contracts import Placement, Split
from imbrex.kernels import why_not_hopper
from imbrex.kernels.routing.split import SplitKernel
from imbrex.kernels.routing.split_layout import MOST_RANKS
from imbrex.placement.packing import Ints


def split_balanced(counts_WE: Tensor, placement: Placement) -> Tensor:
    """The split with the lowest possible load of the fullest rank. Among such splits, choices of a rank that
    has the expert stay there where they can.

    counts_WE: int64, choices of every rank for every expert. There are as many rows as the placement has
    ranks, or a multiple (tensor ranks), or one, if all ranks have the same tokens. Returns int64 [W, S] on
    the same device, equal on all ranks.

    Example: 2 ranks, slots [[0, 1], [0, 2]]; expert 0 is chosen 10 times, 1 and 2 twice each. Each rank
    computes 5 + 2 rows. If expert 2 were chosen four times, equal shares would give 7 and 9, and this
    split 8 and 8.
    """
    kernel = kernel_for(placement, counts_WE.device) if counts_WE.is_cuda else None
    if kernel is not None:
        return kernel(counts_WE)
    # host sync: none where the counts are on the host
    counts = counts_WE.cpu().numpy()
    return torch.from_numpy(spread_choices(counts, placement)).to(counts_WE.device)


def split_near(split: Split, counts_WE: Tensor, placement: Placement, device: torch.device) -> Tensor:
    """Apply `split` to counts on the host, int64 [W, E], with the result on the host. The balanced split is
    computed on `device` if that is a GPU: there and back takes 64 us, on the host 160 to 290 us (4 ranks
    of an H200's host, 256 experts)."""
    if split is split_balanced and device.type == "cuda":
        # host sync: the counts came to the host, and the transport needs the sizes there
        return split(counts_WE.to(device), placement).cpu()
    return split(counts_WE, placement)


@lru_cache(maxsize=1024)
def kernel_for(placement: Placement, device: torch.device) -> SplitKernel | None:
    """The kernel for a placement, or `None` if the device cannot run it."""
    if placement.num_ranks > MOST_RANKS or why_not_hopper(device.index) is not None:
        return None
    return SplitKernel(placement, device)


def split_nearest(counts_WE: Tensor, placement: Placement) -> Tensor:
    """The split by which choices of a rank that has the expert stay there, and those of other ranks are
    shared evenly. Shapes and devices as in `split_balanced`."""
    # host sync: none where the counts are on the host
    counts = counts_WE.cpu().numpy()
    layout = layout_of(placement)
    rows = layout.fixed_rows(counts)
    homes = [home(source, len(counts), placement.num_ranks) for source in range(len(counts))]
    for expert, slots in layout.several:
        number = len(slots)
        for source, count in enumerate(counts[:, expert].tolist()):
            near = next((slot for slot in slots if layout.rank_of[slot] == homes[source]), None)
            if near is not None:
                rows[source, near] = count
                continue
            for place, slot in enumerate(slots):
                rows[source, slot] = count * (place + 1) // number - count * place // number
    return torch.from_numpy(rows).to(counts_WE.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A placement in the form in which the splits use it.

    fixed_slots, fixed_experts: those of experts with one replica. several: the other experts, with their
    slots. rank_of: the rank of every slot. J numbers the slots in `several`, expert by expert. hops: for
    every two ranks that share experts, as `from * num_ranks + to`, the slots J that give and those that take.
    cells: the hop and the slot J that gives.
    """

    num_slots: int
    num_ranks: int
    fixed_slots: Ints
    fixed_experts: Ints
    several: tuple[tuple[int, tuple[int, ...]], ...]
    rank_of: tuple[int, ...]
    hops: Mapping[int, tuple[Ints, Ints]]
    cells: tuple[Ints, Ints]

    def fixed_rows(self, counts_WE: Ints) -> Ints:
        """The choices of every slot, int64 [W, S], of experts with one replica; 0 for the others."""
        rows = np.zeros((len(counts_WE), self.num_slots), dtype=np.int64)
        rows[:, self.fixed_slots] = counts_WE[:, self.fixed_experts]
        return rows


@lru_cache(maxsize=1024)
def layout_of(placement: Placement) -> Layout:
    """The layout of a placement. It is cached, since every layer uses its own at every call."""
    slots_of: list[list[int]] = [[] for _ in range(placement.num_experts)]
    for slot, expert in enumerate(placement.slots):
        if expert >= 0:
            slots_of[expert].append(slot)
    alone = [expert for expert, slots in enumerate(slots_of) if len(slots) == 1]
    several = tuple((e, tuple(slots)) for e, slots in enumerate(slots_of) if len(slots) > 1)
    rank_of = np.repeat(np.arange(placement.num_ranks), np.diff(placement.rank_offsets)).tolist()
    hops = _hops(several, rank_of, placement.num_ranks)
    cells = [np.full(len(gives), hop) for hop, (gives, _) in hops.items()]
    givers = [gives for gives, _ in hops.values()]
    empty = np.zeros(0, dtype=np.int64)
    return Layout(
        num_slots=placement.num_slots,
        num_ranks=placement.num_ranks,
        fixed_slots=np.array([slots_of[expert][0] for expert in alone], dtype=np.int64),
        fixed_experts=np.array(alone, dtype=np.int64),
        several=several,
        rank_of=tuple(rank_of),
        hops=hops,
        cells=(np.concatenate([empty, *cells]), np.concatenate([empty, *givers])),
    )


def _hops(
    several: Sequence[tuple[int, tuple[int, ...]]], rank_of: Sequence[int], num_ranks: int
) -> dict[int, tuple[Ints, Ints]]:
    hops: dict[int, list[tuple[int, int]]] = {}
    first = 0
    for _, slots in several:
        for gives, takes in permutations(range(len(slots)), 2):
            hop = rank_of[slots[gives]] * num_ranks + rank_of[slots[takes]]
            hops.setdefault(hop, []).append((first + gives, first + takes))
        first += len(slots)
    return {hop: (np.array(pairs)[:, 0], np.array(pairs)[:, 1]) for hop, pairs in hops.items()}


def home(source: int, num_sources: int, num_ranks: int) -> int:
    """The expert-parallel rank of a row of the counts; `-1` if a single row stands for all ranks."""
    return -1 if num_sources < num_ranks else source * num_ranks // num_sources


def even_out(loads: list[int], takes_J: Ints, layout: Layout) -> int:
    """Push choices until the load of the fullest rank is as low as possible. Changes its arguments in place,
    and returns the number of pushes.

    loads: the choices of every rank. takes_J: the choices of every slot of the replicated experts.
    """
    ranks, pushes = len(loads), 0
    cells, givers = layout.cells
    while True:
        flow = np.bincount(cells, takes_J[givers], ranks * ranks).astype(np.int64).tolist()
        fullest = max(range(ranks), key=loads.__getitem__)
        before = _reach(fullest, flow, ranks)
        emptiest = min(before, key=lambda rank: (loads[rank], rank))
        if loads[fullest] - loads[emptiest] < 2:
            return pushes
        pushes += 1
        amount, at = _surplus(loads, fullest, emptiest, list(before)), emptiest
        while at != fullest:
            amount = min(amount, flow[before[at] * ranks + at])
            at = before[at]
        loads[fullest] -= amount
        loads[emptiest] += amount
        at = emptiest
        while at != fullest:
            _shift(takes_J, *layout.hops[before[at] * ranks + at], amount)
            at = before[at]


def _reach(start: int, flow: list[int], ranks: int) -> dict[int, int]:
    """Ranks that tokens of `start` can be pushed to, each with the rank before it on a shortest path."""
    before, level = {start: -1}, [start]
    while level:
        reached = {}
        for rank in sorted(level):
            for other in range(ranks):
                if flow[rank * ranks + other] and other not in before and other not in reached:
                    reached[other] = rank
        before |= reached
        level = list(reached)
    return before


def _surplus(loads: list[int], fullest: int, emptiest: int, reached: list[int]) -> int:
    """The number of tokens to move from the fullest to the emptiest rank: as many as bring one of them to the
    mean of the ranks reached, or half of their difference if that is none."""
    total = sum(loads[rank] for rank in reached)
    over, under = loads[fullest] - -(-total // len(reached)), total // len(reached) - loads[emptiest]
    return min(over, under) or (loads[fullest] - loads[emptiest]) // 2


def _shift(takes_J: Ints, gives: Ints, gets: Ints, amount: int) -> None:
    """Move `amount` tokens from one rank to the next: of the experts that both have, one after the other."""
    stock = takes_J[gives]
    amounts = np.clip(amount - (np.cumsum(stock) - stock), 0, stock)
    takes_J[gives] -= amounts
    takes_J[gets] += amounts


def spread_choices(counts_WE: Ints, placement: Placement) -> Ints:
    """The balanced split of NumPy arrays: int64 [W, E] to int64 [W, S]."""
    layout, num_sources = layout_of(placement), len(counts_WE)
    rows = layout.fixed_rows(counts_WE)
    per_slot = rows.sum(0)
    ends = np.concatenate([[0], np.cumsum(per_slot)])[list(placement.rank_offsets)]
    loads = np.diff(ends).tolist()
    homes = [home(source, num_sources, layout.num_ranks) for source in range(num_sources)]
    counts_by_rank = [counts_WE[:, expert].tolist() for expert, _ in layout.several]
    takes_J = np.array(
        [
            amount
            for of_source, (_, slots) in zip(counts_by_rank, layout.several, strict=True)
            for amount in _stay_home(of_source, homes, [layout.rank_of[slot] for slot in slots])
        ],
        dtype=np.int64,
    )
    flat = [slot for _, slots in layout.several for slot in slots]
    for slot, amount in zip(flat, takes_J.tolist(), strict=True):
        loads[layout.rank_of[slot]] += amount
    even_out(loads, takes_J, layout)
    left = iter(takes_J.tolist())
    for of_source, (_, slots) in zip(counts_by_rank, layout.several, strict=True):
        tokens_on = {layout.rank_of[slot]: next(left) for slot in slots}
        slot_on = {layout.rank_of[slot]: slot for slot in slots}
        for source, at in enumerate(homes):
            if at in tokens_on:
                _assign(rows, of_source, tokens_on, source, at, slot_on)
        for source in range(num_sources):
            for rank in tokens_on:
                _assign(rows, of_source, tokens_on, source, rank, slot_on)
    return rows


def _stay_home(of_source: list[int], homes: list[int], ranks: list[int]) -> list[int]:
    """The number of tokens that each rank of a replicated expert takes at first: its own, and an even share
    of the rest."""
    number_of_rank = dict.fromkeys(ranks, 0)
    rest = 0
    for amount, at in zip(of_source, homes, strict=True):
        if at in number_of_rank:
            number_of_rank[at] += amount
        else:
            rest += amount
    for place, rank in enumerate(ranks):
        number_of_rank[rank] += rest * (place + 1) // len(ranks) - rest * place // len(ranks)
    return list(number_of_rank.values())


def _assign(
    rows: Ints, unassigned: list[int], left: dict[int, int], source: int, rank: int, slot_on: dict[int, int]
) -> None:
    amount = min(unassigned[source], left[rank])
    if amount:
        rows[source, slot_on[rank]] += amount
        unassigned[source] -= amount
        left[rank] -= amount
