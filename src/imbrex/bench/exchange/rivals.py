"""The rivals of an exchange: its job by NCCL collectives, to the same layout, which is what a user would
write without the exchange's kernels.

Both know nothing beforehand: ids and weights cross too, counts reach the host where all-to-all needs them
there. Rows of a slot are ordered as ours, but for the own rank's, which come last; padding is left out, which
favours them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.bench.exchange.job import Job, gather
from imbrex.runtime.waits import reduce_scatter_single


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """The result of a dispatch.

    pool_PD: compact rows (all tokens for AllGather). rows_RD: expert-major, or None. source_R: pool row
    of a row. send, receive: rows to and from every rank. tokens_N: own tokens sent.
    """

    pool_PD: Tensor
    rows_RD: Tensor | None
    source_R: Tensor
    weights_R: Tensor
    send: list[int]
    receive: list[int]
    tokens_N: Tensor


class AllToAll:
    """One uneven all-to-all of rows, one of ids and weights; a token once to a rank."""

    name = "nccl-a2a"

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.local = job, rank, job.E // job.W

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, expert: bool) -> Moved:
        ranks_TW = torch.zeros(len(x), self.job.W, dtype=torch.bool, device=x.device)
        ranks_TW.scatter_(1, ids // self.local, True)
        ranks_TW[:, self.rank] = False
        counts = ranks_TW.sum(0)
        there = torch.empty_like(counts)
        dist.all_to_all_single(there, counts)
        # host sync: all-to-all takes its splits on the host
        send, receive = torch.stack([counts, there]).tolist()
        tokens = torch.nonzero_static(ranks_TW.T, size=sum(send))[:, 1]
        pool = self._cross(x[tokens], send, receive)
        if not expert:
            return Moved(
                pool_PD=pool,
                rows_RD=None,
                source_R=tokens,
                weights_R=weights,
                send=send,
                receive=receive,
                tokens_N=tokens,
            )
        pool_ids = torch.cat([self._cross(ids[tokens], send, receive), ids])
        pool_weights = torch.cat([self._cross(weights[tokens], send, receive), weights])
        slot = pool_ids - self.rank * self.local
        slot = torch.where((slot < 0) | (slot >= self.local), self.local, slot).flatten()
        order = torch.argsort(slot, stable=True)
        # host sync: how many rows the experts get
        rows = int((slot < self.local).sum())
        order = order[:rows]
        source = order // self.job.K
        pool = torch.cat([pool, x])
        return Moved(
            pool_PD=pool,
            rows_RD=pool[source],
            source_R=source,
            weights_R=pool_weights.flatten()[order],
            send=send,
            receive=receive,
            tokens_N=tokens,
        )

    def _cross(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows, receive, send)
        return out

    def combine(self, rows: Tensor, own: Tensor | None, moved: Moved) -> Tensor:
        """Sum at home: expert-major `rows`, or the sums `rows` of received tokens and `own` of the own."""
        if own is None:
            sums = torch.zeros(len(moved.pool_PD), rows.shape[1], device=rows.device)
            sums.index_add_(0, moved.source_R, rows * moved.weights_R[:, None])
            received = sum(moved.receive)
            rows, own = sums[:received].bfloat16(), sums[received:]
        back = rows.new_empty(sum(moved.send), rows.shape[1])
        dist.all_to_all_single(back, rows, moved.send, moved.receive)
        return own.float().index_add_(0, moved.tokens_N, back.float()).bfloat16()


class GatherScatter:
    """AllGather of tokens, ids and weights; ReduceScatter of the sums."""

    name = "nccl-agrs"

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.local = job, rank, job.E // job.W

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, expert: bool) -> Moved:
        pool = gather(x).view(-1, x.shape[1])
        all_ids, all_weights = gather(ids).flatten(), gather(weights).flatten()
        slot = all_ids - self.rank * self.local
        slot = torch.where((slot < 0) | (slot >= self.local), self.local, slot)
        if not expert:
            return Moved(
                pool_PD=pool,
                rows_RD=None,
                source_R=slot,
                weights_R=all_weights,
                send=[],
                receive=[],
                tokens_N=slot,
            )
        order = torch.argsort(slot, stable=True)
        # host sync: how many rows the experts get
        order = order[: int((slot < self.local).sum())]
        source = order // self.job.K
        return Moved(
            pool_PD=pool,
            rows_RD=pool[source],
            source_R=source,
            weights_R=all_weights[order],
            send=[],
            receive=[],
            tokens_N=source,
        )

    def combine(self, rows: Tensor, own: Tensor | None, moved: Moved) -> Tensor:
        """Sum at home: expert-major `rows` or, with `own`, `rows` that are already sums of all tokens."""
        if own is None:
            sums = torch.zeros(len(moved.pool_PD), rows.shape[1], device=rows.device)
            sums.index_add_(0, moved.source_R, rows * moved.weights_R[:, None])
            rows = sums.bfloat16()
        out = rows.new_empty(self.job.T, rows.shape[1])
        reduce_scatter_single(out, rows)
        return out
