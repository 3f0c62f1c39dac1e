"""Moves weights of experts over NVLink: copy engines write from live slots into memory of the rank that needs
them.

Every rank has staging memory that its peers can address. A rank that has an expert which another one fetches
writes it there, on a stream of its own. At the switch it is copied into the slots, on the device. So no
multiprocessor is used for moving weights, no host waits while layers run, and slots never change their
address.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.balancer.channel import Channel
from imbrex.balancer.migration import Change, Mover, Peers
from imbrex.balancer.payload import as_row, staged_bytes
from imbrex.kernels.heap import SymmetricHeap
from imbrex.runtime.words import words


class PeerMover(Mover):
    """Moves by peer copies. group: the layer's, whose ranks share a host and reach each other's memory.
    make_heap: makes memory that all of them address, from the group, the bytes of each rank and the device.
    """

    name = "peer copies"

    def __init__(
        self,
        peers: Peers,
        device: torch.device,
        group: dist.ProcessGroup,
        make_heap: Callable[[dist.ProcessGroup, int, torch.device], Any] = SymmetricHeap,
    ) -> None:
        super().__init__(peers, device)
        self._group, self._make_heap = group, make_heap
        self._nbytes, self._stuck = 0, False
        self._heap: Any = None
        self._parts: list[Tensor] = []

    def prepare(self, nbytes: int) -> None:
        if nbytes > self._nbytes:
            self._grow(nbytes)
        super().prepare(nbytes)

    def _grow(self, nbytes: int) -> None:
        """Make the heap, or a larger one if more may be fetched than before: in training, once the optimizer
        has its state."""
        if self._heap is not None:
            self._parts = []
            self._heap.close()
        self._nbytes = nbytes
        self._heap = self._make_heap(self._group, nbytes, self.aside.device)
        ranks = range(self.peers.channel.size)
        self._parts = [self._heap.view(rank, 0, nbytes) for rank in ranks]

    def move(self, number: int, changes: Sequence[Change]) -> dict[tuple[int, int], list[Tensor]]:
        """Moves as `Mover.move` does; the rows lie in this rank's staging memory until the next migration."""
        peers, timeout_s = self.peers, self.peers.channel.timeout_s
        if self._stuck:
            raise RuntimeError("copies of an earlier migration have not ended")
        # Staging memory of the last migration has been read on this rank, and then on all.
        self.queued.wait(timeout_s)
        words_W = peers.channel.meet("migration", words(number, fingerprint(changes)))
        if (words_W != words_W[0]).any():
            raise RuntimeError("ranks planned different migrations")
        arrived: dict[tuple[int, int], list[Tensor]] = {}
        copies, free = [], [0] * peers.expert_size
        me = peers.expert_rank
        for change in changes:
            first = change.old.rank_offsets[me]
            for fetch in change.fetches:
                for tensor in change.tensors.values():
                    begin, size = free[fetch.target], tensor[0].numel() * tensor.element_size()
                    free[fetch.target] = begin + staged_bytes(size)
                    assert free[fetch.target] <= self._nbytes, "more to fetch than was prepared for"
                    staged = self._parts[peers.rank_of(fetch.target)][begin : begin + size]
                    if fetch.source == me:
                        copies.append((staged, as_row(tensor, fetch.from_slot - first)))
                    if fetch.target == me:
                        arrived.setdefault((change.layer, fetch.slot), []).append(staged)

        def copy_all() -> None:
            for staged, live in copies:
                staged.copy_(live, non_blocking=True)

        self._stuck = True
        self.aside.run(copy_all, self.queued).wait(timeout_s)
        self._stuck = False
        return arrived

    def close(self) -> None:
        self._parts = []
        if self._heap is not None:
            self._heap.close(together=False)
        self._heap = None


def fingerprint(changes: Sequence[Change]) -> int:
    """A number that is the same on ranks which are to make the same changes."""
    return zlib.crc32(repr([(change.layer, change.new.slots) for change in changes]).encode())


def reach_each_other(channel: Channel, device: torch.device) -> bool:
    """Whether GPUs of one host, one a rank, can address each other's memory. Collective over the channel."""
    mine = device.index if device.type == "cuda" and device.index is not None else -1
    if device.type == "cuda" and mine < 0:
        mine = torch.cuda.current_device()
    hosts_W2 = channel.meet("handshake", words(zlib.crc32(socket.gethostname().encode()), mine))
    devices = hosts_W2[:, 1].tolist()
    fine = (
        bool((hosts_W2[:, 0] == hosts_W2[0, 0]).all())
        and min(devices) >= 0
        and len(set(devices)) == len(devices)
    )
    fine = fine and all(torch.cuda.can_device_access_peer(mine, other) for other in devices if other != mine)
    return bool(channel.meet("handshake", words(fine)).all())
