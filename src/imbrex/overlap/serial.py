"""One step after the other: the reference for every other strategy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from torch import Tensor

from imbrex.contracts import Dispatched, Experts, Routing
from imbrex.exchange.exchange import Exchange
from imbrex.observe import bracket_backward


class Serial:
    """Dispatch, experts, what is added (the shared experts), combine.

    keep_rows: keep what the experts received for their backward, or dispatch it again there.
    """

    name = "serial"

    def __init__(self, *, keep_rows: bool = True) -> None:
        self.keep_rows = keep_rows

    def reason(self, exchange: Exchange) -> str:
        return "asked for"

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        exchange: Exchange,
        experts: Experts,
        addend: Callable[[], Tensor] | None,
    ) -> Tensor:
        fp8_rows = getattr(experts, "takes_fp8_rows", False)
        in_place = getattr(experts, "takes_tokens_in_place", False)
        dispatched = exchange.dispatch(x_TD, routing, fp8_rows=fp8_rows, in_place=in_place)
        keeping = nullcontext() if self.keep_rows else exchange.dispatching_again(x_TD, dispatched)
        with exchange.observer.span("experts", layer=exchange.layer), keeping:
            rows_RD = _computed(dispatched, exchange, experts)
            added = None if addend is None else addend()
        return exchange.combine(rows_RD, dispatched.handle, added, weighted=experts.applies_weights)


def _computed(dispatched: Dispatched, exchange: Exchange, experts: Experts) -> Tensor:
    """The experts' rows; where someone listens, their backward is a span too."""
    observer = exchange.observer
    if not observer.enabled:
        return experts(dispatched)
    return bracket_backward(
        observer,
        "experts_backward",
        lambda rows_RD: experts(replace(dispatched, rows_RD=rows_RD)),
        dispatched.rows_RD,
        layer=exchange.layer,
    )
