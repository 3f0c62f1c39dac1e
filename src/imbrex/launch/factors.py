"""How the ranks of a run are divided into data, expert and tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """The sizes data * expert * tensor; consecutive ranks share one copy of the experts.

    same_tokens: whether the ranks that share experts have the same tokens (transport `allreduce`).
    """

    data: int
    expert: int
    tensor: int
    same_tokens: bool = False

    @property
    def num_ranks(self) -> int:
        return self.data * self.expert * self.tensor

    @property
    def sharing(self) -> int:
        """The number of ranks that hold one copy of all experts."""
        return self.expert * self.tensor

    @property
    def token_ranks(self) -> int:
        """The number of parts of the global batch."""
        return self.data if self.same_tokens else self.num_ranks

    def part(self, rank: int) -> int:
        """The index of the part of the global batch that `rank` has."""
        return rank // self.sharing if self.same_tokens else rank

    def slice(self, rank: int, batch: int) -> slice:
        """The sequences of the global batch that `rank` has. The sizes of parts differ by at most one."""
        part, parts = self.part(rank), self.token_ranks
        return slice(part * batch // parts, (part + 1) * batch // parts)


def factorise(
    num_ranks: int, *, expert: int | None = None, tensor: int = 1, same_tokens: bool = False
) -> Factors:
    """Divide the ranks. expert: by default all ranks that `tensor` leaves.

    Raises ValueError if the factors do not divide the ranks.
    """
    for name, value in (("--ranks", num_ranks), ("--ep", 1 if expert is None else expert), ("--tp", tensor)):
        if value < 1:
            raise ValueError(f"{name} is {value}: give 1 or more")
    if num_ranks % tensor:
        raise ValueError(f"--tp {tensor} does not divide --ranks {num_ranks}: change one of them")
    expert = num_ranks // tensor if expert is None else expert
    if num_ranks % (expert * tensor):
        raise ValueError(
            f"--ep {expert} x --tp {tensor} does not divide --ranks {num_ranks}: "
            f"use a number of ranks that is a multiple of {expert * tensor}, or other factors"
        )
    return Factors(data=num_ranks // (expert * tensor), expert=expert, tensor=tensor, same_tokens=same_tokens)


def make_groups(
    factors: Factors, timeout_s: float
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Make this rank's two groups: of the ranks that share experts with it, and of those that hold the same
    experts. `None` in place of a group of this rank alone. Every rank must call it."""
    rank, sharing = dist.get_rank(), factors.sharing
    shares, copies = None, None
    for first in range(0, factors.num_ranks, sharing):
        if sharing > 1:
            group = new_group(range(first, first + sharing), timeout_s)
            shares = group if first <= rank < first + sharing else shares
    for place in range(sharing):
        if factors.data > 1:
            group = new_group(range(place, factors.num_ranks, sharing), timeout_s)
            copies = group if rank % sharing == place else copies
    return shares, copies


def new_group(
    ranks: Sequence[int] | None, timeout_s: float, *, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Make a group whose collectives fail after `timeout_s` seconds; `None` for a rank that is not in it."""
    group = dist.new_group(ranks and list(ranks), timedelta(seconds=timeout_s), backend)
    return group if isinstance(group, dist.ProcessGroup) else None
