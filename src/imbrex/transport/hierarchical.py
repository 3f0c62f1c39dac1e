"""A token crosses to a node once and is multiplied there; one sum a node comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from imbrex.contracts import Pending, Traffic
from imbrex.transport.collective import Done
from imbrex.transport.twolevel import TwoLevel

Add = Callable[[Sequence[tuple[Tensor, Tensor]], int], Tensor]
"""Sums encoded rows by target row: (rows, targets) in order, and how many targets there are."""


class Hierarchical(TwoLevel):
    """Deduplicating exchange, as DeepEP's between nodes: rank l of a node talks to ranks l of other nodes.

    Out: a token goes to its counterpart on each node that wants it, with a bit a rank there; that rank passes
    it on inside its node. Back: ranks hand their partial sums to the token's counterpart on their node, which
    adds them in rank order and sends one row.

    Bytes between nodes: one row for every (token, other node) that is wanted, each way. For 2 nodes of 4 and
    8 of 64 experts that is 1.0 row instead of 2.7 with `alltoall`. A sum on the way is rounded by the codec
    once more. Only the crossing between nodes on the way out runs beside the caller's computation.
    """

    name = "hierarchical"
    adds_on_the_way = True

    def begin_move(self, encoded_TB: Tensor, traffic: Traffic) -> Pending:
        if self.world_size == 1:
            return Done(encoded_TB[:0])
        crossing = _Crossing(self, traffic, encoded_TB.shape[0])
        rows = [encoded_TB[:0]]
        for n in crossing.others:
            tokens = crossing.tokens_for(n)
            rows.append(encoded_TB[tokens])
        masks = [crossing.mask_for(n) for n in crossing.others]
        labelled = torch.cat([torch.cat(rows), torch.cat([crossing.no_mask(), *masks])], 1)
        first = self.scatter_rows("dispatch", labelled, crossing.sent, crossing.received)
        return _PassedOn(self, crossing, encoded_TB, first)

    def begin_move_back(self, encoded_MB: Tensor, traffic: Traffic, add: Add | None = None) -> Pending:
        """`add`: how to sum encoded rows. Without, bytes are taken for float32 values."""
        if self.world_size == 1:
            return Done(encoded_MB)
        crossing = _Crossing(self, traffic, None)
        masks = torch.cat([crossing.no_mask(), *(crossing.mask_for(n) for n in crossing.others)])
        told = self.scatter_rows("combine", masks, crossing.sent, crossing.received)
        inside = self._inside_back(encoded_MB, crossing)
        return _Summed(self, crossing, add or add_floats, told, inside)

    def _inside_back(self, encoded_MB: Tensor, crossing: _Crossing) -> Pending:
        """Partial sums to the ranks of this node that brought the tokens."""
        counts, nodes = crossing.counts, self.nodes
        by_source = encoded_MB.split([counts[s][self.rank] for s in range(self.world_size)])
        send, receive, rows = [0] * self.world_size, [0] * self.world_size, [encoded_MB[:0]]
        for place in range(nodes.size):
            peer = nodes.rank(self.node, place)
            for n in range(nodes.num_nodes):
                rows.append(by_source[nodes.rank(n, place)])
                send[peer] += counts[nodes.rank(n, place)][self.rank]
                receive[peer] += counts[nodes.rank(n, self.local)][peer]
        return self.scatter_rows("combine", torch.cat(rows), send, receive)


class _Crossing:
    """Who sends what where, seen from one rank."""

    def __init__(self, transport: Hierarchical, traffic: Traffic, num_tokens: int | None) -> None:
        self.nodes, self.node, self.local = transport.nodes, transport.node, transport.local
        self.rank, world = transport.rank, transport.world_size
        # on the host: splits live there
        table = traffic.splits_2W.tolist()
        self.counts, self.unique = table[2 : 2 + world], table[2 + world :]
        sent = traffic.sent_tokens_N
        # host sync: only where the number of tokens is not known
        most = int(sent.max()) + 1 if num_tokens is None and len(sent) else num_tokens or 0
        self.wanted_TW = torch.zeros(most, world, dtype=torch.bool, device=sent.device)
        self.by_rank = sent.split(self.counts[self.rank])
        for rank, tokens in enumerate(self.by_rank):
            self.wanted_TW[tokens, rank] = True
        self.others = [n for n in range(self.nodes.num_nodes) if n != self.node]
        self.sent, self.received = [0] * world, [0] * world
        for n in self.others:
            peer = self.nodes.rank(n, self.local)
            self.sent[peer], self.received[peer] = self.unique[self.rank][n], self.unique[peer][self.node]

    def ranks_of(self, node: int) -> slice:
        return slice(node * self.nodes.size, (node + 1) * self.nodes.size)

    def tokens_for(self, node: int) -> Tensor:
        """Tokens that a node wants, in order."""
        wanted = self.wanted_TW[:, self.ranks_of(node)].any(1)
        return torch.nonzero_static(wanted, size=self.unique[self.rank][node])[:, 0]

    def mask_for(self, node: int) -> Tensor:
        """uint8 [tokens, size]: which of the node's ranks want each of those."""
        return self.wanted_TW[self.tokens_for(node), self.ranks_of(node)].to(torch.uint8)

    def no_mask(self) -> Tensor:
        return torch.zeros(0, self.nodes.size, dtype=torch.uint8, device=self.wanted_TW.device)

    def split_received(self, rows: Tensor) -> dict[int, Tensor]:
        """What the counterparts on other nodes sent, by node."""
        sizes = [self.received[self.nodes.rank(n, self.local)] for n in self.others]
        return dict(zip(self.others, rows.split(sizes), strict=True))


