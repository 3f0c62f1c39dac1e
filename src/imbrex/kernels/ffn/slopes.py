"""The first product of a backward of experts, whose epilogue is SwiGLU's gradient: its cut, its launches."""

from __future__ import annotations

from torch import Tensor

from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.ffn.glue import Groups, add_parts
from imbrex.kernels.gemm.gemm import ALONE, Beside, Epilogue, Extras, Layout, Slopes, Tiling, launch_gemm
from imbrex.kernels.gemm.tiling import choose_tiling

FUSED_WIDTH = 4096
"""D up to which SwiGLU's gradient is cheaper in a product's epilogue than in its own (gemm/backward.cuh)."""


def _tiling(rows: int, down_eDF: Tensor) -> Tiling:
    experts, _, inner = down_eDF.shape
    sms = multiprocessors(down_eDF.get_device())
    return choose_tiling(Layout.DGRAD, Epilogue.SWIGLU_GRADIENT, rows, experts, (rows, inner), sms=sms)


def parts_of_weights(rows: int, down_eDF: Tensor) -> int:
    """Parts in which the product gives the gradient of a row's weight: one for each column of its tiles."""
    return -(-down_eDF.shape[2] // _tiling(rows, down_eDF).block_n)


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
    """Queue the product, which writes `act_RF` and what `slopes` says, and where rows have weights the sums
    of the parts of their gradients, `slopes.d_weights`, into `d_weights_R`."""
    more: Extras = {"weights_R": weights_R, "slopes": slopes, "beside": beside}
    operands = d_y_RD, down_eDF, groups.ends_e, act_RF, groups.counter
    cut = _tiling(d_y_RD.shape[0], down_eDF)
    launch_gemm(Layout.DGRAD, *operands, tiling=cut, epilogue=Epilogue.SWIGLU_GRADIENT, **more)
    if slopes.d_weights is not None and d_weights_R is not None:
        add_parts(slopes.d_weights, groups.ends_e, d_weights_R)
