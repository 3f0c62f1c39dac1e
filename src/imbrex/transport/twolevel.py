"""The 2-D hierarchical all-to-all, which moves rows as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from imbrex.codec.cast import pick_rows
from imbrex.contracts import Add, Pending, Traffic
from imbrex.transport.collective import Done
from imbrex.transport.nodes import reorder
from imbrex.transport.relay import count_pieces, join_pieces, relay_traffic, rows_between
from imbrex.transport.steps import Step, Stepped, rows_sent
from imbrex.transport.tiered import Tiered


class TwoLevel(Tiered):
    """Moves rows first inside the node, to the rank that shares the destination's place there, then between
    nodes: 2DH, Tutel's and DeepSpeed's all-to-all, for rows of uneven numbers.

    Bytes between nodes: those of `alltoall`, in W / size - 1 messages a rank instead of W - size. It pays
    where starting a message costs more than moving it twice: small rows, many nodes.
    """

    name = "2dh"
    relays = True
    pieces = 1

    def plan(self, destinations: Sequence[Tensor], rows: Sequence[Tensor] | None) -> list[Traffic]:
        """Plans whose hops are those of `imbrex.transport.relay`."""
        if self.world_size == 1:
            return super().plan(destinations, rows)
        others = [wanted_TW.clone() for wanted_TW in destinations]
        for wanted_TW in others:
            wanted_TW[:, self.rank] = False
        message = torch.stack([count_pieces(wanted_TW, self.nodes, self.pieces) for wanted_TW in others])
        messages_W = self.exchange_counts(message.flatten()).view(self.world_size, *message.shape)
        counts = [join_pieces(part.permute(1, 2, 0, 3)) for part in messages_W.unbind(1)]
        marks = self.tell_marks(others, counts)
        return [relay_traffic(*call, self.rank) for call in zip(others, counts, marks, strict=True)]

    def fake_hops(self, ids_TK: Tensor, size: Callable[[], Any]) -> list[Tensor]:
        if self.world_size == 1:
            return []
        shape = 2, size(), self.world_size, self.world_size
        counts_2SWW = torch.empty(shape, dtype=torch.int64, device="cpu")
        return [counts_2SWW, ids_TK.new_empty(size(), size(), dtype=torch.uint8)]

    def tell_marks(self, destinations: Sequence[Tensor], counts: Sequence[Tensor]) -> list[Tensor]:
        """uint8 [tokens that this rank relays, ranks of a node]: 1 where the token goes to the rank. Here no
        rank relays tokens."""
        return [
            torch.zeros(0, self.nodes.size, dtype=torch.uint8, device=destinations[0].device)
            for _ in destinations
        ]

    def begin_move(self, encoded_TB: Tensor, traffic: Traffic) -> Pending:
        rows = pick_rows(encoded_TB, traffic.sent_tokens_N)
        return self._begin("dispatch", rows, traffic)

    def begin_move_back(self, encoded_MB: Tensor, traffic: Traffic, add: Add | None = None) -> Pending:
        return self._begin("combine", encoded_MB, traffic)

    def _begin(self, phase: str, rows: Tensor, traffic: Traffic) -> Pending:
        """Begin a move of rows that lie by destination rank."""
        if self.world_size == 1:
            return Done(rows)
        counts_WW = rows_between(traffic)
        counts = (counts_WW.T if phase == "combine" else counts_WW).tolist()
        return Stepped(self, phase, rows, self.steps(counts))

    def rows_sent(self, traffic: Traffic, *, back: bool) -> Tensor:
        if self.world_size == 1:
            return super().rows_sent(traffic, back=back)
        counts_WW = rows_between(traffic)
        return rows_sent(self.steps((counts_WW.T if back else counts_WW).tolist()), self.rank)

    def steps(self, counts: list[list[int]]) -> list[Step]:
        """The two steps, inside the node and between nodes. counts: rows by source and destination."""
        nodes = self.nodes
        ours = {divmod(d, nodes.size): counts[self.rank][d] for d in range(self.world_size)}
        by_place = [(n, p) for p in range(nodes.size) for n in range(nodes.num_nodes)]
        send, receive, arriving = [0] * self.world_size, [0] * self.world_size, {}
        for place in range(nodes.size):
            peer = nodes.rank(self.node, place)
            send[peer] = sum(counts[self.rank][nodes.rank(n, place)] for n in range(nodes.num_nodes))
            for n in range(nodes.num_nodes):
                arriving[place, n] = counts[peer][nodes.rank(n, self.local)]
                receive[peer] += arriving[place, n]
        inside = Step(send=send, receive=receive, arrange=lambda rows: reorder(rows, ours, by_place))
        return [inside, self._between(arriving, counts)]

    def _between(self, arriving: dict[tuple[int, int], int], counts: list[list[int]]) -> Step:
        """The second step. arriving: rows that the first step brought, by (place of the source, node)."""
        nodes = self.nodes
        order = [(place, n) for n in range(nodes.num_nodes) for place in range(nodes.size)]
        send, receive = [0] * self.world_size, [0] * self.world_size
        for n in range(nodes.num_nodes):
            peer = nodes.rank(n, self.local)
            send[peer] = sum(arriving[place, n] for place in range(nodes.size))
            receive[peer] = sum(counts[nodes.rank(n, place)][self.rank] for place in range(nodes.size))
        return Step(send=send, receive=receive, arrange=lambda rows: reorder(rows, arriving, order))
