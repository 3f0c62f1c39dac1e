"""Which widths the expert kernels take as they are: the copy engine wants rows of 16 bytes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

MULTIPLE = 8
"""D and F, in bf16, are multiples of it."""


def fits(width: int, inner: int) -> bool:
    """Whether D = `width` and F = `inner` are taken as they are."""
    return width % MULTIPLE == 0 and inner % MULTIPLE == 0


def pad_widths(rows_RD: Tensor, gate_up_eGD: Tensor, down_eDF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and weights with zeros behind D and F, which change no sum: silu(0) * 0 is 0. Differentiable.

    Example, D = 20 and F = 12: rows [R, 24], gate and up [e, 2 * 16, 24], down [e, 24, 16].
    """
    width, inner = down_eDF.shape[1:]
    more, wider = -width % MULTIPLE, -inner % MULTIPLE
    halves = gate_up_eGD.unflatten(1, (2, inner))
    gate_up_eGD = F.pad(halves, [0, more, 0, wider]).flatten(1, 2)
    return F.pad(rows_RD, [0, more]), gate_up_eGD, F.pad(down_eDF, [0, wider, 0, more])


__all__ = ["MULTIPLE", "fits", "pad_widths"]
