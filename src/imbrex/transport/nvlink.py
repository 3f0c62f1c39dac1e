"""Kernels that write and read the peers' memory over NVLink, on the GPUs of one host.

No rows pass through the `Transport` contract: the kernels route, move, expand and sum in one, without a host
synchronisation. `imbrex.crossings_nvlink` drives them. Layers that are given the same `Nvlink` object, or its
name and the same group, share one heap.
"""

from __future__ import annotations

import socket
import weakref
import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.contracts import Pending, Placement, Traffic
from imbrex.kernels import exchange_layout as lay
from imbrex.kernels import unavailable
from imbrex.kernels.exchange import NvlinkExchange
from imbrex.kernels.heap import SymmetricHeap
from imbrex.transport.collective import Collective

MOST_RANKS, MOST_CHOICES, ROW_MULTIPLE = 16, 32, 16
TOKENS_MULTIPLE = 64
_shared: weakref.WeakValueDictionary[str, Nvlink] = weakref.WeakValueDictionary()


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What a heap is made for: rows of `row_bytes`, at most `max_tokens` tokens a rank, K choices each."""

    placement: Placement
    max_tokens: int
    top_k: int
    row_bytes: int


class Nvlink(Collective):
    """One heap a group and size, shared by all layers.

    max_tokens: most tokens of a rank in a call; `None`: the most that any rank has in the first call, rounded
    up to 64. Later calls with more raise ValueError.
    dispatch_sms, combine_sms: multiprocessors that each kernel takes.
    """

    name = "nvlink"

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        timeout: float | None = None,
        max_tokens: int | None = None,
        dispatch_sms: int = 24,
        combine_sms: int = 24,
    ) -> None:
        super().__init__(group, timeout=timeout)
        self.max_tokens, self.dispatch_sms, self.combine_sms = max_tokens, dispatch_sms, combine_sms
        self._exchanges: dict[Size, NvlinkExchange] = {}
        reason = self.reason_against()
        if reason is not None:
            raise ValueError(f"transport 'nvlink' does not work here: {reason}; use transport='auto'")

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, *, timeout: float | None = None) -> Nvlink:
        """The one that layers of this group share by name; collective where it is made."""
        key = "" if group is None else group.group_name
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = cls(group, timeout=timeout)
        return found

    def reason_against(self) -> str | None:
        """Why the kernels cannot run on this group, or None. Collective: the same answer on every rank."""
        mine = self._local_reason()
        if self.group is None:
            return mine
        host = zlib.crc32(socket.gethostname().encode())
        device = torch.cuda.current_device() if mine is None else -1
        told = self.exchange_counts(torch.tensor([host, int(mine is not None), device]))
        if told[:, 1].any():
            return mine or f"rank {int(told[:, 1].nonzero()[0])} of the group cannot run it"
        if (told[:, 0] != told[0, 0]).any():
            return "the ranks are on several hosts"
        # on the host: counts are told there
        peers = [device for device in told[:, 2].tolist() if device != torch.cuda.current_device()]
        unreachable = [
            d for d in peers if not torch.cuda.can_device_access_peer(torch.cuda.current_device(), d)
        ]
        told = self.exchange_counts(torch.tensor([len(unreachable)]))
        return "some GPUs cannot reach each other's memory" if told.any() else None

    def _local_reason(self) -> str | None:
        if self.group is None:
            return "there is only one rank, and nothing to move"
        if self.world_size > MOST_RANKS:
            return f"the kernels exchange between at most {MOST_RANKS} ranks, not {self.world_size}"
        if self.device.type != "cuda":
            return "the group does not communicate on GPUs; initialise it with NCCL"
        return unavailable(self.device.index)

    def ready(self, placement: Placement) -> bool:
        """Whether a heap was made for layers of this placement."""
        return any(size.placement == placement for size in self._exchanges)

    def most_tokens(self, placement: Placement) -> int | None:
        """Most tokens of a rank in a call, once that is known."""
        return next((s.max_tokens for s in self._exchanges if s.placement == placement), self.max_tokens)

    def exchange_for(self, placement: Placement, tokens: int, top_k: int, row_bytes: int) -> NvlinkExchange:
        """The kernels and their heap; made at the first call, which is collective and synchronises."""
        for size, exchange in self._exchanges.items():
            if (size.placement, size.top_k, size.row_bytes) == (placement, top_k, row_bytes):
                return exchange
        most = self.max_tokens
        if most is None:
            # host sync: once, to size the heap
            most = int(self.exchange_counts(torch.tensor([tokens])).max())
        most = max(1, -(-most // TOKENS_MULTIPLE)) * TOKENS_MULTIPLE
        size = Size(placement=placement, max_tokens=most, top_k=top_k, row_bytes=row_bytes)
        self._exchanges[size] = self._make(size)
        return self._exchanges[size]

    def _make(self, size: Size) -> NvlinkExchange:
        group, placement = self.group, size.placement
        assert group is not None
        slots = max(len(placement.local(rank)) for rank in range(placement.num_ranks))
        shape = lay.Shape(
            ranks=self.world_size,
            max_tokens=size.max_tokens,
            choices=size.top_k,
            experts=placement.num_experts,
            most_slots=slots,
            row_bytes=size.row_bytes,
            alignment=1,
            row_capacity=self.world_size * size.max_tokens * min(size.top_k, slots),
            token_capacity=(self.world_size - 1) * size.max_tokens,
        )
        device = torch.device("cuda", torch.cuda.current_device())

        def make_heap(nbytes: int) -> SymmetricHeap:
            return SymmetricHeap(group, nbytes, device)

        return NvlinkExchange(make_heap, placement, shape, compact=False, timeout=self.timeout_s)

    def begin_move(self, encoded_TB: Tensor, traffic: Traffic) -> Pending:
        raise AssertionError("the NVLink kernels move rows themselves")

    def begin_move_back(self, encoded_MB: Tensor, traffic: Traffic) -> Pending:
        raise AssertionError("the NVLink kernels move rows themselves")

    def all_reduce(self, partial_TD: Tensor) -> Tensor:
        raise AssertionError("only a replicated transport sums over ranks")

    def close(self) -> None:
        """Free the heaps. Layers that use them cannot be used afterwards."""
        for exchange in self._exchanges.values():
            exchange.close()
        self._exchanges.clear()
