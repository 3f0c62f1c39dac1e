"""Grouped matrix products, rows of group i times matrix i: `imbrex::grouped_mm`, its gradient, biases.

`torch.nn.functional.grouped_mm` where the device and dtype have it (bfloat16 on CUDA, strides of 16 bytes;
other widths are padded), one product per group elsewhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from imbrex.runtime import deferred

STRIDE_BYTES = 16
ALIKE = 8
"""Rows of the smallest product on a CPU; fewer are padded."""


def has_fast_path(rows_RK: Tensor) -> bool:
    """Whether torch's grouped product takes rows of this dtype on this GPU without a loop over experts."""
    return (
        rows_RK.is_cuda and rows_RK.dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (8, 0)
    )


def run_grouped_mm(rows_RK: Tensor, weight_eKN: Tensor, counts_e: Tensor) -> Tensor:
    """[R, N] of the rows' dtype; rows past the counts are left unset."""
    weight = weight_eKN.to(rows_RK.dtype)
    if has_fast_path(rows_RK):
        return _fast_mm(rows_RK, weight, counts_e)
    out = rows_RK.new_empty(rows_RK.shape[0], weight.shape[2])
    for group, piece in _groups(counts_e):
        _mm(rows_RK[piece], weight[group], out[piece])
    return out


def _mm(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """A product whose rows do not depend on how many others there are: MKL takes other ways, which add in
    another order, for fewer than 4 rows and, in float64, for the last `rows % 4`."""
    count = rows.shape[0]
    whole = count - count % ALIKE if count < ALIKE or rows.dtype == torch.float64 else count
    if whole:
        torch.mm(rows[:whole], weight, out=out[:whole])
    if whole < count:
        padded = rows.new_zeros(ALIKE, rows.shape[1])
        padded[: count - whole] = rows[whole:]
        out[whole:] = torch.mm(padded, weight)[: count - whole]


def run_grouped_wgrad(rows_RK: Tensor, d_out_RN: Tensor, counts_e: Tensor) -> Tensor:
    """[e, K, N] of the rows' dtype; a group without rows gets zeros."""
    num_groups = counts_e.shape[0]
    if has_fast_path(rows_RK):
        return _fast_wgrad(rows_RK, d_out_RN, counts_e)
    out = rows_RK.new_zeros(num_groups, rows_RK.shape[1], d_out_RN.shape[1])
    for group, piece in _groups(counts_e):
        torch.mm(rows_RK[piece].T, d_out_RN[piece], out=out[group])
    return out


def _groups(counts_e: Tensor) -> list[tuple[int, slice]]:
    """The groups that have rows, with the rows."""
    groups, begin = [], 0
    # host sync: a product per group needs its size; the fast path does not
    for group, count in enumerate(counts_e.tolist()):
        if count:
            groups.append((group, slice(begin, begin + count)))
        begin += count
    return groups


def _fast_mm(rows_RK: Tensor, weight_eKN: Tensor, counts_e: Tensor) -> Tensor:
    width = weight_eKN.shape[2]
    rows, weight = _pad(rows_RK, 1), _pad(_pad(weight_eKN, 1), 2)
    ends = counts_e.cumsum(0).to(torch.int32)
    return F.grouped_mm(rows, weight, offs=ends)[:, :width].contiguous()


def _fast_wgrad(rows_RK: Tensor, d_out_RN: Tensor, counts_e: Tensor) -> Tensor:
    shape = rows_RK.shape[1], d_out_RN.shape[1]
    rows, d_out = _pad(rows_RK, 1), _pad(d_out_RN, 1)
    ends = counts_e.cumsum(0).to(torch.int32)
    return F.grouped_mm(rows.T, d_out, offs=ends)[:, : shape[0], : shape[1]].contiguous()


def _pad(x: Tensor, dim: int) -> Tensor:
    """Zeros at the end of `dim`, up to a stride of 16 bytes."""
    missing = -x.shape[dim] % (STRIDE_BYTES // x.element_size())
    if not missing:
        return x
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing])


@custom_op("imbrex::grouped_mm", mutates_args=())
def grouped_mm(rows_RK: Tensor, weight_eKN: Tensor, counts_e: Tensor) -> Tensor:
    """Rows of group i times `weight_eKN[i]`: [R, N] of the rows' dtype. Rows past the counts are not read."""
    return run_grouped_mm(rows_RK, weight_eKN, counts_e)


@grouped_mm.register_fake
def _(rows_RK, weight_eKN, counts_e):
    return rows_RK.new_empty(rows_RK.shape[0], weight_eKN.shape[2])


@custom_op("imbrex::grouped_wgrad", mutates_args=())
def grouped_wgrad(rows_RK: Tensor, d_out_RN: Tensor, counts_e: Tensor) -> Tensor:
    """Gradient of the weights, [e, K, N]: rows of group i, transposed, times their output gradients."""
    return run_grouped_wgrad(rows_RK, d_out_RN, counts_e)


@grouped_wgrad.register_fake
def _(rows_RK, d_out_RN, counts_e):
    return rows_RK.new_empty(counts_e.shape[0], rows_RK.shape[1], d_out_RN.shape[1])


def _grouped_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.deferral = deferred.recording(inputs[1])


def _grouped_backward(ctx, d_out_RN):
    rows_RK, weight_eKN, counts_e = ctx.saved_tensors
    need_rows, need_weight, _ = ctx.needs_input_grad
    d_rows = grouped_mm(d_out_RN, weight_eKN.mT, counts_e) if need_rows else None
    if need_weight and ctx.deferral is not None:
        ctx.deferral.add(
            weight_eKN, lambda total: deferred.added(total, grouped_wgrad(rows_RK, d_out_RN, counts_e))
        )
        return d_rows, None, None
    d_weight = grouped_wgrad(rows_RK, d_out_RN, counts_e) if need_weight else None
    return d_rows, d_weight, None


grouped_mm.register_autograd(_grouped_backward, setup_context=_grouped_setup)


def grouped_product(rows_RK: Tensor, weight_eNK: Tensor, bias_eN: Tensor | None, counts_e: Tensor) -> Tensor:
    """Rows of group i times the transpose of `weight_eNK[i]`, plus its bias."""
    out_RN = grouped_mm(rows_RK, weight_eNK.to(rows_RK.dtype).mT, counts_e)
    if bias_eN is None:
        return out_RN
    row = torch.arange(rows_RK.shape[0], device=rows_RK.device)
    # Rows past the counts get a bias of their own: what their gradients are, nobody knows.
    bias_eN = F.pad(bias_eN.to(rows_RK.dtype), [0, 0, 0, 1])
    return out_RN + bias_eN[torch.searchsorted(counts_e.cumsum(0), row, right=True)]
