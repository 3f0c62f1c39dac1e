"""How the ranks of a run divide into data, expert and tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """data * expert * tensor ranks; consecutive ranks share the experts of one copy of the model.

    same_tokens: the ranks that share experts hold the same tokens (transport `allreduce`).
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
        """Ranks that hold one copy of all experts between them."""
        return self.expert * self.tensor

    @property
    def token_ranks(self) -> int:
        """Parts that the global batch is divided into."""
        return self.data if self.same_tokens else self.num_ranks

    def part(self, rank: int) -> int:
        """Which part of the global batch `rank` takes."""
        return rank // self.sharing if self.same_tokens else rank

    def slice(self, rank: int, batch: int) -> slice:
        """The sequences of a global batch that `rank` takes; parts differ by one sequence at most."""
        part, parts = self.part(rank), self.token_ranks
        return slice(part * batch // parts, (part + 1) * batch // parts)


def factorise(
    num_ranks: int, *, expert: int | None = None, tensor: int = 1, same_tokens: bool = False
) -> Factors:
    """`expert` is by default all that `tensor` leaves.

    Raises ValueError where the factors do not divide the ranks.
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
    """This rank's group of ranks that share experts, and its group of ranks with the same experts.

    Every rank must call it. `None` where the group would hold this rank alone.
    """
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
    """A group whose collectives fail after `timeout_s`; `None` for a rank outside it."""
    group = dist.new_group(ranks and list(ranks), timedelta(seconds=timeout_s), backend)
    return group if isinstance(group, dist.ProcessGroup) else None
