"""Uneven all-to-all: a token crosses once to every rank that wants it, and one partial sum comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.codec.cast import pick_rows
from imbrex.contracts import Add, Pending, Traffic
from imbrex.transport.base import BytesTransport
from imbrex.transport.collective import Done, InFlight, Message, Posted

TAG = 1 << 30 | 3 << 16 | 0xFFFF
"""The tag of an all-to-all's messages; those of steps and of tiers have other low bits. Messages of several
all-to-alls between two ranks match in the order of the calls, as a group's collectives do."""
FEW_BYTES = 1 << 16
"""The most bytes from one rank to another for which gloo's own all-to-all is faster than our messages, on
idle and on busy cores. A thread that posts messages holds a connection's lock while it writes. If it computed
before, the thread that it wakes takes its core and spins on that lock for a time slice (4 ms in one crossing
of seven). gloo's own all-to-all is posted by a thread that has slept."""


class AllToAll(BytesTransport):
    """Sends a token once to every rank that it goes to: an uneven all-to-all each way. TensorRT-LLM's third
    mode (slides, "AlltoAllv").

    Bytes sent: a row for every token and other rank that it goes to, each way.
    """

    name = "alltoall"
    few_bytes = FEW_BYTES

    def plan(self, destinations: Sequence[Tensor], rows: Sequence[Tensor] | None) -> list[Traffic]:
        """Plans whose hops are the most rows that any rank sends another, int64 [1]: all ranks know it."""
        rows = self.sizes_of(destinations) if rows is None else rows
        traffics = super().plan(destinations, rows)
        if not self._asks_for_few:
            return traffics
        return [replace(t, hops=(sizes.max().view(1),)) for t, sizes in zip(traffics, rows, strict=True)]

    def fake_hops(self, ids_TK: Tensor, size: Callable[[], Any]) -> list[Tensor]:
        return [torch.empty(1, dtype=torch.int64, device="cpu")] if self._asks_for_few else []

    @property
    def _asks_for_few(self) -> bool:
        return self.few_bytes > 0 and self.world_size > 1 and not self.groups_messages

    def is_few(self, traffic: Traffic, row_bytes: int) -> bool:
        """Whether no rank sends another more than `few_bytes`; the same on all ranks."""
        return (
            bool(traffic.hops) and self._asks_for_few and int(traffic.hops[0]) * row_bytes <= self.few_bytes
        )

    def begin_move(self, encoded_TB: Tensor, traffic: Traffic) -> Pending:
        send, receive = traffic.splits_2W.tolist()
        rows = pick_rows(encoded_TB, traffic.sent_tokens_N)
        return self._way(traffic, rows)("dispatch", rows, send, receive)

    def begin_move_back(self, encoded_MB: Tensor, traffic: Traffic, add: Add | None = None) -> Pending:
        send, receive = traffic.splits_2W.tolist()
        return self._way(traffic, encoded_MB)("combine", encoded_MB, receive, send)

    def _way(self, traffic: Traffic, rows: Tensor) -> Callable[..., Pending]:
        return self.scatter_at_once if self.is_few(traffic, rows.shape[1]) else self.scatter_rows

    def scatter_rows(self, phase: str, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Send rows, ordered by destination, `send[r]` of them to rank r; gives rows by source rank."""
        if self.world_size == 1:
            return Done(rows)
        if self.groups_messages:
            return self.scatter_at_once(phase, rows, send, receive)
        return self._post_rows(phase, rows.contiguous(), send, receive)

    def scatter_at_once(
        self, phase: str, rows: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> Pending:
        """Scatter rows by the group's own all-to-all, on every rank of it."""
        out, rows, sizes = self._room_for(rows, receive), rows.contiguous(), (list(receive), list(send))
        work = self.start(phase, lambda: dist.all_to_all_single(out, rows, *sizes, self.group, async_op=True))
        return InFlight(self, phase, work, out, rows)

    @staticmethod
    def _room_for(rows: Tensor, receive: Sequence[int]) -> Tensor:
        return rows.new_empty(sum(receive), rows.shape[1])

    def _post_rows(self, phase: str, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Scatter rows by messages over gloo, with the receives posted first.

        gloo's own all-to-all sends before it posts its receives. The later of two ranks then announces its
        receive behind its own rows, and the two directions of a link take turns: 2.1 MB each way over 1 Gb/s
        took 31 ms in one call of three, where the link needs 17.
        """
        out = self._room_for(rows, receive)
        places, blocks = out.split(list(receive)), rows.split(list(send))
        places[self.rank].copy_(blocks[self.rank])
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        leaving, coming = (
            [Message(rows=side[rank], peer=rank, tag=TAG) for rank in others] for side in (blocks, places)
        )
        sends, receives = self.post(phase, leaving, coming)
        return Posted(self, phase, [*receives, *sends], out, rows)
