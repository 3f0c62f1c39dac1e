"""The experts on tokens in their own order, to weighted outputs in that order, in fp8, for inference."""

from __future__ import annotations

import torch
from torch import Tensor

from imbrex.kernels.ffn.fp8 import Fp8Experts, quantise_rows, run_fp8_rows
from imbrex.kernels.ffn.glue import sum_rows
from imbrex.kernels.ffn.inputs import check_inputs

NARROW_WIDTH, FEW_ROWS, MANY_CHOICES = 1024, 64, 6
"""F up to which, rows of an expert up to which, and rows of a token from which gathering is faster (copy over
gathered, 1024 to 65536 rows: Qwen3 1.02 to 1.05; DeepSeek-V3 up to 4096 rows, 64 an expert, 1.00 to 1.02,
with more 0.98; Qwen2, four rows of a token, 0.99 to 1.02; Phi-3.5 and Mixtral, two, 0.94 to 0.98)."""


def gathers_quantised(down_eDF: Tensor, tokens: int, rows: int) -> bool:
    """Whether the first product had better read quantised tokens through an index."""
    experts, _, inner = down_eDF.shape
    narrow = inner <= NARROW_WIDTH or rows <= FEW_ROWS * experts
    return narrow and rows >= MANY_CHOICES * tokens


@torch.no_grad()
def ffn_tokens_fp8(
    x_TD: Tensor,
    experts: Fp8Experts,
    counts_e: Tensor,
    source_R: Tensor,
    position_TK: Tensor,
    weights_TK: Tensor,
    *,
    gather: bool | None = None,
) -> Tensor:
    """Tokens to y_TD: the sum over k of `weights_TK` times the expert's output, in fp32 and in order of k;
    bf16.

    x_TD: bf16; source_R: int64 [R], token of every expert-major row; position_TK: int64, row of every choice,
    -1 where it is not computed here; weights_TK: float32. No gradients. The same bits as rows gathered first,
    `ffn_fp8` and a weighted sum.

    gather: tokens are quantised where they lie, once each, and the first product reads its rows through
    `source_R`; else every choice's row is quantised into expert order. `None`: whichever is faster.
    """
    rows_RD = ffn_in_place_fp8(x_TD, source_R, experts, counts_e, gather=gather)
    return sum_rows(rows_RD, position_TK, weights_TK)


@torch.no_grad()
def ffn_in_place_fp8(
    x_TD: Tensor,
    source_R: Tensor,
    experts: Fp8Experts,
    counts_e: Tensor,
    *,
    weights_R: Tensor | None = None,
    gather: bool | None = None,
) -> Tensor:
    """The experts' outputs of tokens that stay where they are: expert-major rows [R, D], bf16, times
    `weights_R` (float32) where given. Arguments as of `ffn_tokens_fp8`; ValueError where they do not fit."""
    weights = experts.gate_up_eGD, experts.down_eDF
    check_inputs("ffn_in_place_fp8", x_TD, weights, counts_e, weights_R, source_R, bf16=(x_TD,))
    x_TD, source_R = x_TD.contiguous(), source_R.contiguous()
    if gather is None:
        gather = gathers_quantised(experts.down_eDF, len(x_TD), len(source_R))
    if gather:
        groups, values, scales = quantise_rows(x_TD, counts_e, every=True)
        return run_fp8_rows(values, scales, experts, groups, weights_R, index_R=source_R)
    groups, values, scales = quantise_rows(x_TD, counts_e, source_R)
    return run_fp8_rows(values, scales, experts, groups, weights_R)
