"""The base of the all-to-alls that know which ranks share a node."""

from __future__ import annotations

import itertools

import torch.distributed as dist

from imbrex.runtime.streams import Lane
from imbrex.transport.alltoall import AllToAll
from imbrex.transport.nodes import Nodes


class Tiered(AllToAll):
    """An all-to-all that knows which ranks share a node, with a lane that runs the steps after its first."""

    few_bytes = 0

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        ranks_per_node: int | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(group, timeout=timeout)
        nodes = Nodes.of_ranks(self, ranks_per_node)
        if nodes is None:
            raise ValueError(
                f"transport: {self.name} needs nodes of equally many neighbouring ranks, which this group's "
                "are not; give ranks_per_node=, or use transport='alltoall'"
            )
        self.nodes, self.ranks_per_node = nodes, nodes.size
        self.node, self.local = divmod(self.rank, self.nodes.size)
        self.lane = Lane(self.device)
        self._calls = itertools.count()

    def next_call(self) -> int:
        return next(self._calls)
