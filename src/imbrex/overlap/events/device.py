"""Events over NVLink: packets, patience and sums by kernels that wait for no host (docs/events.md).

Only forwards that nobody differentiates run so; with gradients a call is `serial`'s, in which nobody is done
without.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from imbrex.contracts import Dispatched, Experts, Geometry, Handle, Output, Placement, Routing, RowExchange
from imbrex.exchange import plan
from imbrex.exchange.agreement import agree, explain, find_problem
from imbrex.exchange.nvlink_fit import DTYPE
from imbrex.kernels.events.events import EventsCall, EventsKernels, Patience, Room
from imbrex.kernels.ffn.glue import Groups
from imbrex.kernels.rows.weights import spread
from imbrex.runtime.words import words
from imbrex.transport.nvlink import TOKENS_MULTIPLE, Nvlink

if TYPE_CHECKING:
    from imbrex.overlap.events import Events

WITH_GRADIENTS = "with gradients as serial, in which nobody is done without: these kernels have no backward"


def why_not_on_device(exchange: RowExchange, tau: float | str) -> str | None:
    """Why the kernels cannot run these calls, or `None`."""
    wire = exchange.wire
    codecs = wire.dispatch, wire.combine, wire.dispatch_backward, wire.combine_backward
    if any(codec.name != "identity" for codec in codecs):
        return "events over nvlink move rows as they are; leave the codec out, or use schedule='serial'"
    if isinstance(tau, str):
        return f"tau is {tau!r}, but over nvlink none is learnt; give seconds"
    return None


class DeviceSeat:
    """An exchange's kernels, which layers of the same shape share, and its own patience. Made in its first
    call, by all ranks together: there is room for as many tokens as any of them has then.

    Raises ValueError on every rank where they disagree, or where one cannot be served.
    """

    def __init__(self, exchange: RowExchange, events: Events, problem: str | None, num_tokens: int) -> None:
        transport, geometry = cast("Nvlink", exchange.transport), exchange.geometry
        problem = problem or why_not_on_device(exchange, events.tau)
        settings = {"tau": str(events.tau), "epsilon": events.epsilon, "every": events.every}
        error = None if problem is None else ValueError(f"schedule: {problem}")
        agree(transport, settings, "schedule: events", error)
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
        )
        self.patience = Patience(float(events.tau), events.epsilon, events.every, transport.device)
        self._placed: Placement | None = None
        self.kernels = transport.kernels_for(self.room, self._make)

    def _make(self, make_heap: Callable[[int], object]) -> EventsKernels:
        transport = self.transport
        return EventsKernels(
            cast("Callable", make_heap),
            self.room,
            timeout=transport.timeout_s,
            blocks=transport.sms.dispatch,
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


@torch.no_grad()
def run_on_device(
    seat: DeviceSeat,
    exchange: RowExchange,
    x_TD: Tensor,
    routing: Routing,
    experts: Experts,
    addend: Callable[[], Tensor] | None,
) -> Output:
    """One call that nobody differentiates. Nothing in it waits for the device."""
    kernels, tables = seat.kernels, seat.tables(exchange.geometry.placement)
    observer, layer = exchange.observer, exchange.layer
    with observer.span("dispatch", layer=layer):
        inputs = x_TD, routing.ids_TK, routing.weights_TK
        call = kernels.send(*inputs, tables, seat.patience, layer=layer)
    added_TD = None if addend is None else addend()
    with observer.span("dispatch", layer=layer):
        rows_RD = kernels.take(call)
        weights_R, counts_e, work = spread(call.routed, rows_RD.shape[0], len(exchange.geometry.local_slots))
    handle = Handle(weights_R=weights_R, state=(), num_tokens=x_TD.shape[0], maker=exchange.dispatcher.key)
    dispatched = Dispatched(rows_RD=rows_RD, counts_e=counts_e, handle=handle, beside=Groups(work))
    with observer.span("experts", layer=layer):
        rows_RD = experts(dispatched)
    exchange.check_rows(rows_RD, handle, together=False)
    assert added_TD is None or added_TD.shape == x_TD.shape
    with observer.span("combine", layer=layer):
        rows_RD, weighted = rows_RD.contiguous(), not experts.applies_weights
        kernels.reply(call, rows_RD, weighted=weighted)
        added_TD = None if added_TD is None else added_TD.to(DTYPE).contiguous()
        y_TD = kernels.sum(call, rows_RD, weighted=weighted, addend_TD=added_TD)
    return Output(y_TD=y_TD, kept_TK=_kept(exchange, call, routing))


def _kept(exchange: RowExchange, call: EventsCall, routing: Routing) -> Tensor | None:
    """The choices that count: a mask, also where all do, because the host does not wait to know."""
    observer, layer = exchange.observer, exchange.layer
    if observer.enabled:
        num_experts = exchange.geometry.placement.num_experts
        observer.count("expert_load", plan.count_choices(routing.ids_TK, num_experts), layer=layer)
    if not call.patience.epsilon:
        return None
    observer.count("drops", (~call.kept_TK).sum(), layer=layer)
    observer.count("gave_up", 1 - call.outcome_2W[0].long(), layer=layer)
    return call.kept_TK
