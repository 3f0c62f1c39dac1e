"""The strategy `fused`: kernels move rows between GPUs while they compute the experts' products.

step                 serial                                 fused
rows out, gate/up    route and pull, then the product       route and stage, then rows and product in one
down, y home         product, then sums                     one launch for the widest experts, or by roles
dy out, down back    pull, then the product                 stage, then rows and product in one
dx home              two products, then sums                one launch

The results have the bits of `serial`, also in a compiled graph, where the layer is one operator.
docs/fused-kernels.md says what each kernel does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from imbrex.contracts import Experts, Output, Roles, Routing, RowExchange, RowForm
from imbrex.exchange.layer_op import fused_layer
from imbrex.experts.experts import Experts as Ours
from imbrex.kernels.ffn.ffn import can_bring_gradient
from imbrex.overlap.decision import roles_of_json, why_not_roles
from imbrex.overlap.pipelined import Pipelined
from imbrex.overlap.serial import Serial
from imbrex.overlap.tuner import tuner_of
from imbrex.runtime.members import member


class Fused(Pipelined):
    """Runs the batch in one piece, by kernels that both move rows and multiply. If the exchange or the
    experts have no such kernels, it runs serially; `reason` says which, and why.

    Exchange and experts must be of the same kind on every rank, so that all ranks come to the same result. In
    a compiled graph the layer is fused if it has imbrex's own experts in bfloat16, otherwise it is serial.

    roles: which blocks of the kernels do what; no bit depends on them. `None`: those tuned for such a layer
        by `imbrex tune` or `schedule='auto'`, otherwise the default ones. A compiled graph uses those that
        the exchange has from a call outside of the graph.

    Raises ValueError for roles that no kernel can have.
    """

    fuses = True

    def __init__(self, roles: Roles | None = None) -> None:
        super().__init__("optsche", 1, name="fused")
        reason = None if roles is None else why_not_roles(roles)
        if reason is not None:
            raise ValueError(f"schedule 'fused': {reason}")
        self.roles = roles
        self._origins: weakref.WeakKeyDictionary[RowExchange, str] = weakref.WeakKeyDictionary()

    def reason(self, exchange: RowExchange, experts: Experts) -> str:
        why_not = why_not_exchange(exchange) or why_not_experts(experts)
        if why_not is not None:
            return f"runs serially: {why_not}"
        return f"asked for: {self.describe(exchange, experts)}"

    def describe(self, exchange: RowExchange, experts: Experts) -> str:
        """Which steps are fused and which are not, by which roles, and whether a compiled graph is."""
        rows = why_rows_before(experts)
        before = why_dy_before(experts, self.roles or exchange.dispatcher.roles)
        behind, graph = why_dx_behind(experts), why_not_in_graph(experts)
        rows = "beside gate and up" if rows is None else f"before gate and up ({rows})"
        dy = "beside the gradient through down" if before is None else f"before its product ({before})"
        dx = "beside" if behind is None else "behind"
        why = "" if behind is None else f" ({behind})"
        graph = "" if graph is None else f"; serially in a compiled graph ({graph})"
        description = f"rows come {rows}, dx goes home {dx} the weights' gradients{why}, dy comes {dy}"
        return f"{description}; {self._describe_roles(exchange)}{graph}"

    def _describe_roles(self, exchange: RowExchange) -> str:
        roles, origin = self.roles or exchange.dispatcher.roles, self._origins.get(exchange)
        numbers = ", ".join(
            f"{what} by {'default' if blocks is None else f'{blocks} blocks'}"
            for what, blocks in (("tokens staged", roles.stage), ("sums begun", roles.sums))
        )
        if roles.rows is not None:
            numbers = f"{numbers}, rows brought by the first {roles.rows} blocks"
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
        if torch.compiler.is_compiling():
            return run_in_graph(x_TD, routing, exchange, experts, addend)
        addend, begun = None if addend is None else cache(addend), exchange in self._agreed
        arguments = x_TD, routing, exchange, experts, addend
        # A call in one piece asks the experts itself, in less time.
        whole = self._run_whole(*arguments) if begun else None
        if whole is None and (why_not_experts(experts) is not None or why_not_exchange(exchange) is not None):
            return Serial().run(*arguments)
        if not begun:
            self._begin(x_TD, routing, exchange, experts)
            whole = self._run_whole(*arguments)
        return super().run(*arguments) if whole is None else Output(y_TD=whole)

    def _begin(self, x_TD: Tensor, routing: Routing, exchange: RowExchange, experts: Experts) -> None:
        """Check the first input of an exchange, compare schedules, and take the roles that were tuned."""
        # Before anything else: peers may have a wrong input, or run this call serially.
        exchange.dispatcher.fusing(self.roles).check_in(x_TD, routing)
        self._agree(exchange)  # before ranks exchange anything else for tuning
        if self.roles is None:
            tuner = tuner_of(exchange, experts, x_TD, fuses=True, uses_files=True, renews=False)
            stored = tuner.load("fused", roles_of_json)
            exchange.dispatcher.roles = stored.value or Roles()
            self._origins[exchange] = stored.origin

    def _run_whole(
        self,
        x_TD: Tensor,
        routing: Routing,
        exchange: RowExchange,
        experts: Experts,
        addend: Callable[[], Tensor] | None,
    ) -> Tensor | None:
        """Run the call in one piece if kernels serve all of it: y_TD, or `None` if tasks are to do it."""
        if not isinstance(experts, Ours):
            return None
        fusing = exchange.dispatcher.fusing(self.roles, member(experts, "down_proj").shape[2])
        return fusing.run_whole(x_TD, routing, experts, addend)


def run_in_graph(
    x_TD: Tensor,
    routing: Routing,
    exchange: RowExchange,
    experts: Experts,
    addend: Callable[[], Tensor] | None,
) -> Output:
    """Run the layer while it is compiled: as one operator for imbrex's own experts in bfloat16, otherwise
    serially."""
    why_not = why_not_exchange(exchange) or why_not_experts(experts) or why_not_in_graph(experts)
    if why_not is not None or x_TD.dtype != torch.bfloat16:
        return Serial().run(x_TD, routing, exchange, experts, addend)
    assert isinstance(experts, Ours)
    weights = experts.gate_up_proj.to(x_TD.dtype), experts.down_proj.to(x_TD.dtype)
    added_TD = None if addend is None else addend()
    return Output(y_TD=fused_layer(x_TD, routing, added_TD, weights, exchange.dispatcher.key))


def why_not_exchange(exchange: RowExchange) -> str | None:
    """Why the products' kernels cannot move the rows of this exchange, or `None`."""
    if exchange.dispatcher.why_not_form(RowForm.UNDER_WAY) is None:
        return None
    if exchange.world_size == 1:
        return "one rank has nothing to bring"
    return f"{exchange.transport.name!r} moves rows before their product; transport='nvlink' can do it beside"


