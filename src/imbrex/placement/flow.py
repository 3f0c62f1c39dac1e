"""The replica split that leaves ranks as even as the placement allows, exact, from one batch's counts.

Tokens of an expert flow to any of the ranks that hold it. From the fullest rank, tokens are pushed along a
path of shared experts to the emptiest rank that can be reached, until nothing reachable is two below it.
What is reachable then holds tokens that cannot leave it, so no split has a lower fullest rank (the argument
for optimal semi-matchings, Harvey, Ladner, Lovasz and Tamir 2006; here in bulk).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from imbrex.contracts import Placement


def split_balanced(counts_WE: Tensor, placement: Placement) -> Tensor:
    """The split with the lowest fullest rank; among those, tokens of a rank that has the expert stay there
    where they can.

    counts_WE: int64, choices of every rank for every expert; as many rows as the placement has ranks, a
    multiple of it (tensor ranks), or one. Returns int64 [W, S] on its device, the same on every rank.
    Example: 2 ranks, [[0, 1], [0, 2]], expert 0 wanted 10 times, 1 and 2 twice each: rank 0 computes
    5 + 2 rows and rank 1 as many, while equal shares of 9, 4 and 1 for them would be 8.5 and 5.5.
    """
    # host sync: the split is decided on the host; counts live there already on every current transport
    counts = counts_WE.tolist()
    return torch.tensor(spread_choices(counts, placement), dtype=torch.int64).to(counts_WE.device)


def split_nearest(counts_WE: Tensor, placement: Placement) -> Tensor:
    """Choices of a rank that has the expert stay there; those of other ranks are shared evenly.

    Shapes and devices as in `split_balanced`.
    """
    # host sync: the split is decided on the host; counts live there already on every current transport
    counts = counts_WE.tolist()
    slots_of, rank_of = replicas(placement)
    rows = [[0] * placement.num_slots for _ in counts]
    for expert, slots in enumerate(slots_of):
        for source, row in enumerate(counts):
            near = [s for s in slots if rank_of[s] == home(source, len(counts), placement.num_ranks)]
            for place, slot in enumerate(near or slots):
                number = len(near or slots)
                begin, end = (row[expert] * (place + n) // number for n in (0, 1))
                rows[source][slot] = end - begin
    return torch.tensor(rows, dtype=torch.int64).to(counts_WE.device)


def replicas(placement: Placement) -> tuple[list[list[int]], list[int]]:
    """Slots of every expert, and the rank that owns every slot."""
    slots_of: list[list[int]] = [[] for _ in range(placement.num_experts)]
    rank_of = []
    for rank in range(placement.num_ranks):
        rank_of += [rank] * (placement.rank_offsets[rank + 1] - placement.rank_offsets[rank])
    for slot, expert in enumerate(placement.slots):
        if expert >= 0:
            slots_of[expert].append(slot)
    return slots_of, rank_of


def home(source: int, num_sources: int, num_ranks: int) -> int:
    """Expert rank of a row of the counts; `-1` where a single row stands for all ranks."""
    return -1 if num_sources < num_ranks else source * num_ranks // num_sources


def even_out(loads: list[int], takes: list[dict[int, int]]) -> None:
    """Push tokens until the fullest rank is as low as can be. In place.

    loads: tokens of every rank. takes: of every replicated expert, the tokens that each of its ranks takes.
    """
    experts_on: list[list[int]] = [[] for _ in loads]
    for expert, taken in enumerate(takes):
        for rank in taken:
            experts_on[rank].append(expert)
    settled = False
    while not settled:
        fullest = max(range(len(loads)), key=loads.__getitem__)
        reached = _reach(fullest, takes, experts_on)
        emptiest = min(reached, key=lambda rank: (loads[rank], rank))
        settled = loads[fullest] - loads[emptiest] < 2
        if not settled:
            _push(fullest, emptiest, reached, loads, takes)


def _reach(
    start: int, takes: list[dict[int, int]], experts_on: list[list[int]]
) -> dict[int, tuple[int, int]]:
    """Ranks that tokens of `start` can be pushed to: (rank before it on the path, expert that moves)."""
    reached = {start: (-1, -1)}
    queue = [start]
    for rank in queue:
        for expert in experts_on[rank]:
            if not takes[expert][rank]:
                continue
            for other in takes[expert]:
                if other not in reached:
                    reached[other] = (rank, expert)
                    queue.append(other)
    return reached


def _push(
    start: int,
    end: int,
    reached: dict[int, tuple[int, int]],
    loads: list[int],
    takes: list[dict[int, int]],
) -> None:
    path, at = [], end
    while at != start:
        before, expert = reached[at]
        path.append((before, at, expert))
        at = before
    amount = (loads[start] - loads[end]) // 2
    for source, _, expert in path:
        amount = min(amount, takes[expert][source])
    for source, target, expert in path:
        takes[expert][source] -= amount
        takes[expert][target] += amount
    loads[start] -= amount
    loads[end] += amount


def spread_choices(counts: Sequence[Sequence[int]], placement: Placement) -> list[list[int]]:
    """`split_balanced` on lists: choices of every source for every slot."""
    slots_of, rank_of = replicas(placement)
    num_sources, num_ranks = len(counts), placement.num_ranks
    rows = [[0] * placement.num_slots for _ in counts]
    loads = [0] * num_ranks
    several, takes = [], []
    for expert, slots in enumerate(slots_of):
        if len(slots) == 1:
            for row, of_source in zip(rows, counts, strict=True):
                row[slots[0]] = of_source[expert]
                loads[rank_of[slots[0]]] += of_source[expert]
            continue
        several.append(expert)
        takes.append(_stay_home(expert, slots, counts, rank_of, num_ranks))
    for taken in takes:
        for rank, amount in taken.items():
            loads[rank] += amount
    even_out(loads, takes)
    for expert, taken in zip(several, takes, strict=True):
        wanted = [of_source[expert] for of_source in counts]
        slot_on = {rank_of[slot]: slot for slot in slots_of[expert]}
        left = {slot_on[rank]: amount for rank, amount in taken.items()}
        for source in range(num_sources):
            slot = slot_on.get(home(source, num_sources, num_ranks))
            if slot is not None:
                _assign(rows, wanted, left, source, slot)
        for source in range(num_sources):
            for slot in left:
                _assign(rows, wanted, left, source, slot)
    return rows


def _stay_home(
    expert: int, slots: list[int], counts: Sequence[Sequence[int]], rank_of: list[int], num_ranks: int
) -> dict[int, int]:
    """Tokens that each rank of a replicated expert takes at first: its own, and an even share of the rest."""
    taken = {rank_of[slot]: 0 for slot in slots}
    rest = 0
    for source, of_source in enumerate(counts):
        at = home(source, len(counts), num_ranks)
        if at in taken:
            taken[at] += of_source[expert]
        else:
            rest += of_source[expert]
    for place, rank in enumerate(taken):
        taken[rank] += rest * (place + 1) // len(taken) - rest * place // len(taken)
    return taken


def _assign(rows: list[list[int]], wanted: list[int], left: dict[int, int], source: int, slot: int) -> None:
    amount = min(wanted[source], left[slot])
    rows[source][slot] += amount
    wanted[source] -= amount
    left[slot] -= amount
