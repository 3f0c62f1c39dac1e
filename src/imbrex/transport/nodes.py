"""Two tiers: ranks inside a node, and nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """`num_nodes` nodes of `size` ranks each; rank r is local rank r % size of node r // size."""

    num_nodes: int
    size: int

    @staticmethod
    def of(world_size: int, ranks_per_node: int | None = None) -> Nodes:
        """By hand, or as the launcher says (`LOCAL_WORLD_SIZE`, which torchrun sets); without either, all
        ranks are one node. Raises ValueError where the ranks do not divide into nodes."""
        told = os.environ.get("LOCAL_WORLD_SIZE")
        size = ranks_per_node or min(int(told or world_size), world_size)
        if size < 1 or world_size % size:
            raise ValueError(
                f"transport: {world_size} ranks do not divide into nodes of {size}; give ranks_per_node="
            )
        return Nodes(num_nodes=world_size // size, size=size)

    @staticmethod
    def if_they_divide(world_size: int, ranks_per_node: int | None = None) -> Nodes | None:
        """As `of`; None where the launcher's number does not divide the ranks."""
        try:
            return Nodes.of(world_size, ranks_per_node)
        except ValueError:
            if ranks_per_node is not None:
                raise
            return None

    def rank(self, node: int, local: int) -> int:
        return node * self.size + local

    def by_tier(self, of_W: Tensor, rank: int) -> Tensor:
        """Sums [2] of what a rank has for every other: for those of its node, for those of other nodes."""
        inside = torch.arange(len(of_W)) // self.size == rank // self.size
        return torch.stack([of_W[inside].sum(), of_W[~inside].sum()])


def reorder(rows: Tensor, sizes: dict[tuple[int, int], int], order: list[tuple[int, int]]) -> Tensor:
    """Blocks of rows, which stand in the order of `sizes`, in another order."""
    parts = dict(zip(sizes, rows.split(list(sizes.values())), strict=True))
    return torch.cat([rows[:0], *(parts[key] for key in order)])
