"""One step after the other: the default strategy, and the reference for all others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from imbrex.contracts import Dispatched, Experts, Listener, Output, Routing, RowExchange
from imbrex.experts import give_away, surely_fit
from imbrex.observe import bracket_backward


class Serial:
    """Runs one step after the other: dispatch, experts, the addend (shared experts), combine.

    keep_rows: whether the rows that the experts received are kept for their backward. If not, the backward
        dispatches them again. A compiled graph always keeps them, so all ranks are compiled or none is.
    """

    name = "serial"

    def __init__(self, *, keep_rows: bool = True) -> None:
        self.keep_rows = keep_rows

    def reason(self, exchange: RowExchange, experts: Experts) -> str:
        return "the default"

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        exchange: RowExchange,
        experts: Experts,
        addend: Callable[[], Tensor] | None,
    ) -> Output:
        compiling = torch.compiler.is_compiling()
        if addend is not None and not compiling:
            addend = cache(addend)
        if compiling or self.keep_rows or not torch.is_grad_enabled():
            y_TD = exchange.dispatcher.run_whole(x_TD, routing, experts, addend)
            if y_TD is not None:
                return Output(y_TD=y_TD)
        promise = not compiling and addend is None and surely_fit(experts)
        again = not (self.keep_rows or compiling) and torch.is_grad_enabled()
        if again:
            exchange.dispatcher.uncompiled = True
        dispatched = exchange.dispatch(x_TD, routing, forms=experts.forms, promise=promise)
        redispatch = exchange.redispatching(x_TD, dispatched) if again else None
        observer, layer = exchange.observer, exchange.layer
        with observer.span("experts", layer=layer), redispatch or nullcontext():
            rows_RD = (
                _watched(dispatched, experts, observer, layer) if observer.enabled else experts(dispatched)
            )
            added = None if addend is None else addend()
        weighted = experts.applies_weights
        if weighted and not compiling:
            # The gradient that combine gives them is a tensor of their own: they may write over it.
            give_away(experts, rows_RD)
        return Output(
            y_TD=exchange.combine(rows_RD, dispatched.handle, added, weighted=weighted, redispatch=redispatch)
        )


def _watched(dispatched: Dispatched, experts: Experts, observer: Listener, layer: int) -> Tensor:
    """The experts' rows; their backward is recorded as a span, too."""
    return bracket_backward(
        observer,
        "experts_backward",
        lambda rows_RD: experts(replace(dispatched, rows_RD=rows_RD)),
        dispatched.rows_RD,
        layer=layer,
    )
