"""Process groups that imbrex makes itself: over gloo for hosts, second communicators, the ranks of a node."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from imbrex.runtime import waits
from imbrex.runtime.group_names import named_by
from imbrex.transport.collective import device_of

_hosts: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def hosts_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks over gloo, so that hosts talk without waiting for a GPU; `group` itself if it
    is one. Collective over `group` at the first call."""
    if "nccl" not in str(dist.get_backend(group)):
        return group
    if group not in _hosts:
        _hosts[group] = group_beside(group, "gloo")
    return _hosts[group]


class _Besides:
    """How many groups this rank has made beside others."""

    count = 0


MOST_GROUPS = 10_000
"""More than a rank knows of torch's own."""


def group_beside(
    group: dist.ProcessGroup, backend: str | None = None, ranks: Sequence[int] | None = None
) -> dist.ProcessGroup:
    """A new group of the same ranks, or of those `ranks` of it that this rank is one of. Collective over
    `group`, whose ranks may be in different new groups. backend: `None` is torch's default group's.

    torch names a group that only its members make by how many a rank has had. Ranks with different
    numbers would wait for each other under different names, and a number that comes again, once a group has
    ended, finds the addresses of the old one. So the ranks agree on a number that none of them has had.
    """
    whole = dist.get_process_group_ranks(group)
    members = whole if ranks is None else [whole[rank] for rank in ranks]
    number = torch.tensor([_Besides.count + 1], dtype=torch.int64, device=device_of(group))
    agree = partial(dist.all_reduce, number, dist.ReduceOp.MAX, group, async_op=True)
    waits.run("set-up", agree, on_host=not number.is_cuda, group=group)
    # host sync: once for each group
    _Besides.count = int(number.item())
    with named_by(MOST_GROUPS + _Besides.count):
        twin = dist.new_group(members, backend=backend, use_local_synchronization=True)
    assert isinstance(twin, dist.ProcessGroup)
    return twin
