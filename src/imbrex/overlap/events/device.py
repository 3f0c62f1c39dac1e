"""Events over NVLink: packets, patience and sums by kernels that wait for no host (docs/events.md).

A backward is of the ranks that counted in its forward, which the device knows. A host may have computed rows
of a home that then did without them. So the host asks the device what came of the forward, when it has
queued the backward of the experts. Where there are such rows, it computes the experts once more on the
others' and their gradients anew: these are then to the bit those of a call that was given the mask. Where
ranks share experts, homes say so in the backward. Calls that do without nobody are fused's (`Events`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from imbrex.contracts import Codec, Experts, Geometry, Placement, Routing, RowExchange
from imbrex.exchange import plan
from imbrex.exchange.agreement import explain, find_problem
from imbrex.exchange.nvlink_fit import DTYPE, is_coded
from imbrex.experts.experts import Experts as Ours
from imbrex.kernels.events.events import EventsCall, EventsKernels, Patience, Room
from imbrex.kernels.ffn.glue import Groups
from imbrex.kernels.routing.routed import Routed
from imbrex.kernels.rows.weights import spread, weigh
from imbrex.overlap.events.call import Call
from imbrex.overlap.events.seat import learnt
from imbrex.overlap.gradients import gradients_of
from imbrex.runtime.gradients import end_of, looks_for_nan
from imbrex.runtime.streams import StreamEvent
from imbrex.runtime.words import words
from imbrex.transport.nvlink import TOKENS_MULTIPLE, Nvlink


def wire_of(codec: Codec) -> str:
    """How sums cross by this codec."""
    return "fp8" if is_coded(codec) else "bf16"


class DeviceSeat:
    """An exchange's kernels, which layers of the same shape share, and its own patience: tau, epsilon, every
    and budget are those of `Events`. All ranks make it together, in the exchange's first call: there is room
    for as many tokens as any of them has then."""

    def __init__(
        self,
        exchange: RowExchange,
        num_tokens: int,
        *,
        tau: float | str,
        epsilon: int,
        every: int,
        budget: float,
    ) -> None:
        transport, geometry = cast("Nvlink", exchange.transport), exchange.geometry
        # host sync: once a layer
        largest = int(transport.exchange_counts(words(num_tokens)).max())
        room_tokens = max(largest, transport.max_tokens or 1)
        self.transport = transport  # and not the exchange, whose seat this is
        placement = geometry.placement
        self.room = Room(
            ranks=exchange.world_size,
            tokens=-(-room_tokens // TOKENS_MULTIPLE) * TOKENS_MULTIPLE,
            choices=geometry.top_k,
            experts=placement.num_experts,
            most_slots=max(1, *(b - a for a, b in pairwise(placement.rank_offsets))),
            tensor=geometry.tensor_parallel,
            row_bytes=geometry.hidden_size * DTYPE.itemsize,
            fp8="fp8" in map(wire_of, (exchange.wire.combine, exchange.wire.dispatch_backward)),
        )
        quantile = learnt(tau) if isinstance(tau, str) else None
        self.patience = Patience(
            math.inf if isinstance(tau, str) else tau,
            epsilon,
            every,
            transport.device,
            share=float(quantile.share) if quantile else 0.0,
            factor=quantile.factor if quantile else None,
            budget=budget,
        )
        self._placed: Placement | None = None
        self.kernels = transport.kernels_for(self.room, self._make)

    def _make(self, make_heap: Callable[[int], object]) -> EventsKernels:
        transport = self.transport
        return EventsKernels(
            cast("Callable", make_heap),
            self.room,
            timeout=transport.timeout_s,
            blocks=transport.sms.dispatch,
            sum_blocks=transport.sms.combine,
            load=transport.load,
        )

    def check_in(self, geometry: Geometry, x_TD: Tensor, routing: Routing) -> None:
        """Raise ValueError where this rank's input cannot be dispatched. Its peers, whose hosts look at
        nobody's calls, hear that it gave up, and the kernels have failed on all ranks."""
        problem = explain(find_problem(x_TD, routing, geometry, self.transport.device))
        if problem is None and x_TD.dtype != DTYPE:
            problem = f"x is {x_TD.dtype}; NVLink's kernels move bfloat16: convert it, or use 'alltoall'"
        if problem is None and x_TD.shape[0] > self.room.tokens:
            problem = (
                f"x has {x_TD.shape[0]} tokens; the first call made room for {self.room.tokens}: begin with "
                "the most, or use Nvlink(max_tokens=)"
            )
        if problem is not None:
            self.kernels.refuse()
            raise ValueError(f"dispatch: on rank {geometry.rank}, {problem}")

    def tables(self, placement: Placement) -> tuple[Tensor, Tensor]:
        """The slot of every expert and the first slot of every owner, of where experts live now."""
        if placement is not self._placed:
            device = self.transport.device
            slot_of_E = plan.slot_of_expert(placement, device)[:-1].int()
            offsets = torch.tensor(placement.rank_offsets, dtype=torch.int32, device="cpu").to(device)
            self._placed, self._tables = placement, (slot_of_E, offsets)
        return self._tables


