"""From tokens in their own order to their weighted outputs in that order, on one rank, for inference."""

from __future__ import annotations

import torch
from torch import Tensor

from imbrex.kernels.experts_ffn import run_experts
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

    The rows are copied into expert order first. A first GEMM that gathered them itself (cp.async by three
    warps) lost more than the copy costs: 329 us against 309 (Qwen3, 16384 rows).
    """
    groups = plan_groups(counts_e)
    rows_RD = gather_rows(x_TD.contiguous(), source_R, groups.ends_e)
    return sum_rows(run_experts(rows_RD, gate_up_eGD, down_eDF, groups), position_TK, weights_TK)
