"""Torch's own numbers, by which it names the process groups that only their members make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def named_by(number: int | None = None) -> Iterator[None]:
    """Lets `dist.new_group(..., use_local_synchronization=True)` name a group by `number`, more than a
    rank has of groups, or by torch's own; torch has the numbers from before again after it.

    Up to 2.13 torch names such a group by how many groups the rank knows. Since 2.14 it does so by how many
    have been made and counts this one, on its members alone: the next group of all ranks would have two
    names, and its ranks would wait for each other for ever.
    """
    world: Any = dist.distributed_c10d._world
    names, count = world.pg_names, world.group_count
    stand_ins = {object(): "" for _ in range((number or 0) - len(names))}
    names.update(stand_ins)
    world.group_count = count if number is None else number
    try:
        yield
    finally:
        for stand_in in stand_ins:
            del names[stand_in]
        world.group_count = count
