"""The gate weights of expert-major rows, on the host's side of `weights.cu`; by torch without a GPU."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from imbrex.kernels.jit import Kernel, Variant, load

_THREADS, _BLOCKS = 256, 264
KERNELS = ("spread_weights",)


def shipped_variants() -> list[Variant]:
    return [Variant(source="rows/weights.cu", entry=entry) for entry in KERNELS]


@functools.cache
def _kernel(entry: str, device: torch.device) -> Kernel:
    return load(Variant(source="rows/weights.cu", entry=entry), device)


def spread(weights: Tensor, position: Tensor, num_rows: int) -> Tensor:
    """The gate weight of every row, float32 [num_rows]; unset where no choice has the row.

    weights: float32; position: int32, of the same shape: the row of a choice, -1 where it has none here.
    """
    weights_R = torch.empty(num_rows, dtype=torch.float32, device=weights.device)
    if weights.is_cuda:
        args = [position, weights, position.numel(), num_rows, weights_R]
        _kernel("spread_weights", weights.device).launch(grid=_BLOCKS, block=_THREADS, args=args)
    else:
        here = (position >= 0) & (position < num_rows)
        weights_R[position[here].long()] = weights[here]
    return weights_R