class _PassedOn:
    """Tokens on their way to this node; waiting for them passes them on inside it."""

    def __init__(
        self, transport: Hierarchical, crossing: _Crossing, encoded_TB: Tensor, first: Pending
    ) -> None:
        self.transport, self.crossing, self.encoded_TB, self.first = transport, crossing, encoded_TB, first

    def finish(self) -> Tensor:
        transport, crossing, width = self.transport, self.crossing, self.encoded_TB.shape[1]
        nodes, world, counts = transport.nodes, transport.world_size, crossing.counts
        arrived = crossing.split_received(self.first.finish())
        rows, send, receive = [self.encoded_TB[:0]], [0] * world, [0] * world
        for place in range(nodes.size):
            peer = nodes.rank(transport.node, place)
            for n in range(nodes.num_nodes):
                source = nodes.rank(n, transport.local)
                if n == transport.node:
                    rows.append(self.encoded_TB[crossing.by_rank[peer]])
                else:
                    chosen = torch.nonzero_static(arrived[n][:, width + place], size=counts[source][peer])
                    rows.append(arrived[n][chosen[:, 0], :width])
                send[peer] += counts[source][peer]
                receive[peer] += counts[nodes.rank(n, place)][transport.rank]
        got = transport.scatter_rows("dispatch", torch.cat(rows), send, receive).finish()
        sizes = [
            counts[nodes.rank(n, place)][transport.rank]
            for place in range(nodes.size)
            for n in range(nodes.num_nodes)
        ]
        blocks = got.split(sizes)
        by_source = [
            blocks[p * nodes.num_nodes + n] for n in range(nodes.num_nodes) for p in range(nodes.size)
        ]
        return torch.cat([got[:0], *by_source])


class _Summed:
    """Partial sums on their way inside the node; waiting for them adds them and sends one row a token."""

    def __init__(
        self, transport: Hierarchical, crossing: _Crossing, add: Add, told: Pending, inside: Pending
    ) -> None:
        self.transport, self.crossing, self.add = transport, crossing, add
        self.told, self.inside = told, inside

    def finish(self) -> Tensor:
        transport, crossing, nodes = self.transport, self.crossing, self.transport.nodes
        masks = crossing.split_received(self.told.finish())
        rows = self.inside.finish()
        blocks = self._by_rank_and_node(rows)
        sums = [rows[:0]]
        for n in crossing.others:
            pieces = []
            for place in range(nodes.size):
                block = blocks[place, n]
                target = torch.nonzero_static(masks[n][:, place], size=len(block))[:, 0]
                pieces.append((block, target))
            sums.append(self.add(pieces, len(masks[n])))
        came = transport.scatter_rows("combine", torch.cat(sums), crossing.received, crossing.sent).finish()
        return self._by_destination(rows, blocks, came)

    def _by_rank_and_node(self, rows: Tensor) -> dict[tuple[int, int], Tensor]:
        """Partial sums by the local rank that computed them and the node of their tokens."""
        nodes, counts = self.transport.nodes, self.crossing.counts
        keys = [(place, n) for place in range(nodes.size) for n in range(nodes.num_nodes)]
        sizes = [
            counts[nodes.rank(n, self.transport.local)][nodes.rank(self.transport.node, place)]
            for place, n in keys
        ]
        return dict(zip(keys, rows.split(sizes), strict=True))

    def _by_destination(self, rows: Tensor, blocks: dict, came: Tensor) -> Tensor:
        """A row for every row sent: a node's sum stands with the first rank there that had the token, and
        zero rows with the others."""
        crossing, transport = self.crossing, self.transport
        empty = (rows[:0], torch.zeros(0, dtype=torch.int64, device=rows.device))
        sizes = [crossing.sent[transport.nodes.rank(n, transport.local)] for n in crossing.others]
        by_node = dict(zip(crossing.others, came.split(sizes), strict=True))
        found = [rows[:0]]
        for rank, tokens in enumerate(crossing.by_rank):
            node, place = divmod(rank, transport.nodes.size)
            if node == transport.node:
                found.append(blocks[place, node])
                continue
            inside = crossing.ranks_of(node)
            earlier = crossing.wanted_TW[:, inside][tokens, :place].any(1)
            index = torch.cumsum(crossing.wanted_TW[:, inside].any(1), 0)[tokens] - 1
            zeros = self.add([empty], len(tokens))
            found.append(torch.where(earlier[:, None], zeros, by_node[node][index]))
        return torch.cat(found)


def add_floats(pieces: Sequence[tuple[Tensor, Tensor]], num_rows: int) -> Tensor:
    """Sums of rows of float32 bytes; a width that is no multiple of 4 is padded."""
    width = pieces[0][0].shape[1]
    wide = -(-width // 4)
    sums = torch.zeros(num_rows, wide, device=pieces[0][0].device)
    for rows, target in pieces:
        padded = torch.nn.functional.pad(rows, [0, 4 * wide - width]).contiguous()
        sums.index_add_(0, target, padded.view(torch.float32).view(len(rows), wide))
    return sums.view(torch.uint8).view(num_rows, 4 * wide)[:, :width].contiguous()
