"""Gradients through the part of a call that autograd knows: its experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from imbrex.runtime.gradients import Place, gradients_to, hooks_aside


def gradients_of(
    out_RD: Place,
    d_out_RD: Tensor,
    rows_RD: Place,
    weights_R: Tensor | None,
    parameters: Sequence[Tensor],
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Gradients of the experts' rows, of the rows' weights and of the parameters, from that of the outputs.

    weights_R: where the experts apply them, else `None`, as is then their gradient. Rows and weights that
    were not used have zeros, such parameters `None`.
    """
    leaves = [rows_RD, *([] if weights_R is None else [weights_R]), *parameters]
    gradients: list[Tensor | None] = [None] * len(leaves)
    if isinstance(out_RD, GradientEdge) or out_RD.requires_grad:
        with hooks_aside(parameters):
            gradients = gradients_to(leaves, out_RD, d_out_RD)
    d_rows_RD = gradients.pop(0)
    d_weights_R = None
    if weights_R is not None:
        d_weights_R = gradients.pop(0)
        d_weights_R = torch.zeros_like(weights_R) if d_weights_R is None else d_weights_R
    return torch.zeros_like(d_out_RD) if d_rows_RD is None else d_rows_RD, d_weights_R, gradients
