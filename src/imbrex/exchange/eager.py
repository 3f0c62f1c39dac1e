"""Dispatch and combine: the operators of `ops` where somebody traces, else their bodies at once.

The formulas are the same: what is saved, and what the backward calls, stands in `ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from imbrex.exchange import ops
from imbrex.runtime.tracing import differentiated, traced


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        rows_RD, weights_R, counts_e, state = ops.owner_of(inputs[3]).run_dispatch(*inputs[:3], inputs[4])
        ctx.mark_non_differentiable(counts_e, *state)
        ops.set_up_dispatch(ctx, inputs, (rows_RD, weights_R, counts_e, state))
        return rows_RD, weights_R, counts_e, *state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        run = ops.dispatch_backward if traced(*gradients[:2]) else ops.run_dispatch_backward
        return ops.differentiate_dispatch(ctx, *gradients, run=run)


def dispatch(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, key: int, ticket: int
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
    """As `ops.dispatch`."""
    if traced(x_TD, weights_TK, ids_TK):
        return ops.dispatch(x_TD, weights_TK, ids_TK, key, ticket)
    if not differentiated(x_TD, weights_TK):
        return ops.owner_of(key).run_dispatch(x_TD, weights_TK, ids_TK, ticket)
    rows_RD, weights_R, counts_e, *state = _Dispatch.apply(x_TD, weights_TK, ids_TK, key, ticket)
    return rows_RD, weights_R, counts_e, state


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        rows_RD, weights_R, addend_TD, num_tokens, key, ticket, weighted, *state = inputs
        given = rows_RD, weights_R, addend_TD, state, num_tokens, key, ticket, weighted
        ops.set_up_combine(ctx, given, None)
        return ops.run_combine(*given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        run = ops.combine_backward if traced(*gradients) else ops.run_combine_backward
        d_rows_RD, d_weights_R, d_addend, *_ = ops.differentiate_combine(ctx, *gradients, run=run)
        return d_rows_RD, d_weights_R, d_addend, *[None] * (4 + ctx.num_state)


def combine(
    rows_RD: Tensor,
    weights_R: Tensor,
    addend_TD: Tensor | None,
    state: Sequence[Tensor],
    num_tokens: int,
    key: int,
    ticket: int,
    weighted: bool,
) -> Tensor:
    """As `ops.combine`."""
    if traced(rows_RD, weights_R, addend_TD):
        return ops.combine(rows_RD, weights_R, addend_TD, state, num_tokens, key, ticket, weighted)
    if not differentiated(rows_RD, weights_R, addend_TD):
        return ops.run_combine(rows_RD, weights_R, addend_TD, state, num_tokens, key, ticket, weighted)
    return _Combine.apply(rows_RD, weights_R, addend_TD, num_tokens, key, ticket, weighted, *state)
