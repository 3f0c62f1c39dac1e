"""The next placements of the layers that are due, from counts fixed when a migration opens."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from imbrex.balancer.channel import Channel
from imbrex.balancer.counts import Iteration
from imbrex.balancer.migration import Change
from imbrex.contracts import Placement
from imbrex.placement.online import Pace, predicted, renew, weigh
from imbrex.placement.packing import Ints
from imbrex.placement.planner import to_held
from imbrex.placement.refine import count_moves
from imbrex.runtime.problems import attempt
from imbrex.runtime.words import words


@dataclass(frozen=True, kw_only=True, slots=True)
class DueLayer:
    """A layer whose placement is due to be renewed. layer: its index among the attached layers. recent: the
    counts of its last iterations, the oldest first."""

    layer: int
    recent: Sequence[Iteration]
    placement: Placement
    tensors: Mapping[str, Tensor]
    pace: Pace


Renew = Callable[..., Placement | None]
"""The next placement of a layer, or `None`; with the arguments of `imbrex.placement.online.renew`."""


def plan(layers: Sequence[DueLayer], others: Channel | None, renew: Renew = renew) -> list[Change]:
    """Plan new placements. They are the same on every rank, because all ranks have the same counts and
    `renew` is deterministic.

    others: the ranks that hold the same experts and have other tokens; their counts are added. Raises
    ValueError if `renew` gives a placement that cannot follow the present one.
    """
    changes = []
    for layer in layers:
        recent = _of_all_data_ranks([i.counts_WE for i in layer.recent], others)
        recent_HE, whole_HE = (weigh(recent, layer.pace.decay, apart=apart) for apart in (True, False))
        new = renew(recent_HE, layer.placement, layer.pace, whole_HE=whole_HE) if len(recent_HE) else None
        if new is not None:
            _check_successor(layer.placement, new, layer.pace.max_moves)
            promised = 1 / (1 + predicted(whole_HE, to_held(new), layer.pace.split))
            change = Change(
                layer=layer.layer, old=layer.placement, new=new, tensors=layer.tensors, predicted=promised
            )
            changes.append(change)
    return changes


def checksum_of(changes: Sequence[Change]) -> int:
    """A number above 0 that differs where placements do."""
    return zlib.crc32(repr([(c.layer, c.new.slots) for c in changes]).encode()) + 1


def agree_on_plan(make: Callable[[], list[Change]], group: Channel) -> list[Change]:
    """Plan by a policy of somebody's own. Raises what it raises; and ValueError, on every rank, where ranks
    have different plans, before they wait for weights that nobody sends."""
    changes, problem = attempt(make)
    ours = words(0 if changes is None else checksum_of(changes))
    checksums = group.meet("plan", ours).numpy().ravel().tolist()
    if problem is not None:
        raise problem
    assert changes is not None
    different = [rank for rank, other in enumerate(checksums) if other != checksums[0]]
    if different:
        raise ValueError(
            f"balancer: renew gave another placement on rank {different[0]} than on rank 0, or failed on one "
            "of them; let it depend on nothing but its arguments"
        )
    return changes


def _check_successor(old: Placement, new: Placement, max_moves: int) -> None:
    """Raise ValueError unless `new` has the experts and the slots per rank of `old`, and ranks need not fetch
    more than `max_moves` experts."""
    if (new.num_experts, new.rank_offsets) != (old.num_experts, old.rank_offsets):
        raise ValueError(
            f"balancer: a new placement has {new.num_experts} experts in slots {new.rank_offsets}; give one "
            f"of {old.num_experts} experts in {old.rank_offsets}"
        )
    moves = count_moves(to_held(old), to_held(new))
    if moves > max_moves:
        raise ValueError(f"balancer: a new placement fetches {moves} experts; fetch at most {max_moves}")


def _of_all_data_ranks(recent: Sequence[Ints], others: Channel | None) -> Sequence[Ints]:
    """Iterations with the sources of all data ranks, which take their steps together: they pair from the last
    one back."""
    if others is None:
        return recent
    common = int(others.meet("counts", words(len(recent))).min())
    if not common:
        return []
    counts = others.meet("counts", torch.from_numpy(np.stack(recent[len(recent) - common :])))
    return list(counts.transpose(0, 1).flatten(1, 2).numpy())
