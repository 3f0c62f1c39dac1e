"""An all-to-all in two halves, what stays inside the node and what leaves it: together, or in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from imbrex.contracts import Pending
from imbrex.transport.collective import Done
from imbrex.transport.twolevel import Tiered

Half = Callable[[bool], Pending]
"""Begins the half inside the node or, given False, that between nodes."""


class Pipe(Tiered):
    """Pipe-A2A (ScheMoE, section 5): both halves move at the same time, as two all-to-alls. gloo starts all
    messages of one all-to-all at once anyway, so there it gains nothing over `alltoall`; NCCL's one stream
    does one after the other."""

    name = "pipe"

    def scatter_rows(self, phase: str, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        if self.world_size == 1:
            return Done(rows)
        near = [rank // self.nodes.size == self.node for rank in range(self.world_size)]
        parts = rows.split(list(send))
        scatter = super().scatter_rows

        def begin(inside: bool) -> Pending:
            chosen = [n * (here == inside) for n, here in zip(send, near, strict=True)]
            arriving = [n * (here == inside) for n, here in zip(receive, near, strict=True)]
            picked = [rows[:0], *(part for part, here in zip(parts, near, strict=True) if here == inside)]
            return scatter(phase, torch.cat(picked), chosen, arriving)

        return self.begin_halves(begin, list(receive), near)

    def begin_halves(self, begin: Half, receive: list[int], near: list[bool]) -> Pending:
        # Between nodes first: it takes longer.
        across, inside = begin(False), begin(True)
        return _Halves(lambda: (across.finish(), inside.finish()), receive, near)


class Sequential(Pipe):
    """What stays inside the node, and only then what leaves it: the exchange that Pipe-A2A is compared with
    (ScheMoE, Eq. 17). Nothing else speaks for it. The second half begins when the rows are waited for."""

    name = "sequential"

    def begin_halves(self, begin: Half, receive: list[int], near: list[bool]) -> Pending:
        first = begin(True)

        def finish() -> tuple[Tensor, Tensor]:
            inside = first.finish()
            return begin(False).finish(), inside

        return _Halves(finish, receive, near)


class _Halves:
    """Two all-to-alls under way; the rows of both by source rank."""

    def __init__(
        self, finish: Callable[[], tuple[Tensor, Tensor]], receive: list[int], near: list[bool]
    ) -> None:
        self.finish_both, self.receive, self.near = finish, receive, near

    def finish(self) -> Tensor:
        halves = self.finish_both()
        parts, taken = [halves[0][:0]], [0, 0]
        for count, inside in zip(self.receive, self.near, strict=True):
            parts.append(halves[inside][taken[inside] : taken[inside] + count])
            taken[inside] += count
        return torch.cat(parts)
