"""The sizes of every message of a transport that relays: which rows cross to which node, and to which ranks
they are relayed there.

Tokens go in pieces, ranges of token numbers, so that one piece is relayed inside a node while the next
crosses. Sizes are exchanged once a plan and serve all four crossings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from imbrex.contracts import Traffic
from imbrex.runtime.words import words
from imbrex.transport.base import straight
from imbrex.transport.nodes import Nodes

LEAST_ROWS = 128
"""The fewest rows of a piece, on the rank that sends most to a node; smaller pieces are joined."""


def count_pieces(wanted_TW: Tensor, nodes: Nodes, pieces: int) -> Tensor:
    """int64 [2, pieces, W]: how many tokens of each piece go to every rank, and to every node, node n in
    place n. Pieces are those of `torch.tensor_split`."""
    counts = []
    for piece_TW in wanted_TW.tensor_split(pieces):
        by_node = piece_TW.unflatten(1, (nodes.num_nodes, nodes.size)).any(2).sum(0)
        padded = torch.nn.functional.pad(by_node, [0, wanted_TW.shape[1] - nodes.num_nodes])
        counts.append(torch.stack([piece_TW.sum(0), padded]))
    return torch.stack(counts, 1)


def join_pieces(counts_2SWW: Tensor) -> Tensor:
    """Join neighbouring pieces until each has enough rows: the same on every rank."""
    while counts_2SWW.shape[1] > 1:
        rows = int(counts_2SWW[1].sum(0).max()) if counts_2SWW.numel() else 0
        if rows >= LEAST_ROWS * counts_2SWW.shape[1]:
            break
        counts_2SWW = counts_2SWW.unflatten(1, (-1, 2)).sum(2)
    return counts_2SWW


def relay_traffic(wanted_TW: Tensor, counts_2SWW: Tensor, marks_XM: Tensor, rank: int) -> Traffic:
    """The traffic of transports that relay. Its hops are `counts_2SWW` on the host, for every piece the rows
    that every rank sends to every other, then for every piece the tokens of every rank that a node wants,
    node n in column n; and the marks of the tokens that this rank passes on, see `Relay`."""
    traffic = straight(wanted_TW, counts_2SWW[0].sum(0), rank)
    return replace(traffic, hops=(counts_2SWW.contiguous(), marks_XM))


def rows_between(traffic: Traffic) -> Tensor:
    """Rows from every rank to every rank, int64 [W, W]."""
    return traffic.hops[0][0].sum(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Relay:
    """The messages of one crossing, seen from `rank`.

    counts: rows by piece, source and destination rank. unique: tokens by piece, source rank and node.
    targets: for every other node, the marks of its tokens that this rank passes on, uint8 [tokens, size]; a
    one for each rank of this node that wants the token.
    """

    nodes: Nodes
    rank: int
    counts: list[list[list[int]]]
    unique: list[list[list[int]]]
    sent_tokens: Sequence[Tensor]
    marks: dict[int, Tensor]

    @staticmethod
    def of(traffic: Traffic, nodes: Nodes, rank: int) -> Relay:
        world = nodes.num_nodes * nodes.size
        counts_2SWW, marks_XM = traffic.hops
        counts, unique = counts_2SWW.tolist()
        node, local = divmod(rank, nodes.size)
        others = [n for n in range(nodes.num_nodes) if n != node]
        arriving = [sum(piece[nodes.rank(n, local)][node] for piece in unique) for n in others]
        marks = dict(zip(others, marks_XM.split(arriving), strict=True))
        tokens = traffic.sent_tokens_N.split([sum(p[rank][d] for p in counts) for d in range(world)])
        return Relay(nodes=nodes, rank=rank, counts=counts, unique=unique, sent_tokens=tokens, marks=marks)

    @property
    def pieces(self) -> range:
        return range(len(self.counts))

    @property
    def node(self) -> int:
        return self.rank // self.nodes.size

    @property
    def local(self) -> int:
        return self.rank % self.nodes.size

    @property
    def others(self) -> list[int]:
        """Numbers of the other nodes."""
        return [n for n in range(self.nodes.num_nodes) if n != self.node]

    @property
    def peers(self) -> list[int]:
        """The other ranks of this node, by their places in it."""
        return [place for place in range(self.nodes.size) if place != self.local]

    def at(self, place: int) -> int:
        """The rank at a place of this node."""
        return self.nodes.rank(self.node, place)

    def counterpart(self, node: int) -> int:
        return self.nodes.rank(node, self.local)

    def rows(self, source: int, target: int) -> list[int]:
        """Rows from one rank to another, by piece."""
        return [piece[source][target] for piece in self.counts]

    def tokens(self, source: int, node: int) -> list[int]:
        """How many tokens of a rank go to a node, by piece."""
        return [piece[source][node] for piece in self.unique]

    def tokens_for(self, node: int) -> Tensor:
        """This rank's tokens that go to another node, ascending, each once."""
        lists = self.sent_tokens[node * self.nodes.size : (node + 1) * self.nodes.size]
        together = torch.cat(list(lists))
        number = sum(self.tokens(self.rank, node))
        if len(together) == number:
            return together.sort().values
        ordered = together.sort().values
        first = torch.ones_like(ordered, dtype=torch.bool)
        first[1:] = ordered[1:] != ordered[:-1]
        return ordered[torch.nonzero_static(first, size=number)[:, 0]]

    def sent(self, *, back: bool) -> Tensor:
        """int64 [W]: rows that this rank sends to every other, its own and those that it relays."""
        rank, sent_W = self.rank, words(*[0] * len(self.sent_tokens))
        for place in self.peers:
            peer = self.at(place)
            if back:
                sources = [peer, *(self.nodes.rank(n, place) for n in self.others)]
                sent_W[peer] = sum(sum(self.rows(source, rank)) for source in sources)
            else:
                sources = [rank, *(self.counterpart(n) for n in self.others)]
                sent_W[peer] = sum(sum(self.rows(source, peer)) for source in sources)
        for n in self.others:
            far = self.counterpart(n)
            sent_W[far] = sum(self.tokens(far, self.node) if back else self.tokens(rank, n))
        return sent_W

    def home(self) -> tuple[Tensor, list[int]]:
        """The token of every row that comes back, and the number of rows by rank. Every rank of this node
        sends its partial sums. Another node sends one sum a token, counted under its first rank."""
        tokens, sizes = [], []
        for rank in range(len(self.sent_tokens)):
            node, place = divmod(rank, self.nodes.size)
            if node == self.node:
                tokens.append(self.sent_tokens[rank])
            elif place == 0:
                tokens.append(self.tokens_for(node))
            sizes.append(len(tokens[-1]) if node == self.node or place == 0 else 0)
        return torch.cat(tokens), sizes


__all__ = ["Relay", "count_pieces", "join_pieces", "relay_traffic", "rows_between"]
