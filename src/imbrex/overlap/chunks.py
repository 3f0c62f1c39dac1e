"""The steps of a layer on chunks of its tokens, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import Codec, Dispatched, Experts, Handle, Pending, Plan, Routing
from imbrex.crossings import Crossings, read_state
from imbrex.deferred import Deferral


@dataclass(slots=True)
class Chunk:
    """What is known of a chunk so far. Tensors of a later step replace those of an earlier one."""

    tokens: slice
    plan: Plan
    encoded: Tensor | None = None
    state: Sequence[Tensor] = ()
    weights_R: Tensor | None = None
    rows_RD: Tensor | None = None
    counts_e: Tensor | None = None
    out_RD: Tensor | None = None
    own: Any = None
    deferral: Deferral | None = None


class Forward:
    """Outputs of all chunks in `y_TD`. With gradients wanted, every chunk keeps the graph of its experts.

    defer: the backward computes gradients of the parameters in a task of their own.
    """

    def __init__(
        self,
        crossings: Crossings,
        experts: Experts,
        x_TD: Tensor,
        routing: Routing,
        addend_TD: Tensor | None,
        sizes: Sequence[int],
        *,
        keep: bool,
        defer: bool = False,
    ) -> None:
        self.crossings, self.layer_experts = crossings, experts
        self.keep, self.defer = keep, keep and defer
        self.x_TD, self.weights_TK, self.addend_TD = x_TD, routing.weights_TK, addend_TD
        self.y_TD = torch.empty_like(x_TD)
        bounds = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
        parts = [
            (x_TD[b], Routing(ids_TK=routing.ids_TK[b], weights_TK=routing.weights_TK[b])) for b in bounds
        ]
        with crossings.observer.span("plan", layer=crossings.layer):
            plans = crossings.make_plans(parts)
        self.chunks = [Chunk(tokens=b, plan=made) for b, made in zip(bounds, plans, strict=True)]

    def encode_out(self, chunk: int) -> None:
        c = self.chunks[chunk]
        c.encoded = self.crossings.write_dispatch(c.plan, self.x_TD[c.tokens], self.weights_TK[c.tokens])

    def move_out(self, chunk: int) -> Pending:
        c = self.chunks[chunk]
        assert c.encoded is not None
        pending = self.crossings.begin_out(c.encoded, c.plan.traffic)
        c.encoded = None
        return pending

    def decode_out(self, chunk: int, received: Tensor) -> None:
        c = self.chunks[chunk]
        with self.crossings.observer.span("dispatch", layer=self.crossings.layer):
            c.rows_RD, c.weights_R, c.counts_e, c.state = self.crossings.read_dispatch(
                c.plan, received, self.x_TD[c.tokens], self.weights_TK[c.tokens]
            )

    def experts(self, chunk: int) -> None:
        c = self.chunks[chunk]
        assert c.rows_RD is not None
        assert c.weights_R is not None
        assert c.counts_e is not None
        weighs = self.layer_experts.applies_weights
        with (
            self.crossings.observer.span("experts", layer=self.crossings.layer),
            torch.set_grad_enabled(self.keep),
        ):
            c.rows_RD = c.rows_RD.detach().requires_grad_(self.keep)
            c.weights_R = c.weights_R.detach().requires_grad_(self.keep and weighs)
            handle = Handle(weights_R=c.weights_R, state=tuple(c.state), num_tokens=self._tokens(c))
            dispatched = Dispatched(rows_RD=c.rows_RD, counts_e=c.counts_e, handle=handle)
            c.deferral = Deferral() if self.defer else None
            with nullcontext() if c.deferral is None else c.deferral.record():
                c.out_RD = self.layer_experts(dispatched)

    def encode_back(self, chunk: int) -> None:
        c = self.chunks[chunk]
        assert c.out_RD is not None
        with self.crossings.observer.span("combine", layer=self.crossings.layer):
            weights = None if self.layer_experts.applies_weights else c.weights_R
            c.own, c.encoded = self.crossings.write_combine(
                c.out_RD.detach(), weights, c.state, self._tokens(c)
            )

    def move_back(self, chunk: int) -> Pending | None:
        return _begin_back(self.crossings, self.chunks[chunk], self.crossings.wire.combine, self.x_TD.dtype)

    def decode_back(self, chunk: int, received: Tensor | None) -> None:
        c = self.chunks[chunk]
        assert c.out_RD is not None
        with self.crossings.observer.span("combine", layer=self.crossings.layer):
            addend = None if self.addend_TD is None else self.addend_TD[c.tokens]
            self.y_TD[c.tokens] = self.crossings.read_combine(
                c.own, received, addend, c.state, c.out_RD.dtype
            )
        c.own = None
        if not self.keep:
            c.rows_RD = c.weights_R = c.out_RD = None

    def _tokens(self, c: Chunk) -> int:
        return c.tokens.stop - c.tokens.start


class Backward:
    """Gradients of tokens and weights in `d_x_TD` and `d_weights_TK`, of the parameters in `d_parameters`.

    The graphs of the experts are gone afterwards.
    """

    def __init__(
        self, forward: Forward, d_y_TD: Tensor, parameters: Sequence[Tensor], needed: Sequence[bool]
    ) -> None:
        self.forward, self.crossings, self.d_y_TD = forward, forward.crossings, d_y_TD
        self.parameters = [p for p, need in zip(parameters, needed, strict=True) if need]
        self.d_parameters: list[Tensor | None] = [None] * len(self.parameters)
        self.d_x_TD = torch.empty_like(forward.x_TD)
        self.d_weights_TK = torch.empty_like(forward.weights_TK)
        self.d_rows: list[tuple[Tensor, Tensor] | None] = [None] * len(forward.chunks)

    def encode_out(self, chunk: int) -> None:
        c = self.forward.chunks[chunk]
        c.encoded = self.crossings.write_combine_backward(self.d_y_TD[c.tokens])

    def move_out(self, chunk: int) -> Pending | None:
        c = self.forward.chunks[chunk]
        encoded, c.encoded = c.encoded, None
        return None if encoded is None else self.crossings.begin_out(encoded, read_state(c.state)[2])

    def decode_out(self, chunk: int, received: Tensor | None) -> None:
        c = self.forward.chunks[chunk]
        assert c.out_RD is not None
        assert c.weights_R is not None
        with self.crossings.observer.span("combine_backward", layer=self.crossings.layer):
            out_RD = None if self.forward.layer_experts.applies_weights else c.out_RD.detach()
            self.d_rows[chunk] = self.crossings.read_combine_backward(
                received, self.d_y_TD[c.tokens], out_RD, c.weights_R, c.state
            )

    def experts(self, chunk: int) -> None:
        c, d_out = self.forward.chunks[chunk], self.d_rows[chunk]
        assert c.out_RD is not None
        assert c.rows_RD is not None
        assert c.weights_R is not None
        assert d_out is not None
        d_out_RD, d_weights_R = d_out
        wanted = [c.rows_RD, *([c.weights_R] if c.weights_R.requires_grad else []), *self.parameters]
        with self.crossings.observer.span("experts_backward", layer=self.crossings.layer):
            if c.out_RD.requires_grad:
                found = list(torch.autograd.grad(c.out_RD, wanted, d_out_RD, allow_unused=True))
            else:
                found = [None] * len(wanted)
        d_rows = found.pop(0)
        d_rows = torch.zeros_like(c.rows_RD) if d_rows is None else d_rows
        if c.weights_R.requires_grad:
            given = found.pop(0)
            d_weights_R = torch.zeros_like(c.weights_R) if given is None else given
        self._add(found)
        self.d_rows[chunk] = d_rows, d_weights_R
        c.out_RD = c.rows_RD = None

    def weights(self, chunk: int) -> None:
        """What `experts` has left: of grouped products, the gradients of the weights."""
        c = self.forward.chunks[chunk]
        if c.deferral is not None and self.parameters:
            with self.crossings.observer.span("weights_backward", layer=self.crossings.layer):
                self._add(c.deferral.gradients(self.parameters))
        c.deferral = None

    def _add(self, grads: Sequence[Tensor | None]) -> None:
        for place, grad in enumerate(grads):
            before = self.d_parameters[place]
            if grad is not None:
                self.d_parameters[place] = grad if before is None else before + grad

    def encode_back(self, chunk: int) -> None:
        c, d_rows = self.forward.chunks[chunk], self.d_rows[chunk]
        assert d_rows is not None
        with self.crossings.observer.span("dispatch_backward", layer=self.crossings.layer):
            tokens = c.tokens.stop - c.tokens.start
            c.own, c.encoded = self.crossings.write_dispatch_backward(*d_rows, c.state, tokens)

    def move_back(self, chunk: int) -> Pending | None:
        codec = self.crossings.wire.dispatch_backward
        return _begin_back(self.crossings, self.forward.chunks[chunk], codec, self.d_y_TD.dtype)

    def decode_back(self, chunk: int, received: Tensor | None) -> None:
        c = self.forward.chunks[chunk]
        with self.crossings.observer.span("dispatch_backward", layer=self.crossings.layer):
            self.d_x_TD[c.tokens], self.d_weights_TK[c.tokens] = self.crossings.read_dispatch_backward(
                c.own, received, c.state, self.d_x_TD.dtype
            )
        c.own, self.d_rows[chunk] = None, None


def _begin_back(crossings: Crossings, c: Chunk, codec: Codec, dtype: torch.dtype) -> Pending | None:
    encoded, c.encoded = c.encoded, None
    if encoded is None:
        return None
    return crossings.begin_back(encoded, read_state(c.state)[2], codec, dtype)
