"""A gate's logits: float32 for tokens of any dtype.

On a GPU, bfloat16 tokens and weights are multiplied without float32 copies. Their products are exact in
float32, and only the order and rounding of the sums differ: errors are 1e-5 instead of 1e-6 for logits of
size 1 (H200, D = 2048). The copies and a product without tensor cores take 3 to 17 times as long.

A kernel computes the logits of few tokens (`kernels.gate.logits`), with sums in an order of its own. It
does so with and without gradients, so that logits recomputed for a backward have the same bits.

The gradient of the logits is float32. It goes through the same products as the sum of two bfloat16 numbers,
which keep 15 or 16 of its 24 bits; both gradients are then rounded to 8.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.kernels.gate.logits import add_halves, logits_of_few, why_not_few, why_not_halves
from imbrex.runtime.tracing import differentiated, once_differentiable, traced


def logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """float32 [T, E] of tokens and weights of any floating point dtypes; differentiable once where both are
    bfloat16 on a GPU."""
    if not multiplied_as_they_are(x_TD, weight_ED):
        return F.linear(x_TD.float(), weight_ED.float())
    if differentiated(x_TD, weight_ED):
        return _Logits.apply(x_TD, weight_ED)
    return run_logits(x_TD, weight_ED)


def multiplied_as_they_are(x_TD: Tensor, weight_ED: Tensor) -> bool:
    """Whether tokens and weights are multiplied without float32 copies."""
    return x_TD.is_cuda and x_TD.dtype == weight_ED.dtype == torch.bfloat16


def run_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Logits of bfloat16 operands on a GPU."""
    if why_not_few(x_TD, weight_ED) is None:
        return logits_of_few(x_TD, weight_ED)
    return _product(x_TD, weight_ED.t())


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bfloat16 matrices, float32."""
    return torch.mm(a, b, out_dtype=torch.float32)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two float32 tensors whose sum is `x`, float32: its first 8 significant bits, and the rest.

    It cuts by bits, because a compiler may leave out a rounding to bfloat16 and back.
    """
    high = (x.view(torch.int32) & -65536).view(torch.float32)
    return high, x - high


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        return run_logits(x_TD, weight_ED)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        need_x, need_weight = ctx.needs_input_grad
        x_TD, weight_ED = ctx.saved_tensors
        parts = torch.cat(split(gradients[0]), dim=1).bfloat16()
        needs = need_x, need_weight
        return logits_backward(parts, x_TD, weight_ED, needs, as_operators=traced(parts))


def logits_backward(
    parts: Tensor,
    x_TD: Tensor,
    weight_ED: Tensor,
    needs: tuple[bool, bool],
    product: Any = _product,
    *,
    as_operators: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of tokens and weights, bfloat16, `None` where not needed. parts: of the gradient of logits,
    bfloat16 [T, 2E], as `split` makes two of a number. product: of two bfloat16 matrices, float32."""
    need_x, need_weight = needs
    d_x_TD = torch.mm(parts, torch.cat((weight_ED, weight_ED))) if need_x else None
    d_weight_ED = None
    if need_weight:
        halves = product(parts.t(), x_TD)
        if as_operators or why_not_halves(halves) is not None:
            d_weight_ED = halves.unflatten(0, (2, -1)).sum(0).to(weight_ED.dtype)
        else:
            d_weight_ED = add_halves(halves, torch.empty_like(weight_ED))
    return d_x_TD, d_weight_ED
