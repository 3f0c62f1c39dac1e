"""One step after the other: the reference for every other strategy."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from imbrex.contracts import Experts, Routing
from imbrex.exchange import Exchange


class Serial:
    """Dispatch, experts, what is added (the shared experts), combine."""

    name = "serial"

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        exchange: Exchange,
        experts: Experts,
        addend: Callable[[], Tensor] | None,
    ) -> Tensor:
        dispatched = exchange.dispatch(x_TD, routing)
        with exchange.observer.span("experts", layer=exchange.layer):
            rows_RD = experts(dispatched)
            added = None if addend is None else addend()
        return exchange.combine(rows_RD, dispatched.handle, added, weighted=experts.applies_weights)
