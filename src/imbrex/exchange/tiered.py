"""The dispatcher over two tiers: rows cross the network once to a node that wants them, and spread inside.

    x_TD ──across──▶ pool_PD ──the node's own dispatcher──▶ rows_RD
    y_TD ◀──sum in node order◀──across── pool_PD ◀──the node's own dispatcher── rows_RD

The pool of a rank is its own T tokens, then those that arrived from its counterparts, the ranks of equal
place on other nodes, by node, then token. To the dispatcher inside, bytes or kernels over NVLink, the pool is
a batch like any other: the slots of the node are its experts, and choices of other nodes are dropped. So its
planning, its spreading and its sums are used as they are, forward and backward.

Which replica takes a choice, and which choices go where, is settled before rows move: slots and weights of
the choices cross first, of all chunks together. See docs/tiers.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imbrex.codec.cast import from_bytes
from imbrex.codec.columns import write
from imbrex.contracts import Addend, Arrived, Codec, Crossing, Pending, RowForm, Traffic
from imbrex.exchange import rows
from imbrex.exchange.dispatcher import DispatcherBase
from imbrex.exchange.tiered_plan import TieredPlanning, rows_across
from imbrex.runtime.streams import Begun
from imbrex.transport.tiers import ACROSS, Flight

OURS = 2
"""Tensors of the state before those of the dispatcher inside: the traffic between nodes."""


class TieredDispatcher(TieredPlanning):
    """Rows over the network to counterparts, and then by the dispatcher inside a node. Codecs are the
    network's; inside a node rows move as they are."""

    def beside(self, chunks: int, *, in_turn: bool = False) -> TieredDispatcher:
        inside = self.inside.beside(chunks)
        if inside is self.inside and not in_turn:
            return self
        other = copy.copy(self)
        other.inside, other.leaves_ahead = inside, not in_turn
        return other

    def why_not_form(self, form: RowForm) -> str | None:
        return DispatcherBase.why_not_form(self, form)

    def form_of(self, forms: Sequence[RowForm], x_TD: Tensor, weights_TK: Tensor) -> RowForm:
        return RowForm.ROWS

    def check(self, *, synchronize: bool = False) -> None:
        self.inside.check(synchronize=synchronize)
        super().check(synchronize=synchronize)

    def close(self) -> None:
        super().close()
        self.inside.close()

    def dispatch(
        self, plan: Any, x_TD: Tensor, weights_TK: Tensor, form: RowForm = RowForm.ROWS
    ) -> Crossing[Arrived]:
        traffic = plan.traffic

        def read(arrived: Arrived) -> Arrived:
            if self.observer.enabled:
                self.observer.count("rows", arrived.counts_e.sum(), layer=self.layer)
            state = [traffic.sent_tokens_N, traffic.splits_2W, *arrived.state]
            return arrived._replace(state=state)

        def spread(pool_PD: Tensor) -> Crossing[Arrived]:
            return self.inside.dispatch(plan.inside, pool_PD, plan.weights_PK)

        return self._going("dispatch", x_TD, self.wire.dispatch, traffic, spread, read, plan.ahead)

    def combine(
        self,
        rows_RD: Tensor,
        weights_R: Tensor | None,
        state: Sequence[Tensor],
        num_tokens: int,
        addend: Addend | None = None,
        out_TD: Tensor | None = None,
    ) -> Crossing[Tensor]:
        traffic, inner = self._read(state)
        with self._span("combine"):
            summing = self.inside.combine(rows_RD, weights_R, inner, num_tokens + arriving(traffic))

        def read(sums: list[Tensor]) -> Tensor:
            added_TD = None if addend is None else addend()
            y_TD = (sums[0] if added_TD is None else sums[0] + added_TD.float()).to(rows_RD.dtype)
            return y_TD if out_TD is None else out_TD.copy_(y_TD)

        form = _Sums(codec=self.wire.combine, width=self.geometry.hidden_size, dtype=rows_RD.dtype)
        return self._coming("combine", summing, form, traffic, num_tokens, read)

    def combine_backward(
        self, d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> Crossing[tuple[Tensor, Tensor]]:
        traffic, inner = self._read(state)

        def spread(pool_PD: Tensor) -> Crossing[tuple[Tensor, Tensor]]:
            return self.inside.combine_backward(pool_PD, rows_RD, weights_R, inner)

        codec = self.wire.combine_backward
        return self._going("combine_backward", d_y_TD, codec, traffic, spread, lambda value: value)

    def dispatch_backward(
        self,
        d_rows_RD: Tensor,
        d_weights_R: Tensor,
        state: Sequence[Tensor],
        num_tokens: int,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> Crossing[tuple[Tensor, Tensor]]:
        traffic, inner = self._read(state)
        with self._span("dispatch_backward"):
            pool = num_tokens + arriving(traffic)
            summing = self.inside.dispatch_backward(d_rows_RD, d_weights_R, inner, pool)

        def read(sums: list[Tensor]) -> tuple[Tensor, Tensor]:
            d_x_TD, d_weights_TK = sums[0].to(d_rows_RD.dtype), sums[1]
            if out is None:
                return d_x_TD, d_weights_TK
            return out[0].copy_(d_x_TD), out[1].copy_(d_weights_TK)

        geometry, dtype = self.geometry, d_rows_RD.dtype
        codec = self.wire.dispatch_backward
        form = _Sums(codec=codec, width=geometry.hidden_size, dtype=dtype, columns=geometry.top_k)
        return self._coming("dispatch_backward", summing, form, traffic, num_tokens, read)

    def redispatch(self, x_TD: Tensor, state: Sequence[Tensor], num_rows: int) -> Tensor:
        traffic, inner = self._read(state)

        def spread(pool_PD: Tensor) -> Crossing[Tensor]:
            again = self.inside.redispatch(pool_PD, inner, num_rows)
            return Crossing(lambda: None, lambda _: again)

        crossing = self._going(
            "dispatch_again", x_TD, self.wire.dispatch, traffic, spread, lambda value: value
        )
        pending = crossing.move()
        assert pending is not None
        return crossing.read(pending.finish())

    def fake_state(self, ids_TK: Tensor, rows: Any, size: Callable[[], Any]) -> list[Tensor]:
        splits_2N = torch.empty(2, self.tiers.nodes.num_nodes, dtype=torch.int64, device="cpu")
        return [ids_TK.new_empty(size()), splits_2N, *self.inside.fake_state(ids_TK, rows, size)]

    def _read(self, state: Sequence[Tensor]) -> tuple[Traffic, Sequence[Tensor]]:
        return Traffic(sent_tokens_N=state[0], splits_2W=state[1]), state[OURS:]

    def _add(self, own: Tensor, came: Tensor, traffic: Traffic) -> Tensor:
        """Sums over nodes, in their order, float32."""
        sizes = traffic.splits_2W[0].tolist()
        return rows.sum_home(own, came, traffic.sent_tokens_N, sizes, self.tiers.node)

    def _going(
        self,
        phase: str,
        rows_TD: Tensor,
        codec: Codec,
        traffic: Traffic,
        spread: Callable[[Tensor], Crossing[Any]],
        read: Callable[[Any], Any],
        ahead: list[Flight] | None = None,
    ) -> Crossing[Any]:
        """Rows over the network into the pool, and what `spread` makes of that. read: of its result. ahead:
        the rows, where they are on their way."""
        with self._span(phase):
            under_way = ahead.pop() if ahead else None
            written = None if under_way else rows_across(rows_TD, codec, traffic)

        def move() -> Pending:
            flight = under_way or self._leave(written, traffic)

            def go_on() -> tuple[Crossing[Any], Pending | None]:
                came_ND = codec.decode(flight.wait(), rows_TD.shape[1], rows_TD.dtype)
                inner = spread(torch.cat([rows_TD, came_ND]))
                return inner, inner.move()

            beside = self._beside(go_on)

            def finish() -> tuple[Crossing[Any], Any]:
                with self._span(phase):
                    inner, pending = beside.finish()
                    arrived = None if pending is None else pending.finish()
                    self._end(flight)
                    return inner, arrived

            return _UnderWay(beside, finish)

        def read_both(arrived: tuple[Crossing[Any], Any]) -> Any:
            with self._span(phase):
                return read(arrived[0].read(arrived[1]))

        return Crossing(move, read_both)

    def _coming(
        self,
        phase: str,
        summing: Crossing[Any],
        form: _Sums,
        traffic: Traffic,
        num_tokens: int,
        read: Callable[[list[Tensor]], Any],
    ) -> Crossing[Any]:
        """Sums made inside the node: those of other nodes' tokens go back to these, and those of the own
        tokens are added up over the nodes, float32, for `read`."""

        def move() -> Pending:
            # Places for what comes are told before anyone waits for sums.
            send, receive = traffic.splits_2W.tolist()
            like = traffic.sent_tokens_N.new_empty(0, form.nbytes, dtype=torch.uint8)
            flight = self.tiers.rail.begin(ACROSS, "combine", like, send)
            self._count(traffic, 1, like)

            def go_on() -> list[Tensor]:
                sums = _complete(summing)
                flight.send(form.write([of_pool[num_tokens:] for of_pool in sums]), receive)
                return [of_pool[:num_tokens] for of_pool in sums]

            beside = self._summing(go_on)

            def finish() -> tuple[list[Tensor], Tensor]:
                with self._span(phase):
                    return beside.finish(), self._end(flight)

            return _UnderWay(beside, finish)

        def add_up(arrived: tuple[list[Tensor], Tensor]) -> Any:
            with self._span(phase):
                both = zip(arrived[0], form.read(arrived[1]), strict=True)
                return read([self._add(own, came, traffic) for own, came in both])

        return Crossing(move, add_up)

    def _summing(self, work: Callable[[], list[Tensor]]) -> Begun:
        """Sums inside the node, beside the caller where ranks in it wait for each other.

        Alone on a node a rank waits for nobody in it; in a lane the sum's kernels would wait for the
        multiprocessors behind products that the caller queues next, and the network with them.
        """
        return Begun(result=torch.no_grad()(work)()) if self.tiers.nodes.size == 1 else self._beside(work)

    def _beside(self, work: Callable[[], Any]) -> Begun:
        return self.tiers.lane.start(torch.no_grad()(work))

    def _end(self, flight: Flight) -> Tensor:
        """Returns what came over the network. Counts the bytes that the dispatcher inside sent, here on the
        caller's thread."""
        inside, self.listening.bytes_M = self.listening.bytes_M, []
        for bytes_M in inside if self.observer.enabled else []:
            sent_W = torch.zeros(self.world_size, dtype=torch.int64, device="cpu")
            sent_W[list(self.tiers.bytes_inside.ranks)] = bytes_M
            self._count_sent(sent_W)
        return flight.finish()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sums:
    """How sums of a token cross back: `width` values as the codec writes them, and behind them `columns` of
    float32, if any, as they are."""

    codec: Codec
    width: int
    dtype: torch.dtype
    columns: int = 0

    @property
    def nbytes(self) -> int:
        return self.codec.nbytes(self.width, self.dtype) + 4 * self.columns

    def write(self, values: list[Tensor]) -> Tensor:
        return write(values, self.codec, self.dtype)

    def read(self, came_NB: Tensor) -> list[Tensor]:
        coded = came_NB.shape[1] - 4 * self.columns
        values = [self.codec.decode(came_NB[:, :coded], self.width, self.dtype)]
        if self.columns:
            values.append(from_bytes(came_NB[:, coded:], self.columns, torch.float32))
        return values


def _complete(summing: Crossing[Any]) -> list[Tensor]:
    """Sums over the ranks of the node, of its pool."""
    pending = summing.move()
    sums = summing.read(None if pending is None else pending.finish())
    return [*sums] if isinstance(sums, tuple) else [sums]


class _UnderWay:
    """A move of two tiers, the second of which begins without anyone waiting."""

    def __init__(self, beside: Begun, finish: Callable[[], Any]) -> None:
        self.beside, self.finish = beside, finish


def arriving(traffic: Traffic) -> int:
    """Tokens in the pool that are other ranks'."""
    return int(traffic.splits_2W[1].sum())


__all__ = ["TieredDispatcher"]
