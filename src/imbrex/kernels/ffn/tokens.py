"""The experts on tokens in their own order, to weighted outputs in that order, on one rank, for inference.

The first product may read its rows through an index: measured on an H200, a copy in expert order costs a
launch and 0.7 us for a million values; rows asked for one by one cost the product 20 to 60 ns a step of a
tile of more than 64 of them (`gemm/gather.cuh`). So it pays with narrow experts, and with few rows an expert.
Every choice gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from imbrex.kernels.ffn.ffn import run_experts
from imbrex.kernels.ffn.glue import gather_rows, plan_groups, sum_rows
from imbrex.kernels.ffn.inputs import check_inputs
from imbrex.kernels.gemm.gemm import Epilogue, Layout, gemm_variant
from imbrex.kernels.gemm.tiling import PAIRED, SHARED, SMALL
from imbrex.kernels.jit import Variant

TILINGS = (SHARED, PAIRED, SMALL)
NARROW_WIDTH, FEW_WIDTH, FEW_ROWS = 1536, 2048, 64
"""F up to which it is faster with any number of rows (tokens to weighted sums, 1 to 16384 rows, copy over
gathered: Qwen3 1.00 to 1.12, Qwen2 0.98 to 1.11), and with so many an expert in the mean (DeepSeek-V3 1.00 to
1.04; with more 0.94 to 1.01). Wider: Phi-3.5 0.91 to 1.16, Mixtral 0.90 to 1.06."""


def gathers(inner: int, rows: int, experts: int) -> bool:
    """Whether experts of width F = `inner` had better read `rows` rows, of all of them together, in place."""
    return inner <= NARROW_WIDTH or (inner <= FEW_WIDTH and rows <= FEW_ROWS * experts)


def shipped_variants() -> list[Variant]:
    return [gemm_variant(Layout.FORWARD, Epilogue.SWIGLU, tiling, gather=True) for tiling in TILINGS]


@torch.no_grad()
def ffn_tokens(
    x_TD: Tensor,
    gate_up_eGD: Tensor,
    down_eDF: Tensor,
    counts_e: Tensor,
    source_R: Tensor,
    position_TK: Tensor,
    weights_TK: Tensor,
    *,
    gather: bool | None = None,
) -> Tensor:
    """Tokens to y_TD: the sum over k of `weights_TK` times the expert's output, in fp32 and in order of k;
    bf16.

    x_TD, gate_up_eGD [e, 2F, D], down_eDF [e, D, F]: bf16, D and F multiples of 8. counts_e: int64, rows of
    every expert. source_R: int64 [R], token of every expert-major row. position_TK: int64, row of every
    choice, `-1` where it is not computed here. weights_TK: float32. No gradients.

    gather: the first product reads the tokens' rows through `source_R`, not from a copy in expert order; that
    saves the copy's memory and launch. The same bits; `None`: whichever is faster.
    """
    rows_RD = ffn_in_place(x_TD, source_R, gate_up_eGD, down_eDF, counts_e, gather=gather)
    return sum_rows(rows_RD, position_TK, weights_TK)


@torch.no_grad()
def ffn_in_place(
    x_TD: Tensor,
    source_R: Tensor,
    gate_up_eGD: Tensor,
    down_eDF: Tensor,
    counts_e: Tensor,
    *,
    weights_R: Tensor | None = None,
    gather: bool | None = None,
) -> Tensor:
    """The experts' outputs of tokens that stay where they are: expert-major rows [R, D], times `weights_R`
    (float32) where given. Arguments as of `ffn_tokens`; ValueError where they do not fit."""
    weights = gate_up_eGD, down_eDF
    check_inputs("ffn_in_place", x_TD, weights, counts_e, weights_R, source_R, bf16=(x_TD, *weights))
    groups, x_TD, source_R = plan_groups(counts_e), x_TD.contiguous(), source_R.contiguous()
    gate_up_eGD, down_eDF = gate_up_eGD.contiguous(), down_eDF.contiguous()
    if gather is None:
        gather = gathers(down_eDF.shape[2], source_R.shape[0], down_eDF.shape[0])
    rows, index_R = (x_TD, source_R) if gather else (gather_rows(x_TD, source_R, groups.ends_e), None)
    return run_experts(rows, gate_up_eGD, down_eDF, groups, weights_R, index_R=index_R)
