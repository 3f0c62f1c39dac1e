"""Two tiers: ranks inside a node, and nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.runtime.words import words
from imbrex.transport.collective import Collective


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """`num_nodes` nodes of `size` ranks each; rank r is local rank r % size of node r // size."""

    num_nodes: int
    size: int

    @staticmethod
    def of(world_size: int, ranks_per_node: int | None = None) -> Nodes:
        """The nodes, from `ranks_per_node`, or from the launcher (`LOCAL_WORLD_SIZE`, which torchrun sets).
        Without either, all ranks are one node. Raises ValueError if the ranks do not divide into nodes."""
        local_size = os.environ.get("LOCAL_WORLD_SIZE")
        size = min(int(local_size or world_size), world_size) if ranks_per_node is None else ranks_per_node
        if size < 1 or world_size % size:
            raise ValueError(
                f"transport: {world_size} ranks do not divide into nodes of {size}; give ranks_per_node="
            )
        return Nodes(num_nodes=world_size // size, size=size)

    @staticmethod
    def of_ranks(ranks: Collective, ranks_per_node: int | None = None) -> Nodes | None:
        """The nodes as given by hand, or as the launchers of all ranks say on which node each is. None where
        a node is not a block of neighbouring ranks, or nodes differ in size. Collective.

        Raises ValueError, on every rank, where ranks were given different numbers, or one that does not
        divide them.
        """
        by_hand = -1 if ranks_per_node is None else ranks_per_node
        answers_W = ranks.exchange_counts(words(by_hand, launched_on()))
        for rank, by_rank in enumerate(answers_W[:, 0].tolist()):
            if by_rank != by_hand:
                raise ValueError(
                    f"transport: rank {rank} was given other nodes than this rank (ranks_per_node="
                    f"{ranks_per_node}); give every rank of the group the same"
                )
        if ranks_per_node is not None:
            return Nodes.of(ranks.world_size, ranks_per_node)
        return Nodes.in_blocks(answers_W[:, 1].tolist())

    @staticmethod
    def in_blocks(node_of_W: list[int]) -> Nodes | None:
        """The nodes, given the node of every rank; None unless each is one block, all of the same size."""
        names = list(dict.fromkeys(node_of_W))
        size = len(node_of_W) // len(names)
        regular = node_of_W == [name for name in names for _ in range(size)]
        return Nodes(num_nodes=len(names), size=size) if regular else None

    def rank(self, node: int, local: int) -> int:
        return node * self.size + local

    def by_tier(self, of_W: Tensor, rank: int) -> Tensor:
        """The sums [2] of a rank's numbers for every other: over ranks of its node, and of other nodes."""
        inside = torch.arange(len(of_W), device="cpu") // self.size == rank // self.size
        return torch.stack([of_W[inside].sum(), of_W[~inside].sum()])


def launched_on() -> int:
    """The node of this process, as torchrun numbers them; without a launcher all are on one."""
    size, node = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("GROUP_RANK")
    if size is None:
        return 0
    return int(node) if node is not None else dist.get_rank() // int(size) if dist.is_initialized() else 0


def reorder(rows: Tensor, sizes: dict[tuple[int, int], int], order: list[tuple[int, int]]) -> Tensor:
    """Put blocks of rows, which lie in the order of `sizes`, into another order."""
    parts = dict(zip(sizes, rows.split(list(sizes.values())), strict=True))
    return torch.cat([rows[:0], *(parts[key] for key in order)])
