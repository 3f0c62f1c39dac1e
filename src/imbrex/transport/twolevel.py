"""All-to-alls for two tiers: what they share, and the 2-D hierarchical one that moves rows as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.contracts import Pending, Traffic
from imbrex.transport.alltoall import AllToAll
from imbrex.transport.collective import Done
from imbrex.transport.nodes import Nodes, reorder
from imbrex.transport.relay import count_pieces, join_pieces, rows_between, splits_with_pieces


class Tiered(AllToAll):
    """An all-to-all that knows which ranks share a node."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        ranks_per_node: int | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(group, timeout=timeout)
        self.nodes = Nodes.of(self.world_size, ranks_per_node)
        self.node, self.local = divmod(self.rank, self.nodes.size)


class TwoLevel(Tiered):
    """2DH: first inside the node, to the rank that shares the destination's place there; then between nodes,
    among ranks of equal place. Tutel's and DeepSpeed's all-to-all, for rows of uneven numbers.

    Bytes between nodes: those of `alltoall`, in W / size - 1 messages a rank instead of W - size. It pays
    where starting a message costs more than moving it twice: small rows, many nodes.
    """

    name = "2dh"
    pieces = 1

    def plan_relays(self, wanted: Sequence[Tensor]) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Collective, of several dispatches at once. From the ranks that want this rank's tokens, bool
        [T, W], itself not counted: rows from every rank to every rank, int64 [W, W] on the host, and the
        fields that `Traffic` has for transports that relay."""
        others = [wanted_TW.clone() for wanted_TW in wanted]
        for wanted_TW in others:
            wanted_TW[:, self.rank] = False
        message = torch.stack([count_pieces(wanted_TW, self.nodes, self.pieces) for wanted_TW in others])
        told = self.exchange_counts(message.flatten()).view(self.world_size, *message.shape)
        counts = [join_pieces(one.permute(1, 2, 0, 3)) for one in told.unbind(1)]
        marks = self.tell_marks(others, counts)
        return [
            (c[0].sum(0), {"splits_2W": splits_with_pieces(c, self.rank), "relay_XM": m})
            for c, m in zip(counts, marks, strict=True)
        ]

    def tell_marks(self, wanted: Sequence[Tensor], counts: Sequence[Tensor]) -> list[Tensor]:
        """uint8 [tokens that this rank passes on, ranks of a node]: which of them want each; here none."""
        return [torch.zeros(0, self.nodes.size, dtype=torch.uint8, device=wanted[0].device) for _ in wanted]

    def begin_move(self, encoded_TB: Tensor, traffic: Traffic) -> Pending:
        rows = encoded_TB[traffic.sent_tokens_N]
        return self._two_steps("dispatch", rows, rows_between(traffic, self.world_size))

    def begin_move_back(self, encoded_MB: Tensor, traffic: Traffic) -> Pending:
        return self._two_steps("combine", encoded_MB, rows_between(traffic, self.world_size).T)

    def _two_steps(self, phase: str, rows: Tensor, counts_WW: Tensor) -> Pending:
        """Rows by destination rank; `counts_WW[s, d]` rows go from s to d. The second step starts when the
        first is waited for."""
        if self.world_size == 1:
            return Done(rows)
        # on the host: the counts that were exchanged
        nodes, counts = self.nodes, counts_WW.tolist()
        ours = {divmod(d, nodes.size): counts[self.rank][d] for d in range(self.world_size)}
        by_place = [(n, p) for p in range(nodes.size) for n in range(nodes.num_nodes)]
        send, receive, arriving = [0] * self.world_size, [0] * self.world_size, {}
        for place in range(nodes.size):
            peer = nodes.rank(self.node, place)
            send[peer] = sum(counts[self.rank][nodes.rank(n, place)] for n in range(nodes.num_nodes))
            for n in range(nodes.num_nodes):
                arriving[place, n] = counts[peer][nodes.rank(n, self.local)]
                receive[peer] += arriving[place, n]
        first = self.scatter_rows(phase, reorder(rows, ours, by_place), send, receive)
        return _Second(self, phase, first, arriving, counts)

    def second_step(self, phase: str, rows: Tensor, arriving: dict, counts: list[list[int]]) -> Tensor:
        nodes = self.nodes
        order = [(place, n) for n in range(nodes.num_nodes) for place in range(nodes.size)]
        send, receive = [0] * self.world_size, [0] * self.world_size
        for n in range(nodes.num_nodes):
            peer = nodes.rank(n, self.local)
            send[peer] = sum(arriving[place, n] for place in range(nodes.size))
            receive[peer] = sum(counts[nodes.rank(n, place)][self.rank] for place in range(nodes.size))
        return self.scatter_rows(phase, reorder(rows, arriving, order), send, receive).finish()


class _Second:
    """The second step of two, begun when it is waited for."""

    def __init__(self, transport: TwoLevel, phase: str, first: Pending, *rest) -> None:
        self.transport, self.phase, self.first, self.rest = transport, phase, first, rest

    def finish(self) -> Tensor:
        return self.transport.second_step(self.phase, self.first.finish(), *self.rest)
