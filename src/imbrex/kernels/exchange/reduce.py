"""What the combine of expert-major rows is given."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.route import address_of
from imbrex.kernels.exchange.routed import Routed

MOST_FP8 = 17408
"""Values of a row whose scales every warp has room for."""


def check_wire(wire: str, width: int) -> None:
    if wire not in ("bf16", "fp8") or (wire == "fp8" and (width % 256 or width > MOST_FP8)):
        raise ValueError(
            f"exchange: wire {wire!r} for {width} values; bf16, or fp8 for multiples of 256 up to {MOST_FP8}"
        )


def reduce_args(
    shape: lay.Shape,
    layout: lay.Layout,
    rows: Tensor,
    addend: Tensor | None,
    out: Tensor,
    routed: Routed,
    strides: tuple[int, int, int],
    values: tuple[Tensor, Tensor] | None,
    *,
    pieces: tuple[int, int, int],
    wire: str,
    weighted: bool,
) -> ctypes.Structure:
    """strides: bytes between the ranks of this launch in rows, addend and out. pieces: tokens that a warp
    draws at once, parts of a row, warps that begin by reducing."""
    width, most = rows.shape[-1], routed.position_LWTK.shape[2]
    given, home = values or (None, None)
    for value in values or ():
        assert value.dtype == torch.float32
        assert value.is_contiguous()
    return lay.Reduce(
        *map(address_of, (rows, addend, out, routed.position_LWTK)),
        *map(address_of, (routed.weights_LWTK if weighted else None, routed.recv_row_LWT)),
        *map(address_of, (routed.send_row_LTW, routed.tokens_LW, given, home)),
        *(layout.values, lay.value_bytes(shape), layout.partials, lay.partial_bytes(shape), *strides),
        *(most, shape.choices, 2 * width, lay.wire_bytes(2 * width, wire)),
        *(*pieces, out.dtype == torch.float32, out.shape[-2]),
    )
