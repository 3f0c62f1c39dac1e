"""The schedule `events`, after Aristos: ranks exchange packets without a barrier, and may leave out late
peers (docs/events.md)."""

from __future__ import annotations

import math
import re
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from imbrex.contracts import Experts, Output, Routing, RowExchange, Strategy, Transport
from imbrex.exchange.agreement import agree
from imbrex.overlap.events.backward import Backward
from imbrex.overlap.events.budget import WHOLE
from imbrex.overlap.events.device import DeviceBackward, DeviceForward, DeviceSeat
from imbrex.overlap.events.forward import Forward
from imbrex.overlap.events.ledger import Kind, Ledger
from imbrex.overlap.events.seat import Patience, Seat, learnt
from imbrex.overlap.fused import Fused, why_not_experts
from imbrex.overlap.pipelined import parameters_of
from imbrex.overlap.serial import Serial
from imbrex.runtime.compiling import tell_compiling, tell_running
from imbrex.runtime.tracing import differentiated, in_trace_too

ARGUMENTS = {"tau", "epsilon", "every", "budget"}


class Events:
    """Packets of rows from rank to rank, computed as they come, with no barrier of all ranks.

    tau: seconds to wait for the last peers, counted from when no more than `epsilon` of them are missing;
        `p95`, as long as 95 % of the last 200 such waits took; or `1.5 p50`, until the call has taken 1.5
        times as long as half of the last 200 did. Infinite: patience has no end.
    epsilon: how many peers a rank may do without in a call. Their choices are dropped, and `kept_TK` says so.
    every: of so many calls in a row a rank does without anybody in one at most; 1: in any. All ranks count
        alike, so the calls in which they do without the same late peer are the same.
    budget: share of all ranks' choices that a layer may drop, counted from its first call on; 1: any. What is
        not dropped now may be later. Even choices never exceed it, others by less than a call's.

    With an infinite tau or an epsilon of 0 the numbers are `serial`'s to the bit. Over `nvlink` an epsilon of
    0 is run by the kernels of `Fused`, whose tasks are tiles of an expert, begun as their rows come. The
    time-out of an exchange is another thing: a rank that is silent for so long is lost, however patient its
    peers are.
    """

    def __init__(
        self, tau: float | str = math.inf, epsilon: int = 0, every: int = 1, budget: float = 1.0
    ) -> None:
        problem = why_not_patience(tau, epsilon, every, budget)
        if problem is not None:
            raise ValueError(f"schedule: {problem}")
        self.epsilon, self.every, self.budget = epsilon, every, float(budget)
        self.tau = tau if isinstance(tau, str) else math.inf if tau > sys.float_info.max else float(tau)
        bound = "" if every == 1 else f", every={every}"
        bound += "" if budget == 1 else f", budget={self.budget}"
        self.name = "events" if epsilon == 0 else f"events(tau={tau}, epsilon={epsilon}{bound})"
        self._seats: weakref.WeakKeyDictionary[RowExchange, Seat | DeviceSeat] = weakref.WeakKeyDictionary()
        self._fused = Fused()
        self._whole: weakref.WeakKeyDictionary[RowExchange, Strategy] = weakref.WeakKeyDictionary()

    @staticmethod
    def of(name: str) -> Events | None:
        """The schedule with this name, such as `events(tau=0.05, epsilon=1)`; `None` for another's. Raises
        ValueError where there is something else between the brackets."""
        match = re.fullmatch(r"events\((.*)\)", name)
        if match is None:
            return Events() if name == "events" else None
        words = [[part.strip() for part in word.split("=", 1)] for word in match[1].split(",")]
        arguments = {key: value for key, *values in words for value in values}
        if (
            {"tau", "epsilon"} - arguments.keys()
            or arguments.keys() - ARGUMENTS
            or len(arguments) < len(words)
        ):
            raise ValueError(
                f"schedule: {name!r} cannot be read; write events(tau=0.05, epsilon=1); behind them "
                "budget=0.01 where 1 % of the choices may be dropped, or every=19 where one of 19 calls may "
                "be given up"
            )
        tau, budget = (_number(arguments.get(key, "1")) for key in ("tau", "budget"))
        epsilon, every = (_integer(arguments.get(key, "1")) for key in ("epsilon", "every"))
        return Events(tau, epsilon, every, cast("float", budget))

    def __reduce__(self) -> tuple[Any, ...]:
        """Tells pickle how to make it again; connections stay with this process."""
        return Events, (self.tau, self.epsilon, self.every, self.budget)

    def reason(self, exchange: RowExchange, experts: Experts) -> str:
        if exchange.world_size == 1:
            return "asked for; one rank: as serial"
        if self._waits_for_all(exchange):
            what = "runs serially: the experts of some ranks cannot bring their rows, those of others can"
            if not isinstance(self._whole.get(exchange), Serial):
                what = self._fused.reason(exchange, experts).removeprefix("asked for: ")
            return f"asked for; nobody may be missing, so as fused: {what}"
        often = "" if self.every == 1 else f", in one of {self.every} calls"
        often += "" if self.budget == 1 else f", for {100 * self.budget:g} % of the choices"
        clock = ", by the GPU's clock" if exchange.transport.name == "nvlink" else ""
        return f"asked for; up to {self.epsilon} peers may be missing after tau={self.tau}{often}{clock}"

    def herald(self, exchange: RowExchange) -> Callable[[Tensor, Routing], None] | None:
        """The seat's way to tell all ranks of a wrong input, once their hosts no longer meet."""
        seat = self._seats.get(exchange)
        return None if seat is None else partial(seat.check_in, exchange.geometry)

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        exchange: RowExchange,
        experts: Experts,
        addend: Callable[[], Tensor] | None,
    ) -> Output:
        if exchange.world_size == 1:
            return Serial().run(x_TD, routing, exchange, experts, addend)
        if torch.compiler.is_compiling():
            _prepare()
            return _Outside.run(self, x_TD, routing, exchange, experts, addend)
        tell_running()
        if self._waits_for_all(exchange):
            whole = self._whole.get(exchange) or self._choose(x_TD, routing, exchange, experts)
            return whole.run(x_TD, routing, exchange, experts, addend)
        parameters = tuple(parameters_of(experts))
        keep = differentiated(x_TD, routing.weights_TK, *parameters)
        seat = self._seat(x_TD, routing, exchange)
        seat.check_in(exchange.geometry, x_TD, routing)
        problem = _why_not_placement(exchange)
        if problem is not None:
            # Every rank has the same placement, so this is every rank's sentence.
            raise ValueError(f"schedule: {problem}")
        call = exchange, experts, x_TD, routing
        forward = (
            DeviceForward(seat, *call, keep=keep)
            if isinstance(seat, DeviceSeat)
            else Forward(seat, *call, keep=keep)
        )
        forward.send()
        added = None if addend is None else addend()
        if not keep:
            forward.run()
            y_TD, kept_TK = forward.outputs(added)
            return Output(y_TD=y_TD, kept_TK=kept_TK)
        y_TD, kept_TK = _Run.apply(forward, x_TD, routing.weights_TK, added, *parameters)
        return Output(y_TD=y_TD, kept_TK=kept_TK if kept_TK.numel() else None)

    def _waits_for_all(self, exchange: RowExchange) -> bool:
        """Whether kernels do all waiting, and nobody may be missing: those of `Fused` run such a call."""
        return self.epsilon == 0 and exchange.transport.name == "nvlink"

    def _choose(self, x_TD: Tensor, routing: Routing, exchange: RowExchange, experts: Experts) -> Strategy:
        """Choose how calls run that wait for all: by fused, or serially where ranks have experts of unlike
        kinds. Collective, in an exchange's first call."""
        exchange.dispatcher.check_in(x_TD, routing)
        fits_W = self._agree(exchange, fits=why_not_experts(experts) is None)
        whole = self._whole[exchange] = self._fused if min(fits_W) == max(fits_W) else Serial()
        return whole

    def _seat(self, x_TD: Tensor, routing: Routing, exchange: RowExchange) -> Seat | DeviceSeat:
        seat = self._seats.get(exchange)
        if seat is None:
            # A layer whose first input is wrong says so in this way, before its strategy runs.
            exchange.dispatcher.check_in(x_TD, routing)
            self._agree(exchange)
            if exchange.transport.name == "nvlink":
                patience = {"tau": self.tau, "epsilon": self.epsilon, "every": self.every}
                patience["budget"] = self.budget
                seat = DeviceSeat(exchange, x_TD.shape[0], **patience)
            else:
                seat = Seat(exchange, Patience(self.tau, self.every), self.epsilon, self.budget)
            self._seats[exchange] = seat
        return seat

    def _agree(self, exchange: RowExchange, *, fits: bool = False) -> list[int]:
        """Raise ValueError on every rank if ranks have other settings, or if one cannot be served. Returns by
        rank what it says of its experts: whether their kernels can move rows."""
        problem = why_not_events(exchange, self.epsilon)
        error = None if problem is None else ValueError(f"schedule: {problem}")
        settings = {"tau": str(self.tau), "epsilon": self.epsilon, "every": self.every}
        settings["budget"] = str(self.budget)
        answers = agree(exchange.transport, settings, "schedule: events", error, own=(fits,))
        return [answer for (answer,) in answers]


