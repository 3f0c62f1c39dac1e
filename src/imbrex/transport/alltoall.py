"""Uneven all-to-all: a token crosses once to every rank that wants it, and one partial sum comes back."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from imbrex.codec.cast import pick_rows
from imbrex.contracts import Add, Pending, Traffic
from imbrex.transport.base import BytesTransport
from imbrex.transport.collective import Done, InFlight, Message, Posted

TAG = 1 << 30 | 3 << 16 | 0xFFFF
"""Tells an all-to-all's messages from those of steps and of tiers, whose low bits differ. Those of several
between two ranks match in the order of the calls, as a group's collectives do."""


class AllToAll(BytesTransport):
    """One AlltoAllv each way (TensorRT-LLM's third mode, slides, "AlltoAllv"), each token once per rank.

    Bytes sent: a row for every (token, other rank) pair that is wanted, each way.
    """

    name = "alltoall"

    def begin_move(self, encoded_TB: Tensor, traffic: Traffic) -> Pending:
        send, receive = traffic.splits_2W.tolist()
        return self.scatter_rows("dispatch", pick_rows(encoded_TB, traffic.sent_tokens_N), send, receive)

    def begin_move_back(self, encoded_MB: Tensor, traffic: Traffic, add: Add | None = None) -> Pending:
        send, receive = traffic.splits_2W.tolist()
        return self.scatter_rows("combine", encoded_MB, receive, send)

    def scatter_rows(self, phase: str, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Rows by destination rank, `send[r]` of them to rank r; returns rows by source rank."""
        if self.world_size == 1:
            return Done(rows)
        out = rows.new_empty(sum(receive), rows.shape[1])
        rows = rows.contiguous()
        if not self.groups_messages:
            return self._post_rows(phase, out, rows, send, receive)
        sizes = list(receive), list(send)
        work = self.start(phase, lambda: dist.all_to_all_single(out, rows, *sizes, self.group, async_op=True))
        return InFlight(self, phase, work, out, rows)

    def _post_rows(
        self, phase: str, out: Tensor, rows: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> Pending:
        """The same by messages over gloo, the places for what comes first.

        gloo's own all-to-all sends before it says where rows may be written, so this word of the rank that
        begins later waits behind its rows, and the two directions of a link take turns: 2.1 MB each way over
        1 Gb/s took 31 ms in one call of three, where the link needs 17.
        """
        places, blocks = out.split(list(receive)), rows.split(list(send))
        places[self.rank].copy_(blocks[self.rank])
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        leaving, coming = (
            [Message(rows=side[rank], peer=rank, tag=TAG) for rank in others] for side in (blocks, places)
        )
        sends, receives = self.post(phase, leaving, coming)
        return Posted(self, phase, [*receives, *sends], out, rows)
