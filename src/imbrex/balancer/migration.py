"""Moves weights of experts from other ranks' slots to this rank's staging memory, while layers compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.balancer.channel import Channel
from imbrex.balancer.payload import as_row
from imbrex.contracts import Placement
from imbrex.placement.moves import Fetch, fetches
from imbrex.runtime.streams import SideStream, StreamEvent


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A layer's next placement. layer: its place among those attached. tensors: what moves, [e, ...].
    predicted: the balancedness that the plan promises."""

    layer: int
    old: Placement
    new: Placement
    tensors: Mapping[str, Tensor]
    predicted: float = 0.0

    @property
    def fetches(self) -> list[Fetch]:
        return fetches(self.old, self.new)


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """Who this rank is: `expert_rank * tensor_size + tensor_rank` of a channel that only migrations use."""

    channel: Channel
    expert_rank: int
    tensor_rank: int
    tensor_size: int

    @property
    def expert_size(self) -> int:
        return self.channel.size // self.tensor_size

    def rank_of(self, expert_rank: int) -> int:
        return expert_rank * self.tensor_size + self.tensor_rank


class Mover:
    """Moves weights of experts between ranks, as messages over gloo. A message is tagged by migration, fetch
    and tensor, so that what an abandoned migration left behind is never taken for something else. Rows of a
    GPU are copied to the host and back on a stream of their own."""

    name = "messages between hosts"

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self.peers, self.aside = peers, SideStream(device)
        self.queued = StreamEvent(device)

    def prepare(self, nbytes: int) -> None:
        """Get ready before a migration opens, on the stream where weights are queued; collective. nbytes: the
        most that one rank may fetch. Work that the caller has queued so far ends before its tensors are read
        or overwritten."""
        self.queued = StreamEvent(self.aside.device)

    def move(self, number: int, changes: Sequence[Change]) -> dict[tuple[int, int], list[Tensor]]:
        """Rows by (layer, slot) of this rank, uint8, in the order of the tensors. In the background.

        number: of this migration, the same on every rank, never used before.
        Raises RankLostError where a peer does not answer in time, TimeoutError where the GPU does not.
        """
        arrived: dict[tuple[int, int], list[Tensor]] = {}
        works, buffers = [], []
        tag = 0
        me = self.peers.expert_rank
        for change in changes:
            first = change.old.rank_offsets[me]
            for fetch in change.fetches:
                for tensor in change.tensors.values():
                    tag += 1
                    if me not in (fetch.source, fetch.target):
                        continue
                    row = self._empty_row(tensor)
                    if fetch.source == me:
                        self._read(row, as_row(tensor, fetch.from_slot - first))
                    if fetch.target == me:
                        arrived.setdefault((change.layer, fetch.slot), []).append(row)
                    if fetch.source != fetch.target:
                        buffers.append(row)
                        works.append(self._begin(fetch, row, _tag(number, tag)))
        for work in works:
            self.peers.channel.finish("migration", work)
        return arrived

    def _empty_row(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(as_row(tensor, 0), device="cpu", pin_memory=tensor.is_cuda)

    def _read(self, row: Tensor, live: Tensor) -> None:
        done = self.aside.run(lambda: row.copy_(live, non_blocking=True), self.queued)
        done.wait(self.peers.channel.timeout_s)

    def _begin(self, fetch: Fetch, row: Tensor, tag: int) -> dist.Work | None:
        peers = self.peers
        if fetch.source == peers.expert_rank:
            return peers.channel.send(row, peers.rank_of(fetch.target), tag)
        return peers.channel.receive(row, peers.rank_of(fetch.source), tag)

    def close(self) -> None:
        """Free what is held. Not collective."""


def _tag(number: int, index: int) -> int:
    """Migrations take turns over 2^15 numbers, messages of one over 2^15."""
    assert index < 1 << 15, "a migration of more than 32767 rows"
    return (number % (1 << 15) << 15) + index


def land(change: Change, arrived: Mapping[tuple[int, int], Sequence[Tensor]], expert_rank: int) -> int:
    """Write what arrived for this rank into its slots, in place, queued; the bytes written."""
    first, written = change.old.rank_offsets[expert_rank], 0
    for fetch in change.fetches:
        if fetch.target != expert_rank:
            continue
        for tensor, row in zip(change.tensors.values(), arrived[change.layer, fetch.slot], strict=True):
            as_row(tensor, fetch.slot - first).copy_(row, non_blocking=True)
            written += row.numel()
    return written
