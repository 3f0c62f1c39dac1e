"""Improves a placement by exchanging replicas between ranks until the fullest rank cannot be lowered.

There are two kinds of moves. The fullest rank swaps a replica with another rank. Or a slot on another rank
changes from a replica of some expert to a replica of one of the fullest rank's experts, so that the fullest
rank carries a smaller share of it. A move is made only if all ranks that it changes end below the fullest
one. So the sorted loads fall with every move, and the search ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from imbrex.placement.packing import Floats, Held, Ints, rank_loads

NEGLIGIBLE = 1e-9
"""An improvement below this share of the mean counts as none, because loads are sums of floats."""
MANY_PAIRS = 1 << 17
"""Swaps above which not all are looked at. Fewer cost less than the search among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A move: on rank `ranks[i]` expert `losses[i]` is replaced by expert `gains[i]`. worst: the load of the
    fullest of the changed ranks afterwards."""

    ranks: tuple[int, ...]
    losses: tuple[int, ...]
    gains: tuple[int, ...]
    worst: float


def apply(replicas_WE: Held, move: Move) -> None:
    """Make a move in place."""
    for rank, loss, gain in zip(move.ranks, move.losses, move.gains, strict=True):
        replicas_WE[rank, loss] = False
        replicas_WE[rank, gain] = True


def best_swap(load_E: Floats, replicas_WE: Held, loads_W: Floats, fullest: int) -> Move | None:
    """The swap of the fullest rank with another after which the fuller of the two has the lowest load."""
    share_E = load_E / replicas_WE.sum(0)
    ours = np.flatnonzero(replicas_WE[fullest] & (share_E > 0))
    if not len(ours):
        return None
    # In flat places, which numpy finds several times faster than pairs.
    ranks, theirs = np.divmod(np.flatnonzero(replicas_WE & ~replicas_WE[fullest]), replicas_WE.shape[1])
    if not len(ranks):
        return None
    if len(ours) * len(ranks) > MANY_PAIRS:
        ours = ours[[_best_of_ours(share_E, replicas_WE, loads_W, fullest, ours, ranks, theirs)]]
    less = share_E[ours][:, None] - share_E[theirs]
    worst = np.maximum(loads_W[fullest] - less, loads_W[ranks] + less)
    worst[replicas_WE[:, ours][ranks].T] = np.inf
    at = int(worst.argmin())
    mine, other = divmod(at, len(ranks))
    expert, back, rank = int(ours[mine]), int(theirs[other]), int(ranks[other])
    if not np.isfinite(worst[mine, other]):
        return None
    return Move(
        ranks=(fullest, rank), losses=(expert, back), gains=(back, expert), worst=float(worst[mine, other])
    )


def _best_of_ours(
    share_E: Floats,
    replicas_WE: Held,
    loads_W: Floats,
    fullest: int,
    ours: Ints,
    ranks: Ints,
    theirs: Ints,
) -> int:
    """The place in `ours` of the first expert that has one of the best swaps.

    The smaller the share that comes back, the lower is the fullest rank afterwards and the higher the other.
    So of a rank's experts, sorted by their shares, the best stands where these loads cross, or just before:
    of every rank two swaps are looked at instead of all, and the lowest load is the same float.
    """
    order = np.lexsort((share_E[theirs], ranks))
    sorted_N = share_E[theirs][order]
    present, starts, sizes = np.unique(ranks[order], return_index=True, return_counts=True)

    def loads(place_GR: Ints) -> tuple[Floats, Floats]:
        """The loads of the fullest rank and of the other, if the expert at this place of it comes back."""
        less = share_E[ours][:, None] - sorted_N[np.clip(starts + place_GR, 0, len(sorted_N) - 1)]
        return loads_W[fullest] - less, loads_W[present] + less

    low = np.zeros((len(ours), len(present)), dtype=np.int64)
    high = np.broadcast_to(sizes, low.shape)
    for _ in range(int(sizes.max()).bit_length()):
        middle = (low + high) // 2
        falls, rises = loads(middle)
        crossed = (falls >= rises) | (low >= high)
        low, high = np.where(crossed, low, middle + 1), np.where(crossed, np.minimum(middle, high), high)
    worst_GR = np.full(low.shape, np.inf)
    for place in (low - 1, low):
        there = (place >= 0) & (place < sizes)
        worst_GR = np.where(there, np.minimum(worst_GR, np.maximum(*loads(place))), worst_GR)
    worst_GR[replicas_WE[present][:, ours].T] = np.inf
    return int(worst_GR.min(1).argmin())


def best_replacement(load_E: Floats, replicas_WE: Held, loads_W: Floats, fullest: int) -> Move | None:
    """The best change of a slot from an expert with several replicas to an expert of the fullest rank: the
    one after which the fullest of the changed ranks has the lowest load."""
    counts_E = replicas_WE.sum(0)
    share_E = load_E / counts_E
    slot_ranks, slot_experts = np.divmod(np.flatnonzero(replicas_WE & (counts_E > 1)), len(load_E))
    elsewhere = slot_ranks != fullest
    slot_ranks, slot_experts = slot_ranks[elsewhere], slot_experts[elsewhere]
    gainers = np.flatnonzero(replicas_WE[fullest] & (share_E > 0))
    if not len(slot_ranks) or not len(gainers):
        return None
    more_N = load_E[slot_experts] / np.maximum(counts_E[slot_experts] - 1, 1) - share_E[slot_experts]
    less_G = share_E[gainers] - load_E[gainers] / (counts_E[gainers] + 1)
    # [slots, gainers, ranks]: rises of the loser's other ranks, falls of the gainer's, and the slot's own.
    rises, falls = (replicas_WE[:, slot_experts] * more_N).T, (replicas_WE[:, gainers] * less_G).T
    change = rises[:, None, :] - falls[None]
    rows = np.arange(len(slot_ranks))
    own = load_E[gainers] / (counts_E[gainers] + 1) - share_E[slot_experts][:, None]
    change[rows[:, None], np.arange(len(gainers)), slot_ranks[:, None]] = own
    after = np.where(change != 0, loads_W + change, -np.inf)
    # It may hold both experts, and gain from one what it loses to the other.
    after[:, :, fullest] = loads_W[fullest] + change[:, :, fullest]
    worst = after.max(2)
    worst[replicas_WE[slot_ranks][:, gainers] | (slot_experts[:, None] == gainers)] = np.inf
    slot, gainer = divmod(int(worst.argmin()), len(gainers))
    if not np.isfinite(worst[slot, gainer]):
        return None
    return Move(
        ranks=(int(slot_ranks[slot]),),
        losses=(int(slot_experts[slot]),),
        gains=(int(gainers[gainer]),),
        worst=float(worst[slot, gainer]),
    )


def refine(
    load_E: Floats,
    replicas_WE: Held,
    *,
    target: float = 0.0,
    old: Held | None = None,
    max_moves: int | None = None,
) -> Held:
    """Improve a placement until no move lowers the fullest rank, or until its load is at most `target`.
    Returns bool [W, E].

    max_moves: the most experts that ranks must fetch, compared with `old`.
    """
    new_WE = replicas_WE.copy()
    loads = rank_loads(load_E, new_WE)
    gap = NEGLIGIBLE * max(float(loads.mean()), 1e-300)
    while loads.max() > target + gap:
        fullest = int(loads.argmax())
        for find in (best_swap, best_replacement):
            move = find(load_E, new_WE, loads, fullest)
            if move is None or move.worst >= loads[fullest] - gap:
                continue
            if old is None or max_moves is None:
                apply(new_WE, move)
                break
            moved = new_WE.copy()
            apply(moved, move)
            if count_moves(old, moved) <= max_moves:
                new_WE = moved
                break
        else:
            break
        loads = rank_loads(load_E, new_WE)
    return new_WE


def count_moves(old_WE: Held, new_WE: Held) -> int:
    """The number of experts that ranks of the new placement must fetch."""
    return int(np.count_nonzero(new_WE & ~old_WE))


def shake(load_E: Floats, replicas_WE: Held, draw: np.random.Generator, strength: int) -> Held:
    """Make some random swaps and replacements, so that another search starts from somewhere else."""
    new_WE = replicas_WE.copy()
    num_ranks, num_experts = new_WE.shape
    for _ in range(strength):
        first, two = draw.integers(num_ranks, size=2)
        mine = np.flatnonzero(new_WE[first] & ~new_WE[two])
        theirs = np.flatnonzero(new_WE[two] & ~new_WE[first])
        if first != two and len(mine) and len(theirs):
            a, b = draw.choice(mine), draw.choice(theirs)
            new_WE[first, [a, b]] = False, True
            new_WE[two, [a, b]] = True, False
        rank, expert = draw.integers(num_ranks), draw.integers(num_experts)
        spare = np.flatnonzero(new_WE[rank] & (new_WE.sum(0) > 1))
        if len(spare) and not new_WE[rank, expert]:
            new_WE[rank, draw.choice(spare)] = False
            new_WE[rank, expert] = True
    return new_WE
