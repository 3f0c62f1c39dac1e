"""Gradients of shared parameters that do not depend on how many ranks shared the work, to the bit.

A sum over tokens depends on its order, and one different bit is enough: a near tie in the gate falls the
other way, and some steps later two training curves part (measured: 1e-7, one token, 1e-2 twenty steps on).
So here every sequence gives its own gradient, and sequences are summed in one binary tree, the same however
they are cut into consecutive, equally large powers of two. Every rank sums its branch, `average` the rest:

    ((s0 + s1) + (s2 + s3))  =  (rank 0: s0 + s1) + (rank 1: s2 + s3)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from imbrex.runtime import waits


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the first dimension, neighbours first. [0, ...] gives zeros."""
    if x.shape[0] == 0:
        return x.sum(0)
    while x.shape[0] > 1:
        paired = x.shape[0] // 2 * 2
        x = torch.cat([x[0:paired:2] + x[1:paired:2], x[paired:]])
    return x[0]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_BSI, weight_OI)
        return F.linear(x_BSI, weight_OI)

    @staticmethod
    def backward(ctx: Any, dy_BSO: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_BSI, weight_OI = ctx.saved_tensors
        return dy_BSO @ weight_OI, tree_sum(torch.bmm(dy_BSO.transpose(1, 2), x_BSI))


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, weight_D: Tensor) -> Tensor:
        ctx.save_for_backward(x_BSD, weight_D)
        return x_BSD * weight_D

    @staticmethod
    def backward(ctx: Any, dy_BSD: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_BSD, weight_D = ctx.saved_tensors
        return dy_BSD * weight_D, tree_sum((dy_BSD * x_BSD).sum(1))


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bytes_BS: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(bytes_BS)
        ctx.rows = weight_VD.shape[0]
        return weight_VD[bytes_BS]

    @staticmethod
    def backward(ctx: Any, dy_BSD: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (bytes_BS,) = ctx.saved_tensors
        B, D = bytes_BS.shape[0], dy_BSD.shape[-1]
        first = torch.arange(B, device=bytes_BS.device)[:, None] * ctx.rows
        dweight = dy_BSD.new_zeros(B * ctx.rows, D)
        dweight.index_add_(0, (bytes_BS + first).flatten(), dy_BSD.flatten(0, 1))
        return None, tree_sum(dweight.view(B, ctx.rows, D))


def linear(x_BSI: Tensor, weight_OI: Tensor) -> Tensor:
    """[B, S, I] to [B, S, O], as `torch.nn.functional.linear`."""
    return _Linear.apply(x_BSI, weight_OI)


def embed(bytes_BS: Tensor, weight_VD: Tensor) -> Tensor:
    """int64 [B, S] to rows of the weight, [B, S, D]."""
    return _Embed.apply(bytes_BS, weight_VD)


class RMSNorm(nn.Module):
    """The norm of `torch.nn.RMSNorm` over the last dimension of [B, S, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BSD: Tensor) -> Tensor:
        return _Scale.apply(F.rms_norm(x_BSD, x_BSD.shape[-1:], eps=1e-5), self.weight)


@torch.no_grad()
def average(parameters: Iterable[nn.Parameter], *, parts: int, group: dist.ProcessGroup | None) -> None:
    """Gradients of this rank to their mean over the `parts` of the global batch, the tree's upper half.

    parts: ranks with different tokens; the ranks of one part are consecutive in `group`.
    """
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if group is None or parts == 1:
        return
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    gathered = flat.new_empty(group.size(), flat.numel())
    waits.all_gather_single(gathered.flatten(), flat, group=group)
    mean = tree_sum(gathered[:: group.size() // parts]) / parts
    for grad, piece in zip(grads, mean.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(piece.view_as(grad))
