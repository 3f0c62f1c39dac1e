"""An all-to-all in which one rank of a node exchanges with the other nodes for all of its ranks."""

from __future__ import annotations

from imbrex.transport.nodes import reorder
from imbrex.transport.steps import Step
from imbrex.transport.twolevel import TwoLevel


class Leader(TwoLevel):
    """Gathers rows on the node's first rank, exchanges them between those, and scatters them inside the node:
    1DH (ScheMoE, section 2; Hetu).

    Bytes between nodes: those of `alltoall`, in one message a pair of nodes. Inside, the first rank's memory
    and link carry every row of the node twice, so it pays only where rows are few and a message between nodes
    is dear.
    """

    name = "1dh"

    def steps(self, counts: list[list[int]]) -> list[Step]:
        """The three steps: to the leader, between leaders, to the ranks. counts: rows by source and rank."""
        return [self._to_the_leader(counts), self._between_leaders(counts), self._to_the_ranks(counts)]

    def _inside(self, node: int) -> range:
        return range(node * self.nodes.size, (node + 1) * self.nodes.size)

    def _nothing(self) -> tuple[list[int], list[int]]:
        return [0] * self.world_size, [0] * self.world_size

    def _to_the_leader(self, counts: list[list[int]]) -> Step:
        send, receive = self._nothing()
        send[self.nodes.rank(self.node, 0)] = sum(counts[self.rank])
        if self.local == 0:
            for rank in self._inside(self.node):
                receive[rank] = sum(counts[rank])
        return Step(send=send, receive=receive)

    def _between_leaders(self, counts: list[list[int]]) -> Step:
        """The step that takes this node's rows, by source and destination, and brings the rows for this node,
        by node, source and destination."""
        send, receive = self._nothing()
        if self.local:
            return Step(send=send, receive=receive)
        ours, nodes = self._inside(self.node), range(self.nodes.num_nodes)
        blocks = {(s, d): counts[s][d] for s in ours for d in range(self.world_size)}
        order = [(s, d) for n in nodes for s in ours for d in self._inside(n)]
        for n in nodes:
            peer = self.nodes.rank(n, 0)
            send[peer] = sum(counts[s][d] for s in ours for d in self._inside(n))
            receive[peer] = sum(counts[s][d] for s in self._inside(n) for d in ours)
        return Step(send=send, receive=receive, arrange=lambda rows: reorder(rows, blocks, order))

    def _to_the_ranks(self, counts: list[list[int]]) -> Step:
        """The step that takes the rows for this node, by source and destination, and brings this rank's, by
        source."""
        send, receive = self._nothing()
        receive[self.nodes.rank(self.node, 0)] = sum(row[self.rank] for row in counts)
        if self.local:
            return Step(send=send, receive=receive)
        ours, sources = self._inside(self.node), range(self.world_size)
        blocks = {(s, d): counts[s][d] for s in sources for d in ours}
        order = [(s, d) for d in ours for s in sources]
        for d in ours:
            send[d] = sum(counts[s][d] for s in sources)
        return Step(send=send, receive=receive, arrange=lambda rows: reorder(rows, blocks, order))
