"""An all-to-all in two halves, inside the node and between nodes, which move together or in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from imbrex.contracts import Pending
from imbrex.transport.collective import Done
from imbrex.transport.steps import Step, Stepped
from imbrex.transport.tiered import Tiered


class Pipe(Tiered):
    """Moves rows inside the node and between nodes at the same time: Pipe-A2A (ScheMoE, section 5).
    Over gloo all messages of an all-to-all begin at once: there it is one, and gains nothing over `alltoall`.
    Over NCCL, whose stream does one collective after the other, it is two."""

    name = "pipe"

    def scatter_rows(self, phase: str, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        if not self.groups_messages:
            return super().scatter_rows(phase, rows, send, receive)
        return self.scatter_halves(phase, rows, send, receive)

    def scatter_halves(
        self, phase: str, rows: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> Pending:
        """Move the half inside the node and the half between nodes, each by itself."""
        if self.world_size == 1:
            return Done(rows)
        near = [rank // self.nodes.size == self.node for rank in range(self.world_size)]
        parts = list(zip(rows.split(list(send)), near, strict=True))

        def pick(inside: bool) -> Tensor:
            return torch.cat([rows[:0], *(part for part, here in parts if here == inside)])

        halves = [
            Step(
                send=[n * (here == inside) for n, here in zip(send, near, strict=True)],
                receive=[n * (here == inside) for n, here in zip(receive, near, strict=True)],
                arrange=lambda _, inside=inside: pick(inside),
            )
            for inside in (True, False)
        ]
        return _Halves(self.begin_halves(phase, rows, halves), list(receive), near)

    def begin_halves(self, phase: str, rows: Tensor, halves: Sequence[Step]) -> Finish:
        """Begin both halves of rows that lie by destination. The result waits for them: rows from inside the
        node, and rows from other nodes."""
        begun = []
        # Between nodes first: it takes longer.
        for half in reversed(halves):
            assert half.arrange is not None
            picked = half.arrange(rows)
            begun.append(super().scatter_rows(phase, picked, half.send, half.receive))
        return lambda: [half.finish() for half in reversed(begun)]


class Sequential(Pipe):
    """Moves rows inside the node, then between nodes: the baseline of Pipe-A2A (ScheMoE, Eq. 17), and of no
    other use."""

    name = "sequential"

    def scatter_rows(self, phase: str, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        return self.scatter_halves(phase, rows, send, receive)

    def begin_halves(self, phase: str, rows: Tensor, halves: Sequence[Step]) -> Finish:
        stepped = Stepped(self, phase, rows, halves)

        def finish() -> list[Tensor]:
            stepped.finish()
            return stepped.arrived

        return finish


Finish = Callable[[], list[Tensor]]


class _Halves:
    """Both halves under way; `finish` gives the rows of both by source rank."""

    def __init__(self, finish_both: Finish, receive: list[int], near: list[bool]) -> None:
        self.finish_both, self.receive, self.near = finish_both, receive, near

    def finish(self) -> Tensor:
        inside, across = self.finish_both()
        parts, counts = [inside[:0]], [0, 0]
        for count, here in zip(self.receive, self.near, strict=True):
            parts.append((across, inside)[here][counts[here] : counts[here] + count])
            counts[here] += count
        return torch.cat(parts)
