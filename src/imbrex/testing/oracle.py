"""The dense references: every expert computes every token, in one process, and weights pick the sum."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.contracts import Codec, Routing, Wire
from imbrex.experts.experts import Experts, activate


def dense(x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """The reference of a layer, without any of the exchange's code: sum_k weights[t, k] * expert[ids[t,
    k]](x[t]) over the choices that are not dropped, in the dtype of x. `experts` holds all experts, in order,
    unsharded.

    Differentiable in x, the weights and the experts' parameters.
    """
    y_TD = torch.zeros_like(x_TD)
    for expert in range(len(experts.expert_ids)):
        weight_T = torch.where(routing.ids_TK == expert, routing.weights_TK, 0).sum(1)
        y_TD = y_TD + weight_T[:, None] * one_expert(x_TD, experts, expert)
    return y_TD


def wired(
    x_TD: Tensor, routing: Routing, experts: Experts, owner_TK: Tensor, rank: int, wire: Wire
) -> Tensor:
    """`dense` with values rounded where they cross the wire, for the tokens of `rank`.

    owner_TK: rank that computes every choice. Tokens and partial sums of other ranks than `rank` are
    rounded by `wire` in the forward, and their gradients in the backward.
    """
    y_TD = 0 * x_TD
    for owner in sorted({*owner_TK.flatten().tolist()} - {-1}):
        here = Routing(
            ids_TK=torch.where(owner_TK == owner, routing.ids_TK, -1), weights_TK=routing.weights_TK
        )
        if owner == rank:
            y_TD = y_TD + dense(x_TD, here, experts)
            continue
        crossed_TD = _Cross.apply(x_TD, wire.dispatch, wire.dispatch_backward)
        partial_TD = dense(crossed_TD, here, experts)
        wanted_T1 = (here.ids_TK >= 0).any(1, keepdim=True)
        back_TD = _Cross.apply(partial_TD, wire.combine, wire.combine_backward)
        y_TD = y_TD + torch.where(wanted_T1, back_TD, 0)
    return y_TD


def one_expert(x_TD: Tensor, experts: Experts, expert: int) -> Tensor:
    """Expert number `expert` of `experts` on every token."""
    up_bias, down_bias = experts.gate_up_proj_bias, experts.down_proj_bias
    up_TF = F.linear(x_TD, experts.gate_up_proj[expert], None if up_bias is None else up_bias[expert])
    hidden_TF = activate(up_TF, experts.activation)
    return F.linear(hidden_TF, experts.down_proj[expert], None if down_bias is None else down_bias[expert])


class _Cross(torch.autograd.Function):
    """A row through a codec and back, the gradient through another."""

    @staticmethod
    def forward(ctx, rows: Tensor, forward: Codec, backward: Codec) -> Tensor:
        ctx.codec = backward
        return round_trip(rows, forward)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return round_trip(grads[0], ctx.codec), None, None


def round_trip(rows_ND: Tensor, codec: Codec) -> Tensor:
    """Rows [N, D] as they come back from a codec: encoded, then decoded."""
    dtype = rows_ND.dtype
    return codec.decode(codec.encode(rows_ND, dtype), rows_ND.shape[1], dtype)
