"""Functions that scale gradients on their way back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["scale_gradient"]
"""The name for adapters."""


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0] * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return `x`; its gradient is multiplied by `factor`."""
    scaled: Any = _ScaledGradient.apply(x, factor)
    return scaled