class _Outside:
    """A place for `Events.run` as a compiler leaves it out of its graph."""

    run: Any = None


@in_trace_too
def _prepare() -> None:
    """Tell others that this rank compiles, and make `_Outside.run`: not before a compiler traces, since that
    imports the compiler."""
    tell_compiling()
    reason = "a layer with schedule='events' breaks the graph: schedule='serial' does not"
    _Outside.run = staticmethod(torch.compiler.disable(Events.run, reason=reason))


def _integer(text: str) -> int:
    """The whole number that `text` is; any other text as it is, for `why_not_patience` to quote."""
    return int(text) if re.fullmatch(r"-?\d+", text) else cast("int", text)


def _number(text: str) -> float | str:
    """The number that `text` is; any other text as it is."""
    with suppress(ValueError):
        return float(text)
    return text


def why_not_patience(tau: Any, epsilon: Any, every: Any = 1, budget: Any = 1.0) -> str | None:
    """Why these are no patience, or `None`."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        return f"every is {every!r}; give of how many calls one may be given up, 1 or more"
    if isinstance(epsilon, bool) or not isinstance(epsilon, int) or epsilon < 0:
        return f"epsilon is {epsilon!r}; give how many peers may be missing, 0 or more"
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 1 / WHOLE <= budget <= 1:
        return f"budget is {budget!r}; give the share of choices that may be dropped, {1 / WHOLE:.5f} to 1"
    other = "a quantile of the last waits as p95, or times of a usual call as 1.5 p50"
    if isinstance(tau, str):
        return f"tau is {tau!r}; give seconds, {other}" if learnt(tau) is None else None
    if isinstance(tau, bool) or not isinstance(tau, int | float) or not tau >= 0:
        return f"tau is {tau!r}; give seconds of at least 0, {other}"
    return None


def why_not_events(exchange: RowExchange, epsilon: int) -> str | None:
    """Why this exchange cannot be run by events, or `None`."""
    transport, geometry = exchange.transport, exchange.geometry
    if transport.device.type != "cpu" and transport.name != "nvlink":
        return f"events move rows of GPUs over nvlink alone, not over {transport.name}; use schedule='serial'"
    if transport.name == "nvlink" and epsilon == 0:
        return None
    out = exchange.wire.dispatch, exchange.wire.combine_backward
    if transport.name == "nvlink" and any(codec.name != "identity" for codec in out):
        return (
            "patient events over nvlink move tokens as they are, and sums also as fp8; give an epsilon of 0, "
            "codec={'combine': 'fp8', 'dispatch_backward': 'fp8'} or none, or use schedule='serial'"
        )
    if transport.replicated:
        return f"transport {transport.name!r} moves no rows that events could wait for; use 'alltoall'"
    if transport.name != "nvlink" and cast("Transport", transport).ranks_per_node is not None:
        return f"transport {transport.name!r} sends rows by way of nodes, events straight; use 'alltoall'"
    if geometry.rows_per_slot is not None or geometry.alignment != 1:
        return "padding wants the tokens of all ranks, which events do not wait for; leave it out"
    if epsilon >= exchange.world_size:
        most_peers = exchange.world_size - 1
        return f"epsilon is {epsilon}, but a rank has {most_peers} peers; give 0 to {most_peers}"
    return None


def _why_not_placement(exchange: RowExchange) -> str | None:
    if exchange.geometry.placement.has_replicas:
        return (
            "events choose no replicas: that wants the choices of all ranks; use schedule='serial', or over "
            "nvlink an epsilon of 0, or a placement without replicas"
        )
    return None


class _Run(torch.autograd.Function):
    """A whole call as one function of autograd, whose backward knows what its forward kept. The parameters
    are inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: Forward | DeviceForward,
        x_TD: Tensor,
        weights_TK: Tensor,
        addend_TD: Any,
        *parameters: Any,
    ):
        forward.run()
        y_TD, kept_TK = forward.outputs(addend_TD)
        kept_TK = torch.empty(0, dtype=torch.bool, device="cpu") if kept_TK is None else kept_TK
        ctx.mark_non_differentiable(kept_TK)
        ctx.work, ctx.parameters = forward, parameters
        return y_TD, kept_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.work is None:
            raise RuntimeError("a layer that runs by events goes backward once; run its forward again")
        needed = ctx.needs_input_grad[4:]
        parameters = [p for p, need in zip(ctx.parameters, needed, strict=True) if need]
        d_y_TD = grads[0].contiguous()
        call = ctx.work, d_y_TD, parameters
        backward = DeviceBackward(*call) if isinstance(ctx.work, DeviceForward) else Backward(*call)
        d_x_TD, d_weights_TK, d_parameters = backward.run()
        ctx.work = None
        each = iter(d_parameters)
        d_each = [next(each) if need else None for need in needed]
        d_addend = d_y_TD if ctx.needs_input_grad[3] else None
        return None, d_x_TD, d_weights_TK, d_addend, *d_each


__all__ = ["Events", "Kind", "Ledger", "why_not_events", "why_not_patience"]
