"""One rank's part of a call, wherever its packets come from: its inputs, its experts' part, and its
counters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import Dispatched, Experts, Handle, Routing, RowExchange
from imbrex.exchange import plan
from imbrex.runtime.tracing import autocast_now


class Call:
    """A call under way. keep: a backward may follow, so the experts' graph is kept."""

    def __init__(
        self, exchange: RowExchange, experts: Experts, x_TD: Tensor, routing: Routing, *, keep: bool
    ) -> None:
        self.exchange, self.experts, self.keep = exchange, experts, keep
        self.geometry, self.wire = exchange.geometry, exchange.wire
        self.x_TD, self.ids_TK, self.weights_TK = x_TD.detach(), routing.ids_TK, routing.weights_TK.detach()
        self.autocast = autocast_now(x_TD.device.type)

    def run_experts(self, rows_RD: Tensor, weights_R: Tensor, counts_e: Tensor, beside: Any = None) -> Tensor:
        """The experts' rows; with the graph from rows and weights to them where a backward may follow, and
        under the autocast of the forward whenever they run."""
        exchange, experts = self.exchange, self.experts
        rows_RD.requires_grad_(self.keep)
        weights_R.requires_grad_(self.keep and experts.applies_weights)
        maker = exchange.dispatcher.key
        handle = Handle(weights_R=weights_R, state=(), num_tokens=len(self.x_TD), maker=maker)
        span = exchange.observer.span("experts", layer=exchange.layer)
        with span, torch.set_grad_enabled(self.keep), self.autocast():
            out_RD = experts(Dispatched(rows_RD=rows_RD, counts_e=counts_e, handle=handle, beside=beside))
        exchange.check_rows(out_RD, handle, together=False)
        return out_RD

    def count_load(self) -> None:
        """How many of the own choices each expert has."""
        observer = self.exchange.observer
        if observer.enabled:
            load_E = plan.count_choices(self.ids_TK, self.geometry.placement.num_experts)
            observer.count("expert_load", load_E, layer=self.exchange.layer)

    def count_drops(self, kept_TK: Tensor, gave_up_W: Any) -> None:
        """How many choices were dropped, and which ranks' replies they wanted."""
        observer, layer = self.exchange.observer, self.exchange.layer
        observer.count("drops", (~kept_TK).sum(), layer=layer)
        observer.count("gave_up", gave_up_W, layer=layer)


__all__ = ["Call"]
