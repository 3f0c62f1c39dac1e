"""The four crossings over NVLink: `imbrex.exchange.crossings`, by kernels, without a host synchronisation.

Dispatch routes on the device and pulls tokens straight into expert-major rows; combine sums a token's rows on
each rank, and the sums at home. The gradient of combine pulls dy over the same routing, that of dispatch is a
combine of dx, with which the gate weights' gradients go home, four bytes a choice.
Rows have the worst-case size; how many there are stands in `counts_e`, and nothing reads past them.

The kernels choose replicas in equal parts or by the loads of the batch. Any other split is computed on the
host, after one synchronisation, and the kernels are told slots for experts (`nvlink_fit.tell`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import Codec, Routing, Wire
from imbrex.exchange import ops, plan
from imbrex.exchange.agreement import explain_problem
from imbrex.exchange.geometry import Geometry
from imbrex.exchange.nvlink_fit import DTYPE, is_coded, tell
from imbrex.kernels.exchange.exchange import NvlinkExchange, Routed
from imbrex.kernels.exchange.layout import Shape
from imbrex.kernels.exchange.routed import Tables, placement_tables, write_tables
from imbrex.kernels.ffn.glue import weigh_rows
from imbrex.kernels.rows.expand import expand_fp8, expand_fp8_rows
from imbrex.kernels.rows.weights import spread
from imbrex.observe import Observer
from imbrex.transport.nvlink import Nvlink, Size, Sms

FEW_TOKENS = 256
"""Most tokens of a rank for which one kernel routes and moves: of 128 tokens in 43 us, against 59 in two
kernels; of 512 in 110, like two (4 H200, rows of 7168 values, K=8)."""
STATE = tuple(Routed.__dataclass_fields__)


def most_rows(shape: Shape, most: int) -> int:
    """Rows that `most` tokens of every rank can be, for a heap that may have room for more. Of a few sizes
    only, so that memory for them is found again: that of the heap halved while it is enough.

    Example: kernels for 16384 tokens that are given 5000 at most have rows for 8192.
    """
    room = shape.max_tokens
    while room % 2 == 0 and room // 2 >= most:
        room //= 2
    return shape.row_capacity // shape.max_tokens * room


def write_state(routed: Routed) -> list[Tensor]:
    """The tensors of `routed`, in the order of its fields."""
    return [getattr(routed, name) for name in STATE]


def read_state(state: Sequence[Tensor]) -> Routed:
    return Routed(**dict(zip(STATE, state, strict=True)))


class NvlinkCrossings(ops.Owner):
    """What the operators of an exchange do over NVLink. Tokens are bfloat16."""

    def __init__(
        self, geometry: Geometry, transport: Nvlink, wire: Wire, observer: Observer, layer: int
    ) -> None:
        super().__init__(transport.world_size, geometry.rank, geometry.placement.rank_offsets)
        self.transport, self.wire, self.observer, self.layer = transport, wire, observer, layer
        self.world_size = transport.world_size
        self._tables: Tables | None = None
        self.tally_WS: Tensor | None = None
        self.geometry = geometry

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @geometry.setter
    def geometry(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self.num_local_slots = len(geometry.local_slots)
        self.told = told = tell(geometry)
        self.size = Size(
            rank_offsets=told.placement.rank_offsets,
            tensor=geometry.tensor_parallel,
            experts=told.placement.num_experts,
            choices=geometry.top_k,
            row_bytes=geometry.hidden_size * DTYPE.itemsize,
            compact=is_coded(self.wire.dispatch) or is_coded(self.wire.combine_backward),
        )
        lengths = told.placement.num_experts + 1, told.placement.num_slots, told.placement.num_ranks + 1
        if self._tables and tuple(len(table) for table in self._tables) == lengths:
            write_tables(self._tables, told.placement)
        else:
            self._tables = placement_tables(told.placement, self.transport.device)

    @property
    def counts_on_device(self) -> bool:
        return not self.told.by_slot and self.geometry.tensor_parallel == 1

    def device_type(self, x: Tensor) -> str:
        return self.transport.device.type

    def handshake(self, x_TD: Tensor, routing: Routing) -> int:
        """Most tokens of a rank in this call. ValueError on every rank where one rank's input is wrong."""
        problem = self._problem(x_TD, routing)
        most, wrong = self.transport.agree_on_call(x_TD.shape[0], fine=problem is None)
        if problem:
            raise ValueError(f"dispatch: on rank {self.geometry.rank}, {problem}")
        if wrong is not None:
            raise ValueError(f"dispatch: rank {wrong} was given tokens that cannot be dispatched")
        return most

    def _problem(self, x_TD: Tensor, routing: Routing) -> str | None:
        geometry, most = self.geometry, self.transport.max_tokens
        problem = explain_problem(
            x_TD,
            routing,
            geometry.hidden_size,
            geometry.top_k,
            geometry.placement.num_experts,
            self.transport.device.type,
        )
        if problem is not None:
            return problem
        if x_TD.dtype != DTYPE:
            return (
                f"x is {x_TD.dtype}; NVLink's kernels move bfloat16: convert it, or use transport='alltoall'"
            )
        if most is not None and x_TD.shape[0] > most:
            return f"x has {x_TD.shape[0]} tokens; this exchange was made for {most}: use Nvlink(max_tokens=)"
        return None

    def start_dispatch(
        self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, expand: Callable[..., Any] = expand_fp8
    ) -> tuple[Any, Routed]:
        """Kernels run in the order of the stream, so begun is as good as done. Rows as `expand` makes them of
        those that cross in fp8."""
        most = self.handshake(x_TD, Routing(ids_TK=ids_TK, weights_TK=weights_TK))
        return self.send(x_TD, weights_TK, ids_TK, most, self.transport.sms, expand)

    def send(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        most: int,
        sms: Sms,
        expand: Callable[..., Any] = expand_fp8,
    ) -> tuple[Any, Routed]:
        """Rows of a call in which ranks have at most `most` tokens, and where they stand."""
        kernels = self.transport.exchange_for(self.size, self.told.placement, most, self.observer)
        kernels.layer = self.layer
        where = {"layer": self.layer}
        if self.observer.enabled:
            load_E = plan.count_choices(ids_TK, self.geometry.placement.num_experts)
            self.observer.count("expert_load", load_E, **where)
        ids_TK, weights_TK, x_TD = ids_TK.contiguous(), weights_TK.contiguous(), x_TD.contiguous()
        choose = {"tally": self.tally_WS, "tables": self._tables, "balanced": self.told.balanced}
        if self.told.by_slot:
            with self.observer.span("plan", **where):
                ids_TK = self._choose_slots(ids_TK)
        given = x_TD, ids_TK, weights_TK
        with self.observer.span("dispatch", **where):
            if is_coded(self.wire.dispatch):
                lease, routed = kernels.dispatch(*given, sms.push, quantise=True, **choose)
                num_rows = self._count_rows(routed, kernels, most)
                return self._expand(lease.rows, x_TD, routed, num_rows, expand), routed
            if most <= FEW_TOKENS:
                rows_1RD, routed = kernels.dispatch_small(*given, sms.small, **choose)
                return rows_1RD[0], routed
            if not self._exact:
                rows_1RD = x_TD.new_empty(1, most_rows(kernels.shape, most), x_TD.shape[1])
                _, routed = kernels.dispatch_expert(*given, sms.dispatch, out=rows_1RD, **choose)
                return rows_1RD[0], routed
        with self.observer.span("plan", **where):
            routed = kernels.route(ids_TK, weights_TK, **choose)
        with self.observer.span("dispatch", **where):
            num_rows = self._count_rows(routed, kernels, most)
            rows_RD = self._move_out(x_TD, routed, num_rows, self.wire.dispatch, sms)
        return rows_RD, routed

    @property
    def _exact(self) -> bool:
        """Whether the host asks how many rows there are."""
        return self.transport.exact_rows and not self.transport.capturing

    def _count_rows(self, routed: Routed, kernels: NvlinkExchange, most: int) -> int:
        """Rows to make room for: those that there are, where the user asked for that, else the worst case."""
        if not self._exact:
            return most_rows(kernels.shape, most)
        self.observer.count("host_syncs", 1, layer=self.layer)
        # host sync: asked for by `exact_rows`
        return int(routed.totals_L4[0, 0])

    def _move_out(self, x_TD: Tensor, routed: Routed, num_rows: int, codec: Codec, sms: Sms) -> Tensor:
        """Expert-major rows [num_rows, D] of tokens."""
        kernels = self._kernels(routed)
        if not is_coded(codec):
            rows_1RD = x_TD.new_empty(1, num_rows, x_TD.shape[1])
            return kernels.pull(x_TD, routed, num_sms=sms.dispatch, out=rows_1RD)[0]
        lease = kernels.push(x_TD, routed, num_sms=sms.push, quantise=True)
        return self._expand(lease.rows, x_TD, routed, num_rows)

    def _expand(
        self,
        coded_1MB: Tensor,
        x_TD: Tensor,
        routed: Routed,
        num_rows: int,
        expand: Callable[..., Any] = expand_fp8,
    ) -> Any:
        return expand(coded_1MB, x_TD, routed, self.geometry.rank, num_rows, load=self.transport.load)

    def _choose_slots(self, ids_TK: Tensor) -> Tensor:
        geometry = self.geometry
        counts_E = plan.count_choices(ids_TK, geometry.placement.num_experts)
        self.observer.count("host_syncs", 1, layer=self.layer)
        split_WS = geometry.split(self.transport.exchange_counts(counts_E), geometry.placement)
        return plan.choose_slots(ids_TK, split_WS[geometry.rank], geometry.placement)

    def run_dispatch(
        self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, ticket: int
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        begun = self.begun.pop(ticket, None)
        rows_RD, routed = begun or self.start_dispatch(x_TD, weights_TK, ids_TK)
        return rows_RD, *self.describe(routed, rows_RD.shape[0])

    def run_dispatch_fp8(
        self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor, list[Tensor]]:
        """As `run_dispatch`, rows as they cross: values in float8_e4m3fn and scales."""
        coded, routed = self.start_dispatch(x_TD, weights_TK, ids_TK, expand_fp8_rows)
        return coded, *self.describe(routed, coded[0].shape[0])

    def describe(self, routed: Routed, num_rows: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        weights_R = spread(routed.weights_LWTK, routed.position_LWTK, num_rows)
        return weights_R, routed.counts_Le[0, : self.num_local_slots].long(), write_state(routed)

    def fake_state(self, ids_TK: Tensor, rows: Any, size: Callable[[], Any]) -> list[Tensor]:
        """The shapes of the state, for the compiler."""
        ranks, most, choices = self.world_size, size(), ids_TK.shape[1]

        def number(*shape: Any, dtype: torch.dtype = torch.int32) -> Tensor:
            return ids_TK.new_empty(shape, dtype=dtype)

        return [
            number(1, ranks, most, choices),
            number(1, ranks, most, choices, dtype=torch.float32),
            number(1, ranks, most),
            number(1, most, ranks),
            number(1, self.size.most_slots),
            number(1, 4),
            number(1, ranks),
        ]

    def run_dispatch_backward(
        self, d_rows_RD: Tensor, d_weights_R: Tensor, state: Sequence[Tensor], num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        d_x_TD = d_rows_RD.new_empty(num_tokens, d_rows_RD.shape[1])
        d_weights_TK = d_weights_R.new_empty(num_tokens, self.geometry.top_k)
        self.sum_gradients(d_rows_RD, d_weights_R, state, (d_x_TD, d_weights_TK), self.transport.sms)
        return d_x_TD, d_weights_TK

    def sum_gradients(
        self,
        d_rows_RD: Tensor,
        d_weights_R: Tensor,
        state: Sequence[Tensor],
        out: tuple[Tensor, Tensor],
        sms: Sms,
    ) -> None:
        """Of a token's rows and of their weights, into `out`: [T, D] and [T, K], contiguous."""
        with self.observer.span("dispatch_backward", layer=self.layer):
            values, codec = (d_weights_R.contiguous(), out[1]), self.wire.dispatch_backward
            self._combine(d_rows_RD, state, None, out[0], codec, sms, weighted=False, values=values)

    def dispatch_again(self, x_TD: Tensor, state: Sequence[Tensor], num_rows: int) -> Tensor:
        """The rows of an earlier dispatch, moved once more."""
        with self.observer.span("dispatch_again", layer=self.layer):
            routed, codec = read_state(state), self.wire.dispatch
            return self._move_out(x_TD.contiguous(), routed, num_rows, codec, self.transport.sms)

    def run_combine(
        self,
        rows_RD: Tensor,
        weights_R: Tensor | None,
        addend_TD: Tensor | None,
        state: Sequence[Tensor],
        num_tokens: int,
        ticket: int,
    ) -> Tensor:
        self.begun.pop(ticket, None)
        y_TD, weighted = rows_RD.new_empty(num_tokens, rows_RD.shape[1]), weights_R is not None
        self.sum_rows(rows_RD, addend_TD, state, y_TD, self.transport.sms, weighted=weighted)
        return y_TD

    def sum_rows(
        self,
        rows_RD: Tensor,
        addend_TD: Tensor | None,
        state: Sequence[Tensor],
        out_TD: Tensor,
        sms: Sms,
        *,
        weighted: bool,
    ) -> None:
        """Of a token, and of the addend, into `out_TD`, contiguous."""
        with self.observer.span("combine", layer=self.layer):
            codec = self.wire.combine
            self._combine(rows_RD, state, addend_TD, out_TD, codec, sms, weighted=weighted)

    def run_combine_backward(
        self, d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        d_y_RD = self.send_gradients(d_y_TD, state, weights_R.shape[0], self.transport.sms)
        return self.weigh(d_y_RD, rows_RD, weights_R, state)

    def send_gradients(self, d_y_TD: Tensor, state: Sequence[Tensor], num_rows: int, sms: Sms) -> Tensor:
        """Those of the outputs, to the rows that they are sums of."""
        with self.observer.span("combine_backward", layer=self.layer):
            codec = self.wire.combine_backward
            return self._move_out(d_y_TD.contiguous(), read_state(state), num_rows, codec, sms)

    def weigh(
        self, d_y_RD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the rows and of their weights. Without rows these were weighted before."""
        if rows_RD is None:
            return d_y_RD, weights_R.new_empty(0)
        with self.observer.span("combine_backward", layer=self.layer):
            if rows_RD.is_cuda:
                num_rows_1 = read_state(state).totals_L4[0, :1]
                d_rows_RD, d_weights_R = weigh_rows(d_y_RD, rows_RD.contiguous(), weights_R, num_rows_1)
                assert d_weights_R is not None
                return d_rows_RD, d_weights_R
            d_weights_R = (rows_RD.float() * d_y_RD.float()).sum(1)
            return (d_y_RD.float() * weights_R[:, None]).to(DTYPE), d_weights_R

    def _kernels(self, routed: Routed) -> NvlinkExchange:
        kernels = self.transport.exchange_of(self.size, routed.position_LWTK.shape[2])
        kernels.layer = self.layer
        return kernels

    def _combine(
        self,
        rows_RD: Tensor,
        state: Sequence[Tensor],
        addend: Tensor | None,
        out_TD: Tensor,
        codec: Codec,
        sms: Sms,
        *,
        weighted: bool,
        values: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        routed = read_state(state)
        self._kernels(routed).combine(
            rows_RD.contiguous()[None],
            routed,
            weighted=weighted,
            addend=None if addend is None else addend.contiguous(),
            num_sms=sms.combine,
            out=out_TD,
            values=values,
            wire="fp8" if is_coded(codec) else "bf16",
        )
