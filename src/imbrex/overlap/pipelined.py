"""Tokens in chunks: one chunk moves while another is computed."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from imbrex.contracts import Experts, Output, Roles, Routing, RowExchange
from imbrex.overlap.chunks import Backward, Forward
from imbrex.overlap.engine import execute
from imbrex.overlap.serial import Serial
from imbrex.runtime.tracing import differentiated
from imbrex.runtime.words import words
from imbrex.schedule import schedulers
from imbrex.schedule.schedulers import Scheduler
from imbrex.schedule.tasks import Kind, Order, Times, check, tasks

Split = Callable[[int, int, int, int], Sequence[int]]
"""The tokens of every chunk, given a rank's tokens, the number of chunks, the rank and the number of
ranks."""


def split_evenly(num_tokens: int, degree: int, rank: int, num_ranks: int) -> list[int]:
    """Splits as evenly as possible: 5 tokens in 3 chunks are 2, 2 and 1. A chunk may have none."""
    small, extra = divmod(num_tokens, degree)
    return [small + (chunk < extra) for chunk in range(degree)]


def split_by_source(num_tokens: int, degree: int, rank: int, num_ranks: int) -> list[int]:
    """All tokens of a rank in one chunk, by groups of neighbouring ranks: FasterMoE's pieces."""
    group = rank * degree // num_ranks
    return [num_tokens * (chunk == group) for chunk in range(degree)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """The orders of the forward and the backward, the same on all ranks."""

    forward: Order
    backward: Order

    @property
    def degree(self) -> int:
        return self.forward.degree

    @property
    def defer(self) -> bool:
        """Whether the weights' gradients are tasks of their own; else the tasks `experts` compute them."""
        return any(task.kind == Kind.weights for task in self.backward.compute)


MOST_CHUNKS = 256
"""The most chunks. Orders of as many take 0.8 s to make and check, and of four times as many 14 s."""


class Pipelined:
    """Runs chunks of tokens in the order of a scheduler, forward and backward. Results are those of `serial`.

    scheduler: a name in `imbrex.overlap.SCHEDULERS`, or a function from times to an `Order`.
    degree: the number of chunks. split: gives the number of tokens of every chunk.
    times: seconds of the forward's and of the backward's tasks, as a profile measures them; by default all
        tasks take equally long. The backward also has `Kind.weights`, the gradients of the weights; if an
        order leaves these tasks out, they are computed with the experts.

    Ranks compare their orders before the first exchange. Inside a compiled graph the layer runs serially.
    There are no gradients of gradients.
    """

    fuses = False
    """Whether one kernel both moves and computes; see `imbrex.overlap.fused`."""
    roles: Roles | None = None
    """Blocks of these kernels; `None`: as tuned for the exchange."""

    def __init__(
        self,
        scheduler: str | Scheduler = "optsche",
        degree: int = 2,
        *,
        split: Split = split_evenly,
        times: tuple[Any, Any] | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(degree, int) or degree < 1:
            raise ValueError(f"schedule: {degree} chunks; use a whole number of at least 1")
        if degree > MOST_CHUNKS:
            raise ValueError(f"schedule: {degree} chunks; use at most {MOST_CHUNKS}")
        self.scheduler = find(scheduler)
        self.degree, self.split, self.times = degree, split, times
        label = scheduler if isinstance(scheduler, str) else getattr(scheduler, "__name__", "scheduler")
        self.name = name or f"{label}-{degree}"
        self._agreed: weakref.WeakSet[RowExchange] = weakref.WeakSet()
        self._orders: Orders | None = None

    def orders(self) -> Orders:
        """The orders to run, made once. Raises ValueError if the scheduler's cannot run."""
        if self._orders is None:
            forward, backward = self.times or (
                dict.fromkeys(tasks(self.degree, weights=weights), 1.0) for weights in (False, True)
            )
            both = Orders(forward=self._ask(forward), backward=self._ask(backward))
            check(both.forward, self.degree)
            check(both.backward, self.degree, weights=both.defer)
            self._orders = both
        return self._orders

    def _ask(self, times: Times) -> Order:
        """The scheduler's order. Raises ValueError if it gives none; `_agree` tells the other ranks."""
        try:
            order = self.scheduler(times)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"schedule: the scheduler of {self.name} raised {error!r}") from error
        if not isinstance(order, Order):
            raise ValueError(f"schedule: the scheduler of {self.name} gave {order!r}; return an Order")
        return order

    def reason(self, exchange: RowExchange, experts: Experts) -> str:
        return "asked for"

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        exchange: RowExchange,
        experts: Experts,
        addend: Callable[[], Tensor] | None,
    ) -> Output:
        if torch.compiler.is_compiling():
            return Serial().run(x_TD, routing, exchange, experts, addend)
        # One rank's wrong input must be heard by all. The plan's own message says so, except in the call that
        # compares orders first.
        if not self.fuses:  # one chunk says it in its own message
            before = self.degree if exchange in self._agreed else 0
            exchange.dispatcher.check_in(x_TD, routing, before=before)
        orders, geometry = self._agree(exchange), exchange.geometry
        # Where the tokens are the same on every rank, so must be their chunks.
        split = split_evenly if exchange.transport.replicated else self.split
        sizes = split(x_TD.shape[0], orders.degree, geometry.rank, exchange.world_size)
        parameters = tuple(parameters_of(experts))
        keep = differentiated(x_TD, routing.weights_TK, *parameters)
        keep = keep or (addend is not None and torch.is_grad_enabled())
        defer = orders.defer and len(parameters) > 0
        inputs = exchange, experts, x_TD, routing, None, self.roles if self.fuses else sizes
        with torch.no_grad():
            work = Forward(*inputs, keep=keep, defer=defer)
        # After the plan: with it all ranks have heard that all inputs are fine, and rows may have left.
        added = None if addend is None else addend()
        return Output(y_TD=_Run.apply((work, orders), x_TD, routing.weights_TK, added, *parameters))

    def _agree(self, exchange: RowExchange) -> Orders:
        """The orders, compared with all ranks once per exchange: ranks that start their moves in different
        orders, or make tokens ready by other numbers of blocks, would wait for each other forever."""
        if exchange in self._agreed:
            return self.orders()
        problem, orders = None, None
        try:
            orders = self.orders()
        except ValueError as error:
            problem = error
        moves = None if orders is None else (orders.forward.moves, orders.backward.moves)
        checksum = zlib.crc32(repr((moves, self.roles)).encode())
        message = words(problem is not None, self.degree, checksum)
        gathered = exchange.transport.exchange_counts(message)
        if problem is not None:
            raise problem
        for rank, (wrong, degree, other) in enumerate(gathered.tolist()):
            if wrong:
                raise ValueError(
                    f"schedule: rank {rank} has an order that cannot run; its own error says why"
                )
            if (degree, other) != (self.degree, checksum):
                raise ValueError(
                    f"schedule: rank {rank} moves {degree} chunks in another order than this rank its "
                    f"{self.degree}, or by other roles; give every rank the same schedule, made from the "
                    "same times"
                )
        self._agreed.add(exchange)
        assert orders is not None
        return orders


