"""Arguments of the combine of expert-major rows."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.routing.routed import Routed

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
    """Arguments of a combine. strides: bytes between the ranks of this launch in rows, addend and out.
    pieces: tokens that a warp draws at once, parts of a row, warps that begin by reducing."""
    width, most, at = rows.shape[-1], routed.max_tokens, routed.addresses
    given, home = values or (None, None)
    for value in values or ():
        assert value.dtype == torch.float32
        assert value.is_contiguous()
    return lay.Reduce(
        rows=rows,
        addend=addend,
        out=out,
        position=at.position_LWTK,
        weights=at.weights_LWTK if weighted else None,
        recv_row=at.recv_row_LWT,
        send_row=at.send_row_LTW,
        tokens=at.tokens_LW,
        values=given,
        values_out=home,
        values_at=layout.values,
        values_bytes=lay.value_bytes(shape),
        partials_at=layout.partials,
        buffer_bytes=lay.partial_bytes(shape),
        rows_stride=strides[0],
        x_stride=strides[1],
        out_stride=strides[2],
        max_tokens=most,
        choices=shape.choices,
        row_bytes=2 * width,
        wire_bytes=lay.wire_bytes(2 * width, wire),
        piece_tokens=pieces[0],
        parts=pieces[1],
        reducers=pieces[2],
        out_float=out.dtype == torch.float32,
        out_tokens=out.shape[-2],
    )
