"""Tokens that are the same on every rank: each computes its own experts' rows, one AllReduce sums."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.contracts import Pending, Traffic
from imbrex.transport.collective import Collective, Done


class AllReduce(Collective):
    """TensorRT-LLM's first mode: attention under tensor parallelism (slides, "AllReduce").

    Nothing moves on the way out. The loss counts once, not once a rank: the backward sums dx and the routing
    weights' gradients over ranks, so every rank holds the whole gradient of what it holds.
    """

    name = "allreduce"
    replicated = True

    def begin_move(self, encoded_TB: Tensor, traffic: Traffic) -> Pending:
        return Done(encoded_TB[:0])

    def begin_move_back(self, encoded_MB: Tensor, traffic: Traffic) -> Pending:
        return Done(encoded_MB[:0])

    def all_reduce(self, partial_TD: Tensor) -> Tensor:
        if self.world_size == 1:
            return partial_TD
        summed = partial_TD.clone(memory_format=torch.contiguous_format)
        work = self.start("combine", lambda: dist.all_reduce(summed, group=self.group, async_op=True))
        self.finish("combine", work)
        return summed
