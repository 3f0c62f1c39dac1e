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

from imbrex.contracts import Experts, Output, Roles, Routing, RowExchange, RowForm
from imbrex.overlap.decision import roles_of_json
from imbrex.overlap.pipelined import Pipelined
from imbrex.overlap.serial import Serial
from imbrex.overlap.tuner import Recalled, tuner_of


class Fused(Pipelined):
    """The whole batch at once, by kernels that move rows and multiply; serially where there are none.

    `reason` says which, and why. Every rank must come to the same: experts and exchange are alike on all.
    Inside a compiled graph the layer runs serially.

    roles: which blocks do what; `None`: as was tuned for such a layer (`imbrex tune`, `schedule='auto'`),
        else the default. They change no bit.
    """

    fuses = True

    def __init__(self, roles: Roles | None = None) -> None:
        super().__init__("optsche", 1, name="fused")
        self.roles = roles
        self._experts: weakref.WeakKeyDictionary[RowExchange, str | None] = weakref.WeakKeyDictionary()
        self._tuned: weakref.WeakKeyDictionary[RowExchange, Recalled[Roles]] = weakref.WeakKeyDictionary()

    def reason(self, exchange: RowExchange) -> str:
        why_not = why_not_exchange(exchange) or self._experts.get(exchange)
        if why_not is not None:
            return f"runs serially: {why_not}"
        does = "rows come beside gate and up, dx goes home beside the weights' gradients"
        return f"asked for: {does}; {self._about_roles(exchange)}"

    def _about_roles(self, exchange: RowExchange) -> str:
        roles, tuned = self.roles_of(exchange), self._tuned.get(exchange)
        numbers = ", ".join(
            f"{what} by {'default' if blocks is None else f'{blocks} blocks'}"
            for what, blocks in (("tokens staged", roles.stage), ("sums begun", roles.sums))
        )
        return numbers if tuned is None or not tuned.origin else f"{numbers} ({tuned.origin})"

    def roles_of(self, exchange: RowExchange) -> Roles:
        tuned = self._tuned.get(exchange)
        return self.roles or (tuned and tuned.value) or Roles()

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
        if self.roles is None and exchange not in self._agreed:
            # Where orders are compared, once an exchange: ranks that disagree hear of it there.
            self._agree(exchange)
            tuner = tuner_of(exchange, experts, x_TD, fuses=True, keeps=True, renews=False)
            self._tuned[exchange] = tuner.recall("fused", roles_of_json)
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
