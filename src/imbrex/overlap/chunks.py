"""The steps of a layer on chunks of its tokens, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from imbrex.contracts import (
    Crossing,
    Dispatched,
    Experts,
    Fusing,
    Handle,
    Pending,
    Roles,
    Routing,
    RowExchange,
    RowForm,
)
from imbrex.exchange.dispatcher import form_of_arrival
from imbrex.experts.experts import Experts as Ours
from imbrex.kernels.exchange.lease import Staged
from imbrex.kernels.ffn.ffn import bring_gradient, brings_gradient
from imbrex.kernels.fused.rows_out import rows_out
from imbrex.overlap.gradients import gradients_of
from imbrex.runtime.deferred import Deferral
from imbrex.runtime.gradients import Place, begin_of, end_of, keep_values, saves_elsewhere, values_at


@dataclass(slots=True)
class Chunk:
    """Everything known of a chunk so far. Tensors of a later step replace those of an earlier one."""

    tokens: slice
    plan: Any
    crossing: Crossing | None = None
    state: Sequence[Tensor] = ()
    weights_R: Tensor | None = None
    rows_RD: Place | None = None
    beside: Any = None
    counts_e: Tensor | None = None
    out_RD: Place | None = None
    left: list[Any] = field(default_factory=list)
    deferral: Deferral | None = None


class Forward:
    """Outputs of all chunks in `y_TD`. With gradients wanted, every chunk keeps the graph of its experts.

    defer: the backward computes gradients of the parameters in a task of their own.
    sizes: tokens of every chunk; or the roles of kernels that move and compute one chunk in one, with nothing
        in a stream beside the caller's, `None` for those that were tuned.
    """

    in_turn = False
    """Whether no row leaves before its task."""

    def __init__(
        self,
        exchange: RowExchange,
        experts: Experts,
        x_TD: Tensor,
        routing: Routing,
        addend_TD: Tensor | None,
        sizes: Sequence[int] | Roles | None,
        *,
        keep: bool,
        defer: bool = False,
    ) -> None:
        self.exchange, self.layer_experts = exchange, experts
        self.fusing: Fusing | None = None
        if sizes is None or isinstance(sizes, Roles):
            inner = experts.down_proj.shape[2] if isinstance(experts, Ours) else 0
            self.dispatcher = self.fusing = exchange.dispatcher.fusing(sizes, inner)
            sizes = [len(x_TD)]
        else:
            self.dispatcher = exchange.dispatcher.beside(len(sizes), in_turn=self.in_turn)
        self.keep, self.defer = keep, keep and defer
        # A caller's hooks bring back what is saved, or compute it again: nobody else shall hold it.
        self.lets_go = keep and saves_elsewhere()
        forms = (RowForm.ROWS,) if keep and self.fusing is None else experts.forms
        if self.fusing is not None and isinstance(experts, Ours) and not experts.inputs_unchanged:
            forms = (RowForm.ROWS,)  # which a hook reads before their product
        self.form = self.dispatcher.form_of(forms, x_TD, routing.weights_TK)
        self.x_TD, self.weights_TK, self.addend_TD = x_TD, routing.weights_TK, addend_TD
        self.y_TD = x_TD.new_empty(x_TD.shape)
        bounds = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
        parts = [
            (x_TD[b], Routing(ids_TK=routing.ids_TK[b], weights_TK=routing.weights_TK[b])) for b in bounds
        ]
        self.dispatcher.uncompiled = self.fusing is None
        plans = self.dispatcher.agree(parts, self.form)
        self.chunks = [Chunk(tokens=b, plan=plan) for b, plan in zip(bounds, plans, strict=True)]

    def encode_out(self, chunk: int) -> None:
        c = self.chunks[chunk]
        inputs = c.plan, self.x_TD[c.tokens], self.weights_TK[c.tokens]
        c.crossing = self.dispatcher.dispatch(*inputs, self.form)

    def move_out(self, chunk: int) -> Pending | None:
        return _crossing(self.chunks[chunk]).move()

    def decode_out(self, chunk: int, received: Any) -> None:
        c = self.chunks[chunk]
        c.rows_RD, c.weights_R, c.counts_e, c.state, c.beside = _crossing(c).read(received)
        c.crossing = None

    def experts(self, chunk: int) -> None:
        c = self.chunks[chunk]
        assert isinstance(c.rows_RD, Tensor)
        assert c.weights_R is not None
        assert c.counts_e is not None
        weighs = self.layer_experts.applies_weights
        with (
            self.exchange.observer.span("experts", layer=self.exchange.layer),
            torch.set_grad_enabled(self.keep),
        ):
            c.rows_RD = begin_of(c.rows_RD) if self.lets_go else c.rows_RD.detach().requires_grad_(self.keep)
            c.weights_R = c.weights_R.detach().requires_grad_(self.keep and weighs)
            tokens, maker = c.tokens.stop - c.tokens.start, self.dispatcher.key
            handle = Handle(weights_R=c.weights_R, state=tuple(c.state), num_tokens=tokens, maker=maker)
            scales_RB = c.beside if isinstance(c.beside, Tensor) else None
            dispatched = Dispatched(
                rows_RD=c.rows_RD,
                counts_e=c.counts_e,
                handle=handle,
                form=form_of_arrival(self.form, c.beside),
                scales_RB=scales_RB,
                beside=c.beside if scales_RB is None else None,
                leave=None if self.fusing is None else c.left.append,
            )
            c.beside = None
            c.deferral = Deferral(early=self.fusing is not None) if self.defer else None
            with nullcontext() if c.deferral is None else c.deferral.record():
                out_RD = self.layer_experts(dispatched)
            c.out_RD = keep_values(out_RD) if self.lets_go and not weighs else out_RD
            self.exchange.check_rows(out_RD, handle, together=False)

    def encode_back(self, chunk: int) -> None:
        c = self.chunks[chunk]
        assert isinstance(c.out_RD, Tensor)
        weights = None if self.layer_experts.applies_weights else c.weights_R
        addend_TD = None if self.addend_TD is None else self.addend_TD[c.tokens]
        out_TD, addend = self.y_TD[c.tokens], None if addend_TD is None else lambda: addend_TD
        inputs = c.out_RD.detach(), weights, c.state, len(out_TD), addend, out_TD
        if self.fusing is None:
            c.crossing = self.dispatcher.combine(*inputs)
        else:
            c.crossing, c.left = self.fusing.combine_beside(c.left, *inputs), []

    def move_back(self, chunk: int) -> Pending | None:
        return _crossing(self.chunks[chunk]).move()

    def decode_back(self, chunk: int, received: Any) -> None:
        c = self.chunks[chunk]
        _crossing(c).read(received)
        c.crossing = None
        if not self.keep:
            c.rows_RD = c.weights_R = c.out_RD = None
            return
        assert isinstance(c.out_RD, Tensor)
        assert isinstance(c.rows_RD, Tensor)
        if self.lets_go or self.layer_experts.applies_weights:
            c.out_RD = end_of(c.out_RD)
        if self.lets_go:
            c.rows_RD = end_of(c.rows_RD)


class Backward:
    """Gradients of tokens and weights in `d_x_TD` and `d_weights_TK`, of the parameters in `d_parameters`.

    The graphs of the experts are gone afterwards.
    """

    def __init__(
        self, forward: Forward, d_y_TD: Tensor, parameters: Sequence[Tensor], needed: Sequence[bool]
    ) -> None:
        self.forward, self.exchange = forward, forward.exchange
        self.dispatcher, self.fusing = forward.dispatcher, forward.fusing
        self.d_y_TD = d_y_TD
        self.parameters = [p for p, need in zip(parameters, needed, strict=True) if need]
        self.with_rows: list[Tensor | None] = [None] * len(self.parameters)
        self.left: list[Tensor | None] = [None] * len(self.parameters)
        self.d_x_TD = d_y_TD.new_empty(d_y_TD.shape)
        self.d_weights_TK = forward.weights_TK.new_empty(forward.weights_TK.shape)
        self.d_rows: list[tuple[Tensor, Any] | None] = [None] * len(forward.chunks)

    def encode_out(self, chunk: int) -> None:
        c = self.forward.chunks[chunk]
        assert c.out_RD is not None
        assert c.weights_R is not None
        out_RD = None if self.forward.layer_experts.applies_weights else values_at(c.out_RD)
        if self.fusing is not None and out_RD is None and brings_gradient(_node(c.out_RD)):
            c.crossing = self.fusing.combine_backward_beside(self.d_y_TD[c.tokens], c.weights_R, c.state)
            return
        c.crossing = self.dispatcher.combine_backward(self.d_y_TD[c.tokens], out_RD, c.weights_R, c.state)

    def move_out(self, chunk: int) -> Pending | None:
        return _crossing(self.forward.chunks[chunk]).move()

    def decode_out(self, chunk: int, received: Any) -> None:
        c = self.forward.chunks[chunk]
        self.d_rows[chunk] = _crossing(c).read(received)
        c.crossing = None

    def experts(self, chunk: int) -> None:
        c, d_out = self.forward.chunks[chunk], self.d_rows[chunk]
        assert c.out_RD is not None
        assert c.rows_RD is not None
        assert c.weights_R is not None
        assert d_out is not None
        d_out_RD, d_weights_R = d_out
        if isinstance(d_weights_R, Staged):
            bring_gradient(_node(c.out_RD), rows_out(d_weights_R))
        applied_R = c.weights_R if c.weights_R.requires_grad else None
        with self.exchange.observer.span("experts_backward", layer=self.exchange.layer):
            d_rows, d_more_R, gradients = gradients_of(
                c.out_RD, d_out_RD, c.rows_RD, applied_R, self.parameters
            )
        self._add(gradients)
        self.d_rows[chunk] = d_rows, d_weights_R if d_more_R is None else d_more_R
        c.out_RD = c.rows_RD = None

    def weights(self, chunk: int) -> None:
        """The rest of `experts`: of grouped products, the gradients of the weights."""
        c = self.forward.chunks[chunk]
        if c.deferral is not None and self.parameters:
            with self.exchange.observer.span("weights_backward", layer=self.exchange.layer):
                self.left = c.deferral.gradients(self.parameters, self.left)
        c.deferral = None

    def _add(self, grads: Sequence[Tensor | None]) -> None:
        """Add gradients, but not in place: autograd may give one tensor to two parameters, or `d_out` itself.
        `weights` sums those of grouped products, the large ones, in place."""
        for place, grad in enumerate(grads):
            before = self.with_rows[place]
            if grad is not None:
                self.with_rows[place] = grad if before is None else before + grad

    @property
    def d_parameters(self) -> list[Tensor | None]:
        """Gradients of the parameters, of all chunks so far."""
        both = zip(self.left, self.with_rows, strict=True)
        return [left if grad is None else grad if left is None else left + grad for left, grad in both]

    def encode_back(self, chunk: int) -> None:
        c, d_rows = self.forward.chunks[chunk], self.d_rows[chunk]
        assert d_rows is not None
        out = self.d_x_TD[c.tokens], self.d_weights_TK[c.tokens]
        arguments = *d_rows, c.state, len(out[0]), out
        if self.fusing is not None and c.deferral is not None and self.parameters:
            c.crossing = self.fusing.dispatch_backward_beside(c.deferral, *arguments)
        else:
            c.crossing = self.dispatcher.dispatch_backward(*arguments)

    def move_back(self, chunk: int) -> Pending | None:
        return _crossing(self.forward.chunks[chunk]).move()

    def decode_back(self, chunk: int, received: Any) -> None:
        c = self.forward.chunks[chunk]
        _crossing(c).read(received)
        c.crossing, self.d_rows[chunk] = None, None


def _node(out_RD: Place) -> Any:
    return out_RD.node if isinstance(out_RD, GradientEdge) else out_RD.grad_fn


def _crossing(c: Chunk) -> Crossing:
    assert c.crossing is not None, "the order was not checked"
    return c.crossing
