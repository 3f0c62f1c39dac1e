"""The dense reference: every expert computes every token, in one process, and weights pick the sum."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.contracts import Routing
from imbrex.experts import Experts, activate


def dense(x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """sum_k weights[t, k] * expert[ids[t, k]](x[t]) over the choices that are not dropped, in float32 or
    float64 as x is, without any of the exchange's code. `experts` holds all experts, in order, unsharded.

    Differentiable in x, the weights and the experts' parameters.
    """
    y_TD = torch.zeros_like(x_TD)
    for expert in range(len(experts.expert_ids)):
        bias = experts.gate_up_proj_bias, experts.down_proj_bias
        up_bias, down_bias = (None if b is None else b[expert] for b in bias)
        up_TF = F.linear(x_TD, experts.gate_up_proj[expert], up_bias)
        out_TD = F.linear(activate(up_TF, experts.activation), experts.down_proj[expert], down_bias)
        weight_T = torch.where(routing.ids_TK == expert, routing.weights_TK, 0).sum(1)
        y_TD = y_TD + weight_T[:, None] * out_TD
    return y_TD
