"""Groups of rows as experts take them, of a routing: the host of `weights.cu`; by torch without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.kernels import records
from imbrex.kernels.exchange.groups import RowGroups, empty_groups
from imbrex.kernels.ffn.glue import COUNTERS, weigh_rows
from imbrex.kernels.jit import Kernel, Variant, load
from imbrex.kernels.routing.routed import Routed
from imbrex.kernels.structs import struct

_THREADS, _BLOCKS = 256, 264
KERNELS = ("spread_weights",)
Weights = struct("rows/weights.cu", "Weights")


def shipped_variants() -> list[Variant]:
    return [Variant(source="rows/weights.cu", entry=entry) for entry in KERNELS]


@functools.cache
def _kernel(entry: str, device: torch.device, load: Callable[..., Any] = load) -> Kernel:
    return load(Variant(source="rows/weights.cu", entry=entry), device)


def spread(routed: Routed, num_rows: int, slots: int) -> RowGroups:
    """The groups of the `num_rows` rows of one rank, whose `routed` lies in one piece."""
    assert routed.words_TC is not None
    if routed.words_TC.is_cuda:
        return run_spread(routed, num_rows, slots)
    position, weights = routed.position_LWTK, routed.weights_LWTK
    weights_R = torch.empty(num_rows, dtype=torch.float32, device=weights.device)
    here = (position >= 0) & (position < num_rows)
    weights_R[position[here].long()] = weights[here]
    counts_e = routed.counts_Le[0, :slots].long()
    plan = F.pad(counts_e.cumsum(0).int(), (COUNTERS, 0))
    return RowGroups(weights_R, counts_e, plan, hits=plan[:0])


def run_spread(
    routed: Routed,
    num_rows: int,
    slots: int,
    groups: RowGroups | None = None,
    *,
    load: Callable[..., Any] = load,
) -> RowGroups:
    """Spread weights by the kernel. groups: where the result lies."""
    assert routed.words_TC is not None
    device, at = routed.words_TC.device, routed.addresses
    groups = groups or empty_groups(1, num_rows, slots, COUNTERS, device)
    args = Weights(
        position=at.position_LWTK,
        weights=at.weights_LWTK,
        counts=at.counts_Le,
        weights_R=groups.weights,
        counts_e=groups.counts,
        choices=routed.num_choices,
        rows=num_rows,
        slots=slots,
        plan=groups.plan,
        counters=COUNTERS,
    )
    how: dict[str, Any] = {"grid": _BLOCKS, "block": _THREADS, "dependent": True}
    records.launch(_kernel("spread_weights", device, load), [args], how)
    return groups


def weigh(d_y_RD: Tensor, rows_RD: Tensor, weights_R: Tensor, routed: Routed) -> tuple[Tensor, Tensor]:
    """Gradients of the rows of one rank, bf16, whose weighted sum has the gradient d_y_RD, and of their
    weights."""
    if rows_RD.is_cuda:
        num_rows_1 = routed.totals_L4[0, :1]
        d_rows_RD, d_weights_R = weigh_rows(d_y_RD, rows_RD.contiguous(), weights_R, num_rows_1)
        assert d_weights_R is not None
        return d_rows_RD, d_weights_R
    d_weights_R = (rows_RD.float() * d_y_RD.float()).sum(1)
    return (d_y_RD.float() * weights_R[:, None]).to(rows_RD.dtype), d_weights_R
