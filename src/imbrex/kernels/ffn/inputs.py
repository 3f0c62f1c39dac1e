"""Which tensors the expert kernels take, and what is wrong with others, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from imbrex.kernels.jit import why_not_portable
from imbrex.runtime.tracing import traced


def why_not_ffn(rows_RD: Tensor, gate_up_eGD: Tensor, down_eDF: Tensor) -> str | None:
    """Why the kernels cannot take bfloat16 rows [R, D] and weights [e, 2F, D] and [e, D, F] as they are, or
    `None`."""
    if not rows_RD.is_cuda:
        return "the expert kernels need tensors on a GPU"
    if (reason := why_not_portable(rows_RD.device.index)) is not None:
        return reason
    tensors = rows_RD, gate_up_eGD, down_eDF
    return why_not_dtypes(*tensors) or why_not_weights(*tensors)


def check_inputs(
    call: str,
    rows_RD: Tensor,
    weights: tuple[Tensor, Tensor],
    counts_e: Tensor,
    weights_R: Tensor | None = None,
    index_R: Tensor | None = None,
    *,
    bf16: Sequence[Tensor] = (),
) -> None:
    """Raise ValueError, in the name of `call`, where one of `bf16` is not bfloat16 or `why_not_inputs` has a
    sentence."""
    problem = why_not_dtypes(*bf16) or why_not_inputs(rows_RD, *weights, counts_e, weights_R, index_R)
    if problem is not None:
        raise ValueError(f"{call}: {problem}")


def why_not_inputs(
    rows_RD: Tensor,
    gate_up_eGD: Tensor,
    down_eDF: Tensor,
    counts_e: Tensor,
    weights_R: Tensor | None = None,
    index_R: Tensor | None = None,
) -> str | None:
    """Why these do not belong together, or `None`: shapes that fit, counts int64 [e], index int64 [R],
    weights float32 [R], all on one device. With an index, row r is rows_RD[index_R[r]]."""
    if (problem := why_not_weights(rows_RD, gate_up_eGD, down_eDF)) is not None:
        return problem
    experts, rows = down_eDF.shape[0], rows_RD if index_R is None else index_R
    if counts_e.dtype != torch.int64 or counts_e.shape != (experts,):
        return f"counts are {_describe(counts_e)}; give int64 [{experts}], the rows of every expert"
    if index_R is not None and (index_R.dtype != torch.int64 or index_R.dim() != 1):
        return f"the index of rows is {_describe(index_R)}; give int64 [R]"
    if weights_R is not None and (weights_R.dtype != torch.float32 or weights_R.dim() != 1):
        return f"the rows' weights are {_describe(weights_R)}; give float32 [R]"
    if weights_R is not None and not traced(weights_R) and weights_R.shape[0] != rows.shape[0]:
        return f"there are weights of {weights_R.shape[0]} rows and {rows.shape[0]} rows"
    for other in (gate_up_eGD, down_eDF, counts_e, weights_R, index_R):
        if other is not None and other.device != rows_RD.device:
            return f"rows are on {rows_RD.device} and others on {other.device}; give all on one"
    return None


def why_not_weights(rows_RD: Tensor, gate_up_eGD: Tensor, down_eDF: Tensor) -> str | None:
    """Why these shapes do not belong together, or `None`: rows [R, D], gate and up [e, 2F, D], down
    [e, D, F]."""
    shape = down_eDF.shape
    if len(shape) != 3 or gate_up_eGD.shape != (shape[0], 2 * shape[2], shape[1]):
        return (
            f"weights are {[*gate_up_eGD.shape]} and {[*shape]}; give those of SwiGLU, gate rows before up's "
            "[e, 2F, D], and [e, D, F]"
        )
    if rows_RD.dim() != 2 or rows_RD.shape[1] != shape[1]:
        return f"rows are {[*rows_RD.shape]}; give [R, {shape[1]}], as the weights are"
    return None


def why_not_dtypes(*tensors: Tensor) -> str | None:
    """Why the kernels cannot compute in the dtypes of these tensors, or `None`: all must be bfloat16."""
    for tensor in tensors:
        if tensor.dtype != torch.bfloat16:
            return f"rows or weights are {tensor.dtype}; the expert kernels compute in bfloat16"
    return None


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}"


__all__ = ["check_inputs", "why_not_ffn", "why_not_inputs"]
