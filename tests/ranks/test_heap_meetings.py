"""Ranks that met in groups of their own can open a heap together: beside a stand-in for torch's count."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from imbrex.kernels.heap import Meetings, group_alone
from tests.ranks.pool import Pool, Ranks

counted, meetings = 0, Meetings()
"""Of this process: what torch's rendezvous counts, and what we know of it."""


def meet(ranks: Ranks, aligned: bool) -> list[int]:
    """Open a heap, as `SymmetricHeap` does; the name of the meeting that every rank would wait under."""
    global counted

    def alone() -> None:
        global counted
        counted += 1
        groups_made = dist.distributed_c10d._world.group_count
        dist.destroy_process_group(group_alone())
        # Else torch 2.14 gives the next group of all ranks two names.
        assert dist.distributed_c10d._world.group_count == groups_made

    if aligned:
        meetings.catch_up(ranks.group, ranks.device, alone)
    names = [0] * ranks.world_size
    dist.all_gather_object(names, counted, group=ranks.group)
    counted += 1
    meetings.number += 1
    return names


def forget(ranks: Ranks) -> None:
    global counted
    counted, meetings.number = 0, 0


@pytest.mark.parametrize("aligned", [True, False])
def test_ranks_that_met_elsewhere_meet_under_one_name(pool: Pool, aligned: bool) -> None:
    pool.run(4, forget)
    for world in (2, 2, 4, 2, 4):
        found = pool.run(world, meet, aligned)
        one_name = all(len(set(names)) == 1 for names in found)
        assert one_name == (aligned or world == 2)
