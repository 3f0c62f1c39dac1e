"""From tokens in their own order to their weighted outputs in that order, on one rank, for inference."""

from __future__ import annotations

import torch
from torch import Tensor

from imbrex.kernels.experts_ffn import run_ffn
from imbrex.kernels.experts_glue import gather_rows, plan_groups, sum_rows


@torch.no_grad()
def ffn_tokens(
    x_TD: Tensor,
    gate_up_eGD: Tensor,
    down_eDF: Tensor,
    counts_e: Tensor,
    source_R: Tensor,
    position_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """y_TD: the sum over k of `weights_TK` times the expert's output, in fp32 and in order of k; bf16.

    source_R: int64, token of every expert-major row; position_TK: int64, row of every choice, `-1` where it
    is not computed here. No gradients.
    """
    rows_RD = gather_rows(x_TD, source_R, plan_groups(counts_e).ends_e)
    y_RD, _ = run_ffn(rows_RD, gate_up_eGD, down_eDF, counts_e, None, False)
    return sum_rows(y_RD, position_TK, weights_TK)
