"""Operators that stand between an exchange and a grouped GEMM of any library, for the rows that there are.

    gate_up_RG = F.grouped_mm(rows_RD, gate_up_eGD.mT, offs=ends_e)
    act_RF = swiglu(gate_up_RG, ends_e)                      # G = 2F: gate first, then up
    y_RD = F.grouped_mm(act_RF, down_eDF.mT, offs=ends_e)

    rows_RD = permute(x_TD, choice_R, position_TK, ends_e)   # for callers whose rows are not expert-major yet
    y_TD = unpermute(y_RD, choice_R, position_TK, ends_e, weights_TK)

`ends_e` is what torch's grouped products call `offs`: int32, where the rows of every expert end. It is read
on the device, rows past it are neither read nor written, and a call's time follows them and not the size of
the tensors: at EP 64 it is that of EP 4, though all but 1 of 64 rows that there is room for are nobody's
(TensorRT-LLM's large-scale EP, auxiliary kernels). bfloat16 on a GPU of compute capability 8.0 or more, rows
of a multiple of 8 values; nothing synchronises with the host. Differentiable; the operators are opaque to
`torch.compile`, their backward is one too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from imbrex.kernels.ffn import glue as pieces

_library = Library("imbrex_glue", "DEF")
_library.define("swiglu(Tensor gate_up_RG, Tensor? weights_R, Tensor ends_e) -> Tensor")
_library.define(
    "swiglu_backward(Tensor d_act_RF, Tensor gate_up_RG, Tensor? weights_R, Tensor ends_e)"
    " -> (Tensor, Tensor)"
)
_library.define("permute(Tensor x_TD, Tensor choice_R, Tensor position_TK, Tensor ends_e) -> Tensor")
_library.define("sum_rows(Tensor rows_RD, Tensor position_TK, Tensor? weights_TK) -> Tensor")
_library.define(
    "unpermute(Tensor rows_RD, Tensor choice_R, Tensor position_TK, Tensor ends_e, Tensor? weights_TK)"
    " -> Tensor"
)
_library.define(
    "unpermute_backward(Tensor d_y_TD, Tensor rows_RD, Tensor choice_R, Tensor? weights_TK, Tensor ends_e,"
    " int choices) -> (Tensor, Tensor)"
)


def swiglu(gate_up_RG: Tensor, ends_e: Tensor, weights_R: Tensor | None = None) -> Tensor:
    """silu(gate) * up of every row, times its weight (float32 [R]) where given: [R, F] from [R, 2F]."""
    return torch.ops.imbrex_glue.swiglu(gate_up_RG, weights_R, ends_e)


def permute(x_TD: Tensor, choice_R: Tensor, position_TK: Tensor, ends_e: Tensor) -> Tensor:
    """Expert-major rows [R, D]: row r is the token of choice `choice_R[r]`.

    choice_R: int64; choice k of token t is t * K + k, what a stable argsort of the experts gives.
    position_TK: int64; its inverse, the row of every choice, -1 where it has none.
    """
    return torch.ops.imbrex_glue.permute(x_TD, choice_R, position_TK, ends_e)


def unpermute(
    rows_RD: Tensor,
    choice_R: Tensor,
    position_TK: Tensor,
    ends_e: Tensor,
    weights_TK: Tensor | None = None,
) -> Tensor:
    """[T, D]: every token's rows, times their weights (float32), summed in float32 in order of k."""
    return torch.ops.imbrex_glue.unpermute(rows_RD, choice_R, position_TK, ends_e, weights_TK)


def _none(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32)


