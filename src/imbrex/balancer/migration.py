"""Weights on their way: from a peer's live slots to staging memory here, while layers compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.balancer.channel import Channel
from imbrex.balancer.payload import as_row
from imbrex.contracts import Placement
from imbrex.placement.moves import Fetch, fetches


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A layer's next placement. layer: its place among those attached. tensors: what moves, [e, ...]."""

    layer: int
    old: Placement
    new: Placement
    tensors: Mapping[str, Tensor]

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

    def rank_of(self, expert_rank: int) -> int:
        return expert_rank * self.tensor_size + self.tensor_rank


class Mover:
    """Moves over gloo. A message is tagged by migration, fetch and tensor, so that what an abandoned
    migration left behind is never taken for something else."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def move(self, number: int, changes: Sequence[Change]) -> dict[tuple[int, int], list[Tensor]]:
        """Rows by (layer, slot) of this rank, uint8 on the host, in the order of the tensors.

        number: of this migration, the same on every rank, never used before.
        Raises RankLostError where a peer does not answer in time.
        """
        arrived: dict[tuple[int, int], list[Tensor]] = {}
        works, kept = [], []
        tag = 0
        me = self.peers.expert_rank
        for change in changes:
            first = change.old.rank_offsets[me]
            for fetch in change.fetches:
                for tensor in change.tensors.values():
                    tag += 1
                    if fetch.source == me:
                        # host sync: gloo sends from the host; peers on one host copy GPU to GPU elsewhere
                        row = as_row(tensor, fetch.from_slot - first).cpu()
                    else:
                        row = (
                            torch.empty_like(as_row(tensor, 0), device="cpu") if fetch.target == me else None
                        )
                    if fetch.target == me and row is not None:
                        place = arrived.setdefault((change.layer, fetch.slot), [])
                        place.append(row.clone() if fetch.source == me else row)
                    if fetch.source != fetch.target and row is not None:
                        kept.append(row)
                        works.append(self._begin(fetch, row, _tag(number, tag)))
        for work in works:
            self.peers.channel.finish("migration", work)
        return arrived

    def _begin(self, fetch: Fetch, row: Tensor, tag: int) -> dist.Work | None:
        peers = self.peers
        if fetch.source == peers.expert_rank:
            return peers.channel.send(row, peers.rank_of(fetch.target), tag)
        return peers.channel.receive(row, peers.rank_of(fetch.source), tag)


def _tag(number: int, index: int) -> int:
    """Migrations take turns over 2^15 numbers, messages of one over 2^15."""
    assert index < 1 << 15, "a migration of more than 32767 rows"
    return (number % (1 << 15) << 15) + index


def land(change: Change, arrived: Mapping[tuple[int, int], Sequence[Tensor]], expert_rank: int) -> int:
    """Write what arrived for this rank into its slots, in place; the bytes written."""
    first, written = change.old.rank_offsets[expert_rank], 0
    for fetch in change.fetches:
        if fetch.target != expert_rank:
            continue
        for tensor, row in zip(change.tensors.values(), arrived[change.layer, fetch.slot], strict=True):
            as_row(tensor, fetch.slot - first).copy_(row)
            written += row.numel()
    if written:
        settle_device(change.tensors.values())
    return written


def settle_device(tensors: Iterable[Tensor]) -> None:
    """Wait for what this thread has queued that writes them: migrations read them from another thread."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        # host sync: only where weights have just been written, and in training before they move
        torch.cuda.current_stream(device).synchronize()
