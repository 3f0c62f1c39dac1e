"""A gate's logits: float32, whatever the tokens are.

Tokens and weights in bfloat16 on a GPU are multiplied as they are. Their products are exact in float32, and
only the order and rounding of the sums differ from a product of float32 copies: 1e-5 instead of 1e-6 for
logits of size 1 (H200, D = 2048). The copies and a product without tensor cores take 3 to 17 times as long.

The logits of few tokens are a kernel's (`kernels.gate.logits`), with sums in an order of its own: whether or
not somebody differentiates, so that what is computed once more for a backward has the same bits.

The gradient of the logits is float32. It goes through the same products as the sum of two bfloat16 numbers,
which keep 15 or 16 of its 24 bits; both gradients are then rounded to 8.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.kernels.gate.logits import logits_of_few, why_not_few
from imbrex.runtime.tracing import differentiated, once_differentiable


def logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """float32 [T, E] of tokens and weights of any floating point dtypes; differentiable once where both are
    bfloat16 on a GPU."""
    if not x_TD.is_cuda or x_TD.dtype != torch.bfloat16 or weight_ED.dtype != torch.bfloat16:
        return F.linear(x_TD.float(), weight_ED.float())
    if differentiated(x_TD, weight_ED):
        return _Logits.apply(x_TD, weight_ED)
    return _logits(x_TD, weight_ED)


def _logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    if why_not_few(x_TD, weight_ED) is None:
        return logits_of_few(x_TD, weight_ED)
    return _product(x_TD, weight_ED.t())


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bfloat16 matrices, float32."""
    return torch.mm(a, b, out_dtype=torch.float32)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two float32 tensors whose sum is `x`, float32: its first 8 significant bits, and the rest.

    By bits, because a compiler may leave out a rounding to bfloat16 and back.
    """
    high = (x.view(torch.int32) & -65536).view(torch.float32)
    return high, x - high


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        return _logits(x_TD, weight_ED)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        need_x, need_weight = ctx.needs_input_grad
        x_TD, weight_ED = ctx.saved_tensors
        return logits_backward(gradients[0], x_TD, weight_ED, _product, need_x, need_weight)


def logits_backward(
    d_logits_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, product: Any, need_x: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of tokens and weights, bfloat16, `None` where not needed. product: of two bfloat16 matrices,
    float32."""
    parts = torch.cat(split(d_logits_TE), dim=1).bfloat16()
    d_x_TD = parts @ torch.cat((weight_ED, weight_ED)) if need_x else None
    d_weight_ED = None
    if need_weight:
        d_weight_ED = product(parts.t(), x_TD).unflatten(0, (2, -1)).sum(0).to(weight_ED.dtype)
    return d_x_TD, d_weight_ED
