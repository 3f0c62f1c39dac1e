"""What experts are told of their rows, on the host's side of `weights.cu`; by torch without a GPU."""

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


def spread(
    weights: Tensor, position: Tensor, counts: Tensor, num_rows: int, slots: int
) -> tuple[Tensor, Tensor]:
    """The gate weight of every row, float32 [num_rows], unset where no choice has the row; and rows of every
    slot, int64 [slots].

    weights: float32; position: int32, of the same shape: the row of a choice, -1 where it has none here.
    counts: int32, contiguous, `slots` of them or more.
    """
    if not weights.is_cuda:
        weights_R = torch.empty(num_rows, dtype=torch.float32, device=weights.device)
        here = (position >= 0) & (position < num_rows)
        weights_R[position[here].long()] = weights[here]
        return weights_R, counts.flatten()[:slots].long()
    return run_spread(weights, position, counts, num_rows, slots)


def run_spread(
    weights: Tensor, position: Tensor, counts: Tensor, num_rows: int, slots: int
) -> tuple[Tensor, Tensor]:
    device = weights.device
    weights_R = torch.empty(num_rows, dtype=torch.float32, device=device)
    counts_e = torch.empty(slots, dtype=torch.int64, device=device)
    args = [position, weights, counts, position.numel(), num_rows, slots, weights_R, counts_e]
    _kernel("spread_weights", device).launch(grid=_BLOCKS, block=_THREADS, args=args)
    return weights_R, counts_e
