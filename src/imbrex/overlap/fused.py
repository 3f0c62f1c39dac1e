"""Crossings in the products' kernels: rows come beside gate and up, dx goes home beside weights' gradients.

step                 serial                               fused
rows out, gate/up    route and pull | product             route and stage | rows and product
down, y home         product | sums                       one launch, of the widest experts, or by roles
dy out, down back    pull | product                       stage | rows and product
dx home              product, product | sums              one launch

The numbers are those of `serial`, to the bit, also in a compiled graph, where the layer is one operator. See
docs/fused-kernels.md for what a kernel does when.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from imbrex.contracts import Experts, Output, Roles, Routing, RowExchange, RowForm
from imbrex.exchange.layer_op import fused_layer
from imbrex.experts.experts import Experts as Ours
from imbrex.overlap.decision import roles_of_json
from imbrex.overlap.pipelined import Pipelined
from imbrex.overlap.serial import Serial
from imbrex.overlap.tuner import tuner_of


class Fused(Pipelined):
    """The whole batch at once, by kernels that move rows and multiply; serially where there are none.

    `reason` says which, and why. Every rank must come to the same: experts and exchange are alike on all.
    Inside a compiled graph imbrex's own experts in bfloat16 run so too, as one operator; others serially.

    roles: which blocks do what; `None`: as was tuned for such a layer (`imbrex tune`, `schedule='auto'`),
        else the default. They change no bit. A compiled graph has those that a call outside has found.
    """

    fuses = True

    def __init__(self, roles: Roles | None = None) -> None:
        super().__init__("optsche", 1, name="fused")
        self.roles = roles
        self._experts: weakref.WeakKeyDictionary[RowExchange, str | None] = weakref.WeakKeyDictionary()
        self._origins: weakref.WeakKeyDictionary[RowExchange, str] = weakref.WeakKeyDictionary()

    def reason(self, exchange: RowExchange) -> str:
        why_not = why_not_exchange(exchange) or self._experts.get(exchange)
        if why_not is not None:
            return f"runs serially: {why_not}"
        does = "rows come beside gate and up, dx goes home beside the weights' gradients"
        dy = "before" if (self.roles or exchange.dispatcher.roles).dy == 0 else "beside"
        does = f"{does}, dy comes {dy} the gradient through down"
        return f"asked for: {does}; {self._about_roles(exchange)}"

    def _about_roles(self, exchange: RowExchange) -> str:
        roles, origin = self.roles or exchange.dispatcher.roles, self._origins.get(exchange)
        numbers = ", ".join(
            f"{what} by {'default' if blocks is None else f'{blocks} blocks'}"
            for what, blocks in (("tokens staged", roles.stage), ("sums begun", roles.sums))
        )
        if roles.first is not None:
            numbers = f"{numbers}, others' rows of narrow experts first and summed by {roles.first} blocks"
        return f"{numbers} ({origin})" if origin else numbers

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        exchange: RowExchange,
        experts: Experts,
        addend: Callable[[], Tensor] | None,
    ) -> Output:
        arguments = x_TD, routing, exchange, experts, addend
        if torch.compiler.is_compiling():
            return run_in_graph(*arguments)
        why_not = why_not_experts(experts)
        self._experts[exchange] = why_not
        if why_not is not None or why_not_exchange(exchange) is not None:
            return Serial().run(*arguments)
        if self.roles is None and exchange not in self._agreed:
            # Where orders are compared, once an exchange: ranks that disagree hear of it there.
            self._agree(exchange)
            tuner = tuner_of(exchange, experts, x_TD, fuses=True, keeps=True, renews=False)
            recalled = tuner.recall("fused", roles_of_json)
            exchange.dispatcher.roles = recalled.value or Roles()
            self._origins[exchange] = recalled.origin
        return super().run(*arguments)


def run_in_graph(
    x_TD: Tensor,
    routing: Routing,
    exchange: RowExchange,
    experts: Experts,
    addend: Callable[[], Tensor] | None,
) -> Output:
    """`Fused.run` while somebody compiles: one operator where the experts are imbrex's own, else serially."""
    fit = x_TD.dtype == torch.bfloat16 and RowForm.UNDER_WAY in experts.forms
    own = fit and isinstance(experts, Ours) and experts.gradient_sums is None
    if not own or why_not_exchange(exchange) is not None:
        return Serial().run(x_TD, routing, exchange, experts, addend)
    assert isinstance(experts, Ours)
    weights = experts.gate_up_proj.to(x_TD.dtype), experts.down_proj.to(x_TD.dtype)
    added_TD = None if addend is None else addend()
    return Output(y_TD=fused_layer(x_TD, routing, added_TD, weights, exchange.dispatcher.key))


def why_not_exchange(exchange: RowExchange) -> str | None:
    """Why crossings of this exchange cannot be part of a product's kernel, or `None`."""
    if exchange.dispatcher.why_not_form(RowForm.UNDER_WAY) is None:
        return None
    if exchange.world_size == 1:
        return "one rank has nothing to bring"
    return f"{exchange.transport.name!r} moves rows before their product; transport='nvlink' can do it beside"


def why_not_experts(experts: Experts) -> str | None:
    """Why these experts cannot bring their rows themselves, or `None`."""
    if RowForm.UNDER_WAY in experts.forms:
        return None
    return "these experts cannot bring their rows: it takes implementation='kernels', D and F multiples of 8"


__all__ = ["Fused", "why_not_exchange", "why_not_experts"]
