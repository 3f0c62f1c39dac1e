"""Memory that every rank can address: the only file that touches torch's symmetric memory.

CUDA back end, one host, no multicast (a multicast object can hold the fabric of a shared host; the kernels
need none). `VirtualHeap` is the same for W ranks in one process on one device, which is how the kernels are
tested.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.runtime import waits
from imbrex.runtime.group_names import named_by


class Heap(Protocol):
    """nbytes of zeroed memory for every rank.

    bases: address of every rank's part, valid on this device. first: the first rank that lives in this
        process.
    local: uint8 [ranks in this process, nbytes].
    """

    bases: tuple[int, ...]
    first: int
    local: Tensor

    def close(self, *, together: bool = True) -> None:
        """Free it. together: all ranks do, and wait for each other first; not where one of them is lost."""
        ...


class VirtualHeap:
    """All ranks of one process on one device."""

    def __init__(self, ranks: int, nbytes: int, device: torch.device | str) -> None:
        nbytes = -(-nbytes // 4096) * 4096
        self.local = torch.zeros(ranks, nbytes, dtype=torch.uint8, device=device)
        start = self.local.data_ptr()
        self.bases = tuple(start + rank * nbytes for rank in range(ranks))
        self.first = 0

    def close(self, *, together: bool = True) -> None:
        self.local = self.local[:0]


class Meetings:
    """The rendezvous for symmetric memory that this process took part in.

    Torch names each by how many the process has had, whatever the group (its issue 196082; in 2.13 still), so
    ranks that met in a smaller group would wait for the others under another name, for ever.
    Those of others in the process, torch's asynchronous tensor parallelism say, are not counted.
    Example: ranks 0 and 1 open a heap, then all four: 2 and 3 meet once alone before.
    """

    def __init__(self) -> None:
        self.number = 0

    def catch_up(
        self, group: dist.ProcessGroup, device: torch.device | str, meet_alone: Callable[[], None]
    ) -> None:
        """Collective: `meet_alone` until this process has had as many as any rank of `group`."""
        newest = torch.tensor(self.number, dtype=torch.int64, device=device)
        dist.all_reduce(newest, dist.ReduceOp.MAX, group=group)
        # host sync: once a heap
        for _ in range(int(newest.item()) - self.number):
            meet_alone()
            self.number += 1


meetings = Meetings()


def group_alone() -> dist.ProcessGroup:
    """A group of this rank that no other needs to hear of, over gloo."""
    with named_by():
        alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    assert isinstance(alone, dist.ProcessGroup)
    return alone


def _meet_alone(device: torch.device) -> None:
    import torch.distributed._symmetric_memory as symmetric

    alone = group_alone()
    symmetric.rendezvous(symmetric.empty(1, dtype=torch.uint8, device=device), group=alone)
    dist.destroy_process_group(alone)


class SymmetricHeap:
    """One rank a process: collective over `group`, whose ranks share a host joined by NVLink.

    Raises RuntimeError where torch cannot map the peers' memory.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device) -> None:
        for name in ("TORCH_SYMM_MEM_DISABLE_MULTICAST",):
            os.environ.setdefault(name, "1")
        import torch.distributed._symmetric_memory as symmetric

        if symmetric.get_backend(device) != "CUDA":
            symmetric.set_backend("CUDA")
        place = device if "nccl" in str(dist.get_backend(group)) else "cpu"
        meetings.catch_up(group, place, lambda: _meet_alone(device))
        self._memory = symmetric.empty(-(-nbytes // 4096) * 4096, dtype=torch.uint8, device=device)
        self._memory.zero_()
        torch.cuda.synchronize(device)
        handle = symmetric.rendezvous(self._memory, group=group)
        meetings.number += 1
        self.bases = tuple(int(pointer) for pointer in handle.buffer_ptrs)
        self.first = handle.rank
        self.local = self._memory[None]
        self._handle = handle
        self._group = group
        dist.barrier(group)

    def view(self, rank: int, offset: int, nbytes: int) -> Tensor:
        """Bytes of the part of `rank`: uint8 [nbytes]."""
        return self._handle.get_buffer(rank, (nbytes,), torch.uint8, storage_offset=offset)

    def close(self, *, together: bool = True) -> None:
        """Collective, unless not `together`: a peer's kernel may still be reading when this rank's are done.

        Raises RankLostError where a rank does not come within `IMBREX_TIMEOUT_S`.
        """
        torch.cuda.synchronize(self._memory.device)
        if together:
            waits.run("close", lambda: dist.barrier(self._group, async_op=True), on_host=True)
        del self._handle
        self._memory = self._memory[:0]
        self.local = self.local[:, :0]
