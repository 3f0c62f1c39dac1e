"""An all-to-all in two halves, what stays inside the node and what leaves it: together, or in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from imbrex.contracts import Pending
from imbrex.transport.collective import Done
from imbrex.transport.steps import Step, Stepped
from imbrex.transport.tiered import Tiered


class Pipe(Tiered):
    """Moves what stays inside the node and what leaves it at the same time: Pipe-A2A (ScheMoE, section 5).
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
        """Move the half that stays inside the node and the half that leaves it, each by itself."""
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
        """Rows by destination; the rows that come from inside the node and those from other nodes."""
        begun = []
        # Between nodes first: it takes longer.
        for half in reversed(halves):
            assert half.arrange is not None
            picked = half.arrange(rows)
            begun.append(super().scatter_rows(phase, picked, half.send, half.receive))
        return lambda: [half.finish() for half in reversed(begun)]


class Sequential(Pipe):
    """Moves what stays inside the node, then what leaves it: the exchange that Pipe-A2A is compared with
    (ScheMoE, Eq. 17). Nothing else speaks for it."""

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
    """Both halves under way; the rows of both by source rank."""

    def __init__(self, finish_both: Finish, receive: list[int], near: list[bool]) -> None:
        self.finish_both, self.receive, self.near = finish_both, receive, near

    def finish(self) -> Tensor:
        inside, across = self.finish_both()
        parts, counts = [inside[:0]], [0, 0]
        for count, here in zip(self.receive, self.near, strict=True):
            parts.append((across, inside)[here][counts[here] : counts[here] + count])
            counts[here] += count
        return torch.cat(parts)
