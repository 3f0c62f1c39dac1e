"""How chunks cross: one task of the processor, one of the network, one of the processor.

What crosses is written when a `Crossing` is made, is under way from `move()` on, and is taken by `read`. The
strategy knows no more of transports: one that moves written rows, and kernels that write, move and read at
once, differ in what is left for each task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from imbrex.contracts import Codec, Pending, Plan, Routing
from imbrex.exchange.crossings import Crossings
from imbrex.exchange.crossings_fp8 import read_dispatch_fp8
from imbrex.exchange.crossings_nvlink import NvlinkCrossings, Sms
from imbrex.exchange.exchange import Exchange
from imbrex.exchange.plan import read_state
from imbrex.kernels.rows.expand import expand_fp8, expand_fp8_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """move: begins it, in the same order on all ranks; `None` where nothing has to move. read: takes what
    its `finish` gave. Tensors given stay as they are until then."""

    move: Callable[[], Pending | None]
    read: Callable[[Any], Any]


class Moves(Protocol):
    """The four crossings of a chunk; shapes are those of `imbrex.exchange.crossings`."""

    def plan(self, parts: Sequence[tuple[Tensor, Routing]]) -> Sequence[Any]:
        """What ranks must know of each other's chunks, all at once."""
        ...

    def dispatch(self, plan: Any, x_TD: Tensor, weights_TK: Tensor, *, fp8_rows: bool) -> Crossing:
        """Read: rows_RD, weights_R, counts_e, state. fp8_rows: instead of rows_RD, rows as they cross and
        their scales."""
        ...

    def combine(
        self,
        rows_RD: Tensor,
        weights_R: Tensor | None,
        addend_TD: Tensor | None,
        state: Sequence[Tensor],
        out_TD: Tensor,
    ) -> Crossing:
        """Read: nothing; the sums are in `out_TD`. Without weights the rows were weighted before."""
        ...

    def combine_backward(
        self, d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> Crossing:
        """Read: gradients of the rows and of their weights. Without rows these were weighted before."""
        ...

    def dispatch_backward(
        self, d_rows_RD: Tensor, d_weights_R: Tensor, state: Sequence[Tensor], out: tuple[Tensor, Tensor]
    ) -> Crossing:
        """Read: nothing; the gradients of tokens and weights are in `out`."""
        ...


def moves_of(exchange: Exchange) -> Moves:
    """How the chunks of an exchange cross."""
    crossings = exchange._crossings
    return WrittenRows(crossings) if isinstance(crossings, Crossings) else Kernels(crossings)


class WrittenRows:
    """Over a transport that moves bytes: rows are encoded, moved, decoded."""

    def __init__(self, crossings: Crossings) -> None:
        self.crossings = crossings

    def plan(self, parts: Sequence[tuple[Tensor, Routing]]) -> list[Plan]:
        return self.crossings.make_plans(parts)

    def dispatch(self, plan: Plan, x_TD: Tensor, weights_TK: Tensor, *, fp8_rows: bool) -> Crossing:
        encoded = self.crossings.write_dispatch(plan, x_TD, weights_TK)

        def read(received: Tensor) -> Any:
            with self._span("dispatch"):
                if fp8_rows:
                    return read_dispatch_fp8(self.crossings, plan, encoded, received, weights_TK)
                return self.crossings.read_dispatch(plan, received, x_TD, weights_TK)

        return Crossing(move=partial(self.crossings.begin_out, encoded, plan.traffic), read=read)

    def combine(
        self,
        rows_RD: Tensor,
        weights_R: Tensor | None,
        addend_TD: Tensor | None,
        state: Sequence[Tensor],
        out_TD: Tensor,
    ) -> Crossing:
        dtype = rows_RD.dtype
        with self._span("combine"):
            own_TD, encoded = self.crossings.write_combine(rows_RD, weights_R, state, len(out_TD))

        def read(received: Tensor | None) -> None:
            with self._span("combine"):
                out_TD.copy_(self.crossings.read_combine(own_TD, received, addend_TD, state, dtype))

        return Crossing(move=self._back(encoded, state, self.crossings.wire.combine, dtype), read=read)

    def combine_backward(
        self, d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> Crossing:
        encoded, traffic = self.crossings.write_combine_backward(d_y_TD), read_state(state)[2]

        def read(received: Tensor | None) -> Any:
            with self._span("combine_backward"):
                return self.crossings.read_combine_backward(received, d_y_TD, rows_RD, weights_R, state)

        if encoded is None:
            return Crossing(move=_nothing, read=read)
        return Crossing(move=partial(self.crossings.begin_out, encoded, traffic), read=read)

    def dispatch_backward(
        self, d_rows_RD: Tensor, d_weights_R: Tensor, state: Sequence[Tensor], out: tuple[Tensor, Tensor]
    ) -> Crossing:
        dtype = d_rows_RD.dtype
        with self._span("dispatch_backward"):
            own, encoded = self.crossings.write_dispatch_backward(d_rows_RD, d_weights_R, state, len(out[0]))

        def read(received: Tensor | None) -> None:
            with self._span("dispatch_backward"):
                found = self.crossings.read_dispatch_backward(own, received, state, dtype)
                for place, gradient in zip(out, found, strict=True):
                    place.copy_(gradient)

        codec = self.crossings.wire.dispatch_backward
        return Crossing(move=self._back(encoded, state, codec, dtype), read=read)

    def _back(
        self, encoded: Tensor | None, state: Sequence[Tensor], codec: Codec, dtype: torch.dtype
    ) -> Callable[[], Pending | None]:
        if encoded is None:
            return _nothing
        return partial(self.crossings.begin_back, encoded, read_state(state)[2], codec, dtype)

    def _span(self, name: str) -> Any:
        return self.crossings.observer.span(name, layer=self.crossings.layer)


def _nothing() -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A chunk's choices, and the most tokens that a rank has in it."""

    ids_TK: Tensor
    most: int


class Kernels:
    """Over NVLink: a move is the whole call of a kernel, on a stream beside the caller's, so that nothing is
    left to write, and little to read. All layers of a transport have one such stream: of the kernels that
    wait for peers a GPU has one at a time.
    """

    def __init__(self, crossings: NvlinkCrossings) -> None:
        self.crossings, self.transport = crossings, crossings.transport
        self.sms: Sms = self.transport.sms_beside

    def plan(self, parts: Sequence[tuple[Tensor, Routing]]) -> list[Part]:
        if len(parts) == 1:  # only the last move has something beside it: the weights' gradients
            self.sms = self.transport.sms
        agree = self.transport.agree_on_call
        return [Part(ids_TK=routing.ids_TK, most=agree(len(x_TD), fine=True)[0]) for x_TD, routing in parts]

    def dispatch(self, plan: Part, x_TD: Tensor, weights_TK: Tensor, *, fp8_rows: bool) -> Crossing:
        expand = expand_fp8_rows if fp8_rows else expand_fp8
        given = x_TD, weights_TK, plan.ids_TK, plan.most, self.sms, expand
        send = partial(self.crossings.send, *given)

        def read(sent: tuple[Any, Any]) -> Any:
            rows, routed = sent
            return rows, *self.crossings.describe(routed, len(rows[0] if fp8_rows else rows))

        return Crossing(move=self._move(send), read=read)

    def combine(
        self,
        rows_RD: Tensor,
        weights_R: Tensor | None,
        addend_TD: Tensor | None,
        state: Sequence[Tensor],
        out_TD: Tensor,
    ) -> Crossing:
        given = rows_RD, addend_TD, state, out_TD, self.sms
        work = partial(self.crossings.sum_rows, *given, weighted=weights_R is not None)
        return Crossing(move=self._move(work), read=_done)

    def combine_backward(
        self, d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> Crossing:
        work = partial(self.crossings.send_gradients, d_y_TD, state, len(weights_R), self.sms)
        return Crossing(
            move=self._move(work),
            read=lambda d_y_RD: self.crossings.weigh(d_y_RD, rows_RD, weights_R, state),
        )

    def dispatch_backward(
        self, d_rows_RD: Tensor, d_weights_R: Tensor, state: Sequence[Tensor], out: tuple[Tensor, Tensor]
    ) -> Crossing:
        given = d_rows_RD, d_weights_R, state, out, self.transport.sms_beside
        work = partial(self.crossings.sum_gradients, *given)
        return Crossing(move=self._move(work), read=_done)

    def _move(self, work: Callable[[], Any]) -> Callable[[], Pending]:
        return partial(self.transport.line.start, work)


def _done(_: Any) -> None:
    return None


__all__ = ["Crossing", "Moves", "moves_of"]
