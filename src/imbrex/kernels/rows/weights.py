"""Gate weights and counts of rows, as experts take them: the host of `weights.cu`; by torch without a GPU."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from imbrex.kernels.jit import Kernel, Variant, load
from imbrex.kernels.routing.routed import Routed
from imbrex.kernels.structs import struct

_THREADS, _BLOCKS = 256, 264
KERNELS = ("spread_weights",)
Weights = struct("rows/weights.cu", "Weights")


def shipped_variants() -> list[Variant]:
    return [Variant(source="rows/weights.cu", entry=entry) for entry in KERNELS]


@functools.cache
def _kernel(entry: str, device: torch.device) -> Kernel:
    return load(Variant(source="rows/weights.cu", entry=entry), device)


def spread(routed: Routed, num_rows: int, slots: int) -> tuple[Tensor, Tensor]:
    """The gate weight of every row, float32 [num_rows], unset where no choice has the row; and rows of every
    slot, int64 [slots]. Of one rank, whose `routed` lies in one piece."""
    assert routed.words_TC is not None
    if routed.words_TC.is_cuda:
        return run_spread(routed, num_rows, slots)
    position, weights = routed.position_LWTK, routed.weights_LWTK
    weights_R = torch.empty(num_rows, dtype=torch.float32, device=weights.device)
    here = (position >= 0) & (position < num_rows)
    weights_R[position[here].long()] = weights[here]
    return weights_R, routed.counts_Le[0, :slots].long()


def run_spread(routed: Routed, num_rows: int, slots: int) -> tuple[Tensor, Tensor]:
    """The same by the kernel."""
    assert routed.words_TC is not None
    device, at = routed.words_TC.device, routed.addresses
    weights_R = torch.empty(num_rows, dtype=torch.float32, device=device)
    counts_e = torch.empty(slots, dtype=torch.int64, device=device)
    args = Weights(
        position=at.position_LWTK,
        weights=at.weights_LWTK,
        counts=at.counts_Le,
        weights_R=weights_R,
        counts_e=counts_e,
        choices=routed.num_choices,
        rows=num_rows,
        slots=slots,
    )
    _kernel("spread_weights", device).launch(grid=_BLOCKS, block=_THREADS, args=[args])
    return weights_R, counts_e
