"""Uneven all-to-all: a token crosses once to every rank that wants it, and one partial sum comes back."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from imbrex.contracts import Handle, Pending
from imbrex.transport.collective import Collective, Done, InFlight


class AllToAll(Collective):
    """One AlltoAllv each way (TensorRT-LLM's third mode, slides, "AlltoAllv"), each token once per rank.

    Bytes sent: a row for every (token, other rank) pair that is wanted, each way.
    """

    name = "alltoall"

    def begin_move(self, encoded_TB: Tensor, handle: Handle) -> Pending:
        send, receive = handle.splits_2W.tolist()
        return self.scatter_rows("dispatch", encoded_TB[handle.sent_tokens_N], send, receive)

    def begin_move_back(self, encoded_MB: Tensor, handle: Handle) -> Pending:
        send, receive = handle.splits_2W.tolist()
        return self.scatter_rows("combine", encoded_MB, receive, send)

    def scatter_rows(self, phase: str, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Rows by destination rank, `send[r]` of them to rank r; returns rows by source rank."""
        if self.world_size == 1:
            return Done(rows)
        out = rows.new_empty(sum(receive), rows.shape[1])
        rows = rows.contiguous()
        try:
            work = dist.all_to_all_single(out, rows, list(receive), list(send), self.group, async_op=True)
        except RuntimeError as error:
            raise self.lost(phase, error) from error
        return InFlight(self, phase, work, out, rows)

    def all_reduce(self, partial_TD: Tensor) -> Tensor:
        raise AssertionError("only a replicated transport sums over ranks")