def find(scheduler: str | Scheduler) -> Scheduler:
    """A scheduler by name, or the function itself. Raises ValueError that lists the known names."""
    if not isinstance(scheduler, str):
        return scheduler
    if scheduler not in schedulers.SCHEDULERS:
        known = ", ".join(schedulers.SCHEDULERS)
        raise ValueError(f"schedule: {scheduler!r} is not a scheduler; use one of {known}, or a function")
    return schedulers.SCHEDULERS[scheduler]


def parameters_of(experts: Experts) -> list[Tensor]:
    """The parameters of the experts that are trained."""
    return [parameter for parameter in experts.parameters() if parameter.requires_grad]


class _Run(torch.autograd.Function):
    """All chunks as one function of autograd, so that the backward has an order of its own. The parameters
    are inputs: each gets one gradient a layer, however many chunks there are."""

    @staticmethod
    def forward(
        ctx,
        call: tuple[Forward, Orders],
        x_TD: Tensor,
        weights_TK: Tensor,
        addend_TD: Tensor | None,
        *parameters,
    ):
        work, orders = call
        work.addend_TD = addend_TD
        execute(orders.forward, work)
        y_TD = work.y_TD
        del work.x_TD, work.y_TD, work.addend_TD  # a backward does without them
        if work.keep:
            ctx.work, ctx.orders, ctx.parameters = work, orders, parameters
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.work is None:
            raise RuntimeError("a pipelined layer goes backward once; run its forward again")
        (d_y_TD,) = grads
        needed = ctx.needs_input_grad[4:]
        work = Backward(ctx.work, d_y_TD.contiguous(), ctx.parameters, needed)
        execute(ctx.orders.backward, work)
        ctx.work = None
        gradients = iter(work.d_parameters)
        d_parameters = [next(gradients) if need else None for need in needed]
        d_addend = d_y_TD if ctx.needs_input_grad[3] else None
        return None, work.d_x_TD, work.d_weights_TK, d_addend, *d_parameters


__all__ = ["Orders", "Pipelined", "find", "split_by_source", "split_evenly"]