def why_not_experts(experts: Experts) -> str | None:
    """Why the kernels of these experts cannot move rows, or `None`."""
    if RowForm.UNDER_WAY in experts.forms:
        return None
    return (
        "these experts cannot bring their rows: it takes implementation='kernels', D and F multiples of 8, "
        "and no forward of their own"
    )


def why_not_in_graph(experts: Experts) -> str | None:
    """Why experts whose kernels can move rows do not so in a compiled graph, or `None`."""
    if not isinstance(experts, Ours):
        return "these experts are not imbrex's own"
    if not (experts.unchanged and experts.inputs_unchanged):
        return "a hook or another forward may change what they take or give"
    return None if experts.gradient_sums is None else "a graph may not add to gradient_sums in a backward"


def why_rows_before(experts: Experts) -> str | None:
    """Why rows come before their product, as far as it does not depend on a call, or `None`."""
    if isinstance(experts, Ours) and not experts.inputs_unchanged:
        return "a hook may read them"
    return None


def why_dy_before(experts: Experts, roles: Roles) -> str | None:
    """Why rows of dy come before their product, as far as it does not depend on a call, or `None`."""
    if roles.dy == 0:
        return "the roles say so"
    if isinstance(experts, Ours):
        if not experts.unchanged:
            return "a hook or another forward may read the experts' result"
        if not can_bring_gradient(experts.down_proj):
            return f"F={experts.down_proj.shape[2]} is no multiple of 64"
    return None


def why_dx_behind(experts: Experts) -> str | None:
    """Why sums of dx go home behind the weights' gradients, as far as it does not depend on a call, or
    `None`."""
    if isinstance(experts, Ours):
        if not (experts.gate_up_proj.requires_grad and experts.down_proj.requires_grad):
            return "not both weights are trained"
        if not {"gate_up_proj", "down_proj"} <= dict(experts.named_parameters(recurse=False)).keys():
            return "a weight is computed from parameters"
        _, width, inner = experts.down_proj.shape
        if width % 64 or inner % 64:
            return f"D={width} or F={inner} is no multiple of 64"
    return None


__all__ = ["Fused", "why_not_exchange", "why_not_experts"]
