"""One rank of a node speaks for all of them to the other nodes."""

from __future__ import annotations

from torch import Tensor

from imbrex.contracts import Pending, Traffic
from imbrex.transport.collective import Done
from imbrex.transport.nodes import reorder
from imbrex.transport.relay import rows_between
from imbrex.transport.twolevel import TwoLevel


class Leader(TwoLevel):
    """1DH (ScheMoE, section 2; Hetu): gathered on the node's first rank, exchanged between those, scattered
    inside the node.

    Bytes between nodes: those of `alltoall`, in one message a pair of nodes. Inside, the first rank's memory
    and link carry every row of the node twice, so it pays only where rows are few and a message between nodes
    is dear. The second and third step begin when the rows are waited for.
    """

    name = "1dh"

    def begin_move(self, encoded_TB: Tensor, traffic: Traffic) -> Pending:
        rows = encoded_TB[traffic.sent_tokens_N]
        return self._three_steps("dispatch", rows, rows_between(traffic, self.world_size))

    def begin_move_back(self, encoded_MB: Tensor, traffic: Traffic) -> Pending:
        return self._three_steps("combine", encoded_MB, rows_between(traffic, self.world_size).T)

    def _three_steps(self, phase: str, rows: Tensor, counts_WW: Tensor) -> Pending:
        """Rows by destination rank; `counts_WW[s, d]` rows go from s to d."""
        if self.world_size == 1:
            return Done(rows)
        # on the host: the counts that were exchanged
        counts = counts_WW.tolist()
        leader = self.nodes.rank(self.node, 0)
        send, receive = [0] * self.world_size, [0] * self.world_size
        send[leader] = len(rows)
        if self.local == 0:
            for rank in self._inside(self.node):
                receive[rank] = sum(counts[rank])
        return _Led(self, phase, self.scatter_rows(phase, rows, send, receive), counts)

    def _inside(self, node: int) -> range:
        return range(node * self.nodes.size, (node + 1) * self.nodes.size)

    def between_leaders(self, phase: str, rows: Tensor, counts: list[list[int]]) -> Tensor:
        """Rows of this node by source, then destination; returns those for this node by node, source and
        destination."""
        send, receive = [0] * self.world_size, [0] * self.world_size
        if self.local == 0:
            ours = self._inside(self.node)
            blocks = {(s, d): counts[s][d] for s in ours for d in range(self.world_size)}
            nodes = range(self.nodes.num_nodes)
            order = [(s, d) for n in nodes for s in ours for d in self._inside(n)]
            rows = reorder(rows, blocks, order)
            for n in nodes:
                peer = self.nodes.rank(n, 0)
                send[peer] = sum(counts[s][d] for s in ours for d in self._inside(n))
                receive[peer] = sum(counts[s][d] for s in self._inside(n) for d in ours)
        return self.scatter_rows(phase, rows, send, receive).finish()

    def to_the_ranks(self, phase: str, rows: Tensor, counts: list[list[int]]) -> Tensor:
        """Rows for this node by source and destination; returns this rank's by source."""
        send, receive = [0] * self.world_size, [0] * self.world_size
        if self.local == 0:
            blocks = {(s, d): counts[s][d] for s in range(self.world_size) for d in self._inside(self.node)}
            order = [(s, d) for d in self._inside(self.node) for s in range(self.world_size)]
            rows = reorder(rows, blocks, order)
            for d in self._inside(self.node):
                send[d] = sum(counts[s][d] for s in range(self.world_size))
        receive[self.nodes.rank(self.node, 0)] = sum(row[self.rank] for row in counts)
        return self.scatter_rows(phase, rows, send, receive).finish()


class _Led:
    """Rows on their way to the leader, who passes them on when they are waited for."""

    def __init__(self, transport: Leader, phase: str, first: Pending, counts: list[list[int]]) -> None:
        self.transport, self.phase, self.first, self.counts = transport, phase, first, counts

    def finish(self) -> Tensor:
        transport, phase, counts = self.transport, self.phase, self.counts
        arrived = transport.between_leaders(phase, self.first.finish(), counts)
        return transport.to_the_ranks(phase, arrived, counts)
