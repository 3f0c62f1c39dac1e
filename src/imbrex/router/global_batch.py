"""The batch of all ranks seen as one: sums and gathers over groups of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.router import collectives


class GlobalBatch:
    """Reductions over every rank that holds a part of the batch.

    groups: process groups to reduce over one after the other, innermost first: the expert-parallel group,
        then the data-parallel group across expert-parallel groups. Empty: this process holds the whole batch.
        Every rank must belong to every group it passes.

    The order of the ranks is that of the last group, then that of the group before it, and so on. Where
    expert-parallel groups are consecutive ranks this is the order of the ranks themselves.

    Convention: every rank computes the same global loss from these sums, what is differentiated is the SUM of
    the losses of all ranks, and data parallelism averages gradients afterwards. The gradient of `sum` is
    therefore the incoming gradient times the number of ranks; the backward communicates nothing.
    """

    def __init__(self, groups: tuple[dist.ProcessGroup, ...] = ()):
        self.names = [group.group_name for group in groups]
        self.sizes = [group.size() for group in groups]
        self.num_ranks = 1
        self.rank = 0
        for group in groups:
            self.rank += group.rank() * self.num_ranks
            self.num_ranks *= group.size()

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks, same shape and dtype. Differentiable (see the class)."""
        return sum_over_groups(x, self.names, self.sizes)

    def gather(self, x: Tensor) -> Tensor:
        """`x` [...] of every rank as [num_ranks, ...], in the order of `rank`. Not differentiable."""
        gathered = x.detach().unsqueeze(0)
        for name, size in zip(self.names, self.sizes, strict=True):
            gathered = collectives.gather_over_ranks(gathered, name, size).flatten(0, 1)
        return gathered

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of `x` over the ranks before this one, and over all ranks."""
        gathered = self.gather(x)
        return gathered[: self.rank].sum(0), gathered.sum(0)

    def count(self, n: int, device: torch.device) -> Tensor:
        """The sum of the host integer `n` over all ranks: int64 scalar on `device`."""
        return self.sum(torch.full((), n, dtype=torch.int64, device=device))


def sum_over_groups(x: Tensor, names: Sequence[str], sizes: Sequence[int]) -> Tensor:
    """The sum of `x` over groups of ranks, by their names and sizes, one after the other."""
    for name, size in zip(names, sizes, strict=True):
        x = collectives.sum_over_ranks(x, name, size)
    return x
