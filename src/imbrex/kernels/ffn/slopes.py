"""SwiGLU's gradient, the first step of a backward of experts: in the epilogue of the product that gives the
activations' gradient, or for wide rows, and on GPUs other than Hopper, a kernel of its own behind it."""

from __future__ import annotations

from torch import Tensor

from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.ffn.glue import Groups, add_parts, swiglu_backward
from imbrex.kernels.ffn.products import queue_product
from imbrex.kernels.gemm.gemm import ALONE, Beside, Epilogue, Extras, Layout, Slopes, Tiling, launch_gemm
from imbrex.kernels.gemm.portable import is_portable
from imbrex.kernels.gemm.tiling import choose_tiling

FUSED_WIDTH = 4096
"""D up to which SwiGLU's gradient is cheaper in a product's epilogue than in its own (gemm/backward.cuh)."""


def _is_apart(down_eDF: Tensor) -> bool:
    return down_eDF.shape[1] > FUSED_WIDTH or is_portable(down_eDF.get_device())


def _tiling(rows: int, down_eDF: Tensor) -> Tiling:
    experts, _, inner = down_eDF.shape
    sms = multiprocessors(down_eDF.get_device())
    return choose_tiling(Layout.DGRAD, Epilogue.SWIGLU_GRADIENT, rows, experts, (rows, inner), sms=sms)


def parts_of_weights(rows: int, down_eDF: Tensor) -> int:
    """Parts in which the product gives the gradient of a row's weight: one for each column of its tiles. None
    where the kernel behind it gives the sum."""
    return 0 if _is_apart(down_eDF) else -(-down_eDF.shape[2] // _tiling(rows, down_eDF).block_n)


def run_slopes(
    d_y_RD: Tensor,
    down_eDF: Tensor,
    groups: Groups,
    slopes: Slopes,
    weights_R: Tensor | None,
    act_RF: Tensor,
    d_weights_R: Tensor | None,
    beside: Beside = ALONE,
) -> None:
    """Queue what writes `act_RF` and what `slopes` says and, where rows have weights, their gradients into
    `d_weights_R`: the sums of `slopes.d_weights`, parts that the product writes."""
    if _is_apart(down_eDF):
        queue_product(Layout.DGRAD, d_y_RD, down_eDF, groups, act_RF, beside=beside)
        out = slopes.d_gate_up, act_RF, d_weights_R
        swiglu_backward(act_RF, slopes.gate_up, weights_R, groups.ends_e, keep=slopes.keep, out=out)
        return
    more: Extras = {"weights_R": weights_R, "slopes": slopes, "beside": beside}
    operands = d_y_RD, down_eDF, groups.ends_e, act_RF, groups.counter
    cut = _tiling(d_y_RD.shape[0], down_eDF)
    launch_gemm(Layout.DGRAD, *operands, tiling=cut, epilogue=Epilogue.SWIGLU_GRADIENT, **more)
    if slopes.d_weights is not None and d_weights_R is not None:
        add_parts(slopes.d_weights, groups.ends_e, d_weights_R)
