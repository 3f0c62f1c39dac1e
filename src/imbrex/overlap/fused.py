"""Crossings in the products' kernels: rows come beside gate and up, dx goes home beside weights' gradients.

step                 serial                               fused
rows out, gate/up    route and pull | product             route and stage | rows and product
down, y home         product | sums                       the same
dy out               pull | products                      the same
dx home              product, product | sums              one launch

The numbers are those of `serial`, to the bit. See docs/fused.md for what a kernel does when.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from imbrex.contracts import Experts, Output, Routing, RowExchange, RowForm
from imbrex.overlap.pipelined import Pipelined
from imbrex.overlap.serial import Serial


class Fused(Pipelined):
    """The whole batch at once, by kernels that move rows and multiply; serially where there are none.

    `reason` says which, and why. Every rank must come to the same: experts and exchange are alike on all.
    Inside a compiled graph the layer runs serially.
    """

    fuses = True

    def __init__(self) -> None:
        super().__init__("optsche", 1, name="fused")
        self._experts: weakref.WeakKeyDictionary[RowExchange, str | None] = weakref.WeakKeyDictionary()

    def reason(self, exchange: RowExchange) -> str:
        why_not = why_not_exchange(exchange) or self._experts.get(exchange)
        if why_not is not None:
            return f"runs serially: {why_not}"
        return "asked for: rows come beside gate and up, dx goes home beside the weights' gradients"

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        exchange: RowExchange,
        experts: Experts,
        addend: Callable[[], Tensor] | None,
    ) -> Output:
        why_not = why_not_experts(experts)
        self._experts[exchange] = why_not
        arguments = x_TD, routing, exchange, experts, addend
        serially = why_not is not None or why_not_exchange(exchange) is not None
        if serially or torch.compiler.is_compiling():
            return Serial().run(*arguments)
        return super().run(*arguments)


def why_not_exchange(exchange: RowExchange) -> str | None:
    """Why crossings of this exchange cannot be part of a product's kernel, or `None`."""
    return exchange.dispatcher.why_not_form(RowForm.UNDER_WAY)


def why_not_experts(experts: Experts) -> str | None:
    """Why these experts cannot bring their rows themselves, or `None`."""
    if RowForm.UNDER_WAY in experts.forms:
        return None
    return "these experts cannot bring their rows: it takes implementation='kernels', D and F multiples of 8"


__all__ = ["Fused", "why_not_exchange", "why_not_experts"]