@dataclass(frozen=True, slots=True)
class Computed:
    """The experts' part of a call: what they were given and what they made of it, with the graph between."""

    routed: Routed
    rows_RD: Tensor
    weights_R: Tensor
    out_RD: Tensor | GradientEdge


class DeviceForward(Call):
    """A call over NVLink. Nothing in it waits for the device."""

    def __init__(
        self,
        seat: DeviceSeat,
        exchange: RowExchange,
        experts: Experts,
        x_TD: Tensor,
        routing: Routing,
        *,
        keep: bool,
    ) -> None:
        super().__init__(exchange, experts, x_TD, routing, keep=keep)
        self.seat = seat
        self.weighted = not experts.applies_weights

    def send(self) -> None:
        """Packets to all peers."""
        exchange, seat = self.exchange, self.seat
        tables = seat.tables(exchange.geometry.placement)
        with exchange.observer.span("dispatch", layer=exchange.layer):
            inputs = self.x_TD, self.ids_TK, self.weights_TK
            how = {"layer": exchange.layer, "wire": wire_of(exchange.wire.combine)}
            self.call = seat.kernels.send(*inputs, tables, seat.patience, **how)

    @torch.no_grad()
    def run(self) -> None:
        """Rows of the packets that come in time, and the experts."""
        exchange, kernels = self.exchange, self.seat.kernels
        with exchange.observer.span("dispatch", layer=exchange.layer):
            rows_RD = kernels.take(self.call)
        self.computed = self.compute(self.call.routed, rows_RD)

    def compute(self, routed: Routed, rows_RD: Tensor) -> Computed:
        """The experts' rows of a routing, in room for all that could be, or as many as there are."""
        exchange = self.exchange
        if looks_for_nan() and not self.seat.transport.capturing:
            # host sync: only where autograd looks for NaN
            rows_RD = rows_RD[: int(routed.totals_L4[0, 0])]
        with exchange.observer.span("dispatch", layer=exchange.layer):
            slots = len(self.geometry.local_slots)
            weights_R, counts_e, work, _ = spread(routed, rows_RD.shape[0], slots)
        out_RD = self.run_experts(rows_RD, weights_R, counts_e, Groups(work))
        return Computed(routed, rows_RD, weights_R, out_RD.contiguous())

    @torch.no_grad()
    def outputs(self, addend_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Outputs [T, D]; and the choices that count: a mask, also where all do, because the host does not
        wait to know."""
        exchange, call, out_RD = self.exchange, self.call, self.computed.out_RD
        assert isinstance(out_RD, Tensor)
        assert addend_TD is None or addend_TD.shape == self.x_TD.shape
        with exchange.observer.span("combine", layer=exchange.layer):
            added_TD = None if addend_TD is None else addend_TD.to(DTYPE).contiguous()
            how = {"weighted": self.weighted, "addend_TD": added_TD}
            y_TD = self.seat.kernels.sum(call, out_RD.detach(), **how)
        if not self.weighted:
            self.computed = replace(self.computed, out_RD=end_of(out_RD))
        self.count_load()
        if exchange.observer.enabled:
            self.count_drops(call.kept_TK, 1 - call.outcome_4W[0].long())
        if self.keep and not self.shared:
            self.tell_host()
        return y_TD, call.kept_TK

    @property
    def shared(self) -> bool:
        """Whether a home may do without rows for lack of a rank that shares their experts, which the host
        hears in the backward."""
        return self.exchange.geometry.tensor_parallel > 1

    def tell_host(self) -> None:
        """Sends the outcome, which the backward asks for, on its way to the host."""
        outcome_4W = self.call.outcome_4W
        self.mark: StreamEvent | None = None
        if outcome_4W.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self.told_4W = torch.empty_like(outcome_4W, device="cpu", pin_memory=outcome_4W.is_cuda)
        self.told_4W.copy_(outcome_4W, non_blocking=True)
        self.mark = StreamEvent(outcome_4W.device)

    @property
    def may_go_back_twice(self) -> bool:
        """Whether a backward of the experts has no effect but its results, and the host can ask what came of
        the forward."""
        experts = self.experts
        return self.mark is not None and isinstance(experts, Ours) and experts.gradient_sums is None

    def compute_again(self, computed: Computed) -> tuple[Computed, Tensor]:
        """The experts' part of the rows that counted, and the row that each was."""
        served_W = self.call.outcome_4W[2].bool()
        routed, order_R = computed.routed.without(served_W, computed.rows_RD.shape[0])
        again = self.compute(routed, computed.rows_RD.detach()[order_R])
        return again, order_R[: len(again.rows_RD)]

    def computed_in_vain(self) -> bool:
        """Whether there may be rows here of homes that do without them."""
        if self.mark is None:  # a captured call may drop any at its replay
            return True
        self.exchange.observer.count("host_syncs", 1, layer=self.exchange.layer)
        # host sync: only where a peer may be missing
        self.mark.wait(math.inf)
        _, came_W, served_W, _ = self.told_4W
        return bool((came_W > served_W).any())


class DeviceBackward:
    """Gradients of tokens, weights and `parameters` of a call; the graph of its experts is gone afterwards.
    It has no patience: what counted in the forward counts here, on both sides."""

    def __init__(self, forward: DeviceForward, d_y_TD: Tensor, parameters: Sequence[Tensor]) -> None:
        self.forward, self.d_y_TD, self.parameters = forward, d_y_TD, parameters

    @torch.no_grad()
    def run(self) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """d_x_TD, d_weights_TK, and those of the parameters."""
        forward = self.forward
        kernels, exchange = forward.seat.kernels, forward.exchange
        observer, layer = exchange.observer, exchange.layer
        with observer.span("combine_backward", layer=layer):
            wire = wire_of(exchange.wire.dispatch_backward)
            back = kernels.send_back(forward.call, self.d_y_TD, layer=layer, wire=wire)
            if forward.shared:
                kernels.settle(back)
                forward.tell_host()
        d_rows_RD, d_weights_R, d_parameters = self._experts(back)
        with observer.span("dispatch_backward", layer=layer):
            return *kernels.sum_back(back, d_rows_RD, d_weights_R), d_parameters

    def _experts(self, back: EventsCall) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Gradients of the rows that counted, of their weights and of the parameters. Where these add to
        nothing, the host asks only behind them: the device works on while the host waits for its answer, and
        gradients of rows in vain are made anew."""
        forward = self.forward
        computed = forward.computed
        del forward.computed
        asked_first = not forward.may_go_back_twice
        if asked_first and forward.computed_in_vain():
            computed, _ = forward.compute_again(computed)
        back.routed = computed.routed
        with forward.exchange.observer.span("combine_backward", layer=forward.exchange.layer):
            d_y_RD = forward.seat.kernels.take_back(back)[: len(computed.rows_RD)]
        gradients = self._gradients(computed, d_y_RD)
        if asked_first or not forward.computed_in_vain():
            return gradients
        del gradients
        computed, order_R = forward.compute_again(computed)
        back.routed = computed.routed
        return self._gradients(computed, d_y_RD[order_R])

    def _gradients(self, computed: Computed, d_y_RD: Tensor) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Gradients of the rows, of their weights and of the parameters."""
        forward = self.forward
        observer, layer = forward.exchange.observer, forward.exchange.layer
        d_out_RD, d_weights_R = d_y_RD, None
        if forward.weighted:
            assert isinstance(computed.out_RD, Tensor)
            with observer.span("combine_backward", layer=layer):
                d_out_RD, d_weights_R = weigh(
                    d_y_RD, computed.out_RD.detach(), computed.weights_R, computed.routed
                )
        applied_R = None if forward.weighted else computed.weights_R
        with observer.span("experts_backward", layer=layer):
            d_rows_RD, d_more_R, d_parameters = gradients_of(
                computed.out_RD, d_out_RD, computed.rows_RD, applied_R, self.parameters
            )
            d_weights_R = d_weights_R if d_more_R is None else d_more_R.contiguous()
            assert d_weights_R is not None
            return d_rows_RD.contiguous(), d_weights_R, d_parameters


__all__ = ["DeviceBackward", "DeviceForward", "DeviceSeat"]
