"""All-to-alls for two tiers that move every row as it is: 2-D hierarchical, and both tiers at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.contracts import Pending, Traffic
from imbrex.transport.alltoall import AllToAll
from imbrex.transport.collective import Done
from imbrex.transport.nodes import Nodes, count_nodes, reorder


class TwoLevel(AllToAll):
    """2DH: first inside the node, to the rank that shares the destination's place there; then between nodes,
    among ranks of equal place. Tutel's and DeepSpeed's all-to-all, for rows of uneven numbers.

    Bytes between nodes: those of `alltoall`, in W / size - 1 messages a rank instead of W - size. It pays
    where starting a message costs more than moving it twice: small rows, many nodes.
    """

    name = "2dh"

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

    def count_nodes(self, wanted_TW: Tensor) -> Tensor:
        """Tokens that each node wants of a rank whose tokens are wanted so; nobody sends to itself."""
        return count_nodes(wanted_TW, self.nodes)

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


class Pipe(AllToAll):
    """Pipe-A2A (ScheMoE, section 5): what stays inside the node and what leaves it move at the same time, as
    two all-to-alls. gloo starts all messages of one all-to-all at once anyway, so there it gains nothing."""

    name = "pipe"

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        ranks_per_node: int | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(group, timeout=timeout)
        self.nodes = Nodes.of(self.world_size, ranks_per_node)

    def scatter_rows(self, phase: str, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        if self.world_size == 1:
            return Done(rows)
        node = self.rank // self.nodes.size
        near = [rank // self.nodes.size == node for rank in range(self.world_size)]
        begun = []
        parts = rows.split(list(send))
        # Between nodes first: it takes longer.
        for inside in (False, True):
            chosen = [n * (here == inside) for n, here in zip(send, near, strict=True)]
            arriving = [n * (here == inside) for n, here in zip(receive, near, strict=True)]
            picked = [rows[:0], *(part for part, here in zip(parts, near, strict=True) if here == inside)]
            begun.append(super().scatter_rows(phase, torch.cat(picked), chosen, arriving))
        return _Both(begun, list(receive), near)


class _Both:
    """Two all-to-alls under way; the rows of both by source rank."""

    def __init__(self, begun: list[Pending], receive: list[int], near: list[bool]) -> None:
        self.begun, self.receive, self.near = begun, receive, near

    def finish(self) -> Tensor:
        halves = [pending.finish() for pending in self.begun]
        parts, taken = [halves[0][:0]], [0, 0]
        for count, inside in zip(self.receive, self.near, strict=True):
            parts.append(halves[inside][taken[inside] : taken[inside] + count])
            taken[inside] += count
        return torch.cat(parts)


def rows_between(traffic: Traffic, world_size: int) -> Tensor:
    """Rows from every rank to every rank, int64 [W, W]; see `plan.splits_with_nodes`."""
    return traffic.splits_2W[2 : 2 + world_size]