def _packed(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.contiguous()


def run_swiglu(gate_up_RG: Tensor, weights_R: Tensor | None, ends_e: Tensor) -> Tensor:
    """The operator behind `swiglu`: [R, F]."""
    return pieces.swiglu(gate_up_RG.contiguous(), _packed(weights_R), ends_e)


def run_swiglu_backward(
    d_act_RF: Tensor, gate_up_RG: Tensor, weights_R: Tensor | None, ends_e: Tensor
) -> tuple[Tensor, Tensor]:
    """d_gate_up, d_weights (empty without weights)."""
    d_act, gate_up = d_act_RF.contiguous(), gate_up_RG.contiguous()
    d_gate_up_RG, _, d_weights_R = pieces.swiglu_backward(
        d_act, gate_up, _packed(weights_R), ends_e, keep=False
    )
    return d_gate_up_RG, _none(d_act) if d_weights_R is None else d_weights_R


def run_permute(x_TD: Tensor, choice_R: Tensor, position_TK: Tensor, ends_e: Tensor) -> Tensor:
    """The operator behind `permute`: [R, D]."""
    return pieces.gather_rows(x_TD.contiguous(), choice_R, ends_e, position_TK.shape[1])


def run_sum_rows(rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Every token's rows, times their weights, summed in order of k: [T, D]."""
    return pieces.sum_rows(rows_RD.contiguous(), position_TK.contiguous(), _packed(weights_TK))


def run_unpermute(
    rows_RD: Tensor, choice_R: Tensor, position_TK: Tensor, ends_e: Tensor, weights_TK: Tensor | None
) -> Tensor:
    """The operator behind `unpermute`: [T, D]. `choice_R` and `ends_e` are the backward's."""
    return run_sum_rows(rows_RD, position_TK, weights_TK)


def run_unpermute_backward(
    d_y_TD: Tensor,
    rows_RD: Tensor,
    choice_R: Tensor,
    weights_TK: Tensor | None,
    ends_e: Tensor,
    choices: int,
) -> tuple[Tensor, Tensor]:
    """d_rows, d_weights (empty without weights)."""
    d_rows_RD, d_weights_TK = pieces.weigh_rows(
        d_y_TD.contiguous(), rows_RD.contiguous(), _packed(weights_TK), ends_e, choice_R, choices
    )
    return d_rows_RD, _none(d_y_TD) if d_weights_TK is None else d_weights_TK


def _swiglu_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx, d_act_RF):
    gradients = torch.ops.imbrex_glue.swiglu_backward(d_act_RF, *ctx.saved_tensors)
    return gradients[0], gradients[1] if ctx.needs_input_grad[1] else None, None


def _permute_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[2])


def _permute_backward(ctx, d_rows_RD):
    return torch.ops.imbrex_glue.sum_rows(d_rows_RD, *ctx.saved_tensors, None), None, None, None


def _unpermute_setup(ctx, inputs, output):
    rows_RD, choice_R, position_TK, ends_e, weights_TK = inputs
    ctx.choices = position_TK.shape[1]
    ctx.save_for_backward(rows_RD, choice_R, weights_TK, ends_e)


def _unpermute_backward(ctx, d_y_TD):
    gradients = torch.ops.imbrex_glue.unpermute_backward(d_y_TD, *ctx.saved_tensors, ctx.choices)
    return gradients[0], None, None, None, gradients[1] if ctx.needs_input_grad[4] else None


def _like_weights(rows: Tensor, weights: Tensor | None) -> Tensor:
    return _none(rows) if weights is None else torch.empty_like(weights)


_FAKES = {
    "swiglu": lambda gate_up, weights, ends: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2),
    "swiglu_backward": lambda d_act, gate_up, weights, ends: (
        torch.empty_like(gate_up, memory_format=torch.contiguous_format),
        _like_weights(gate_up, weights),
    ),
    "permute": lambda x, choice, position, ends: x.new_empty(choice.shape[0], x.shape[1]),
    "sum_rows": lambda rows, position, weights: rows.new_empty(position.shape[0], rows.shape[1]),
    "unpermute": lambda rows, choice, position, ends, weights: rows.new_empty(
        position.shape[0], rows.shape[1]
    ),
    "unpermute_backward": lambda d_y, rows, choice, weights, ends, choices: (
        torch.empty_like(rows, memory_format=torch.contiguous_format),
        _like_weights(rows, weights),
    ),
}
_RUNS = {
    "swiglu": run_swiglu,
    "swiglu_backward": run_swiglu_backward,
    "permute": run_permute,
    "sum_rows": run_sum_rows,
    "unpermute": run_unpermute,
    "unpermute_backward": run_unpermute_backward,
}
for _name, _run in _RUNS.items():
    _library.impl(_name, _run, "CUDA")
    register_fake(f"imbrex_glue::{_name}", _FAKES[_name], lib=_library)
for _name, _backward, _setup in (
    ("swiglu", _swiglu_backward, _swiglu_setup),
    ("permute", _permute_backward, _permute_setup),
    ("unpermute", _unpermute_backward, _unpermute_setup),
):
    register_autograd(f"imbrex_glue::{_name}", _backward, setup_context=_setup, lib=_library)
