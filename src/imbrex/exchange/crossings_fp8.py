"""Dispatch that leaves rows as they cross, in fp8, for experts that compute in fp8.

    x_TD ──encode, move──▶ bytes ──expand──▶ rows_RD float8_e4m3fn, scales_RB

Decoding, and quantising again what was decoded, is left out; the own tokens are encoded as the others' are.
Forward only: nobody differentiates or traces.
"""

from __future__ import annotations

import torch
from torch import Tensor

from imbrex.codec.fp8 import BLOCK, Fp8
from imbrex.contracts import Plan, Routing, Wire
from imbrex.exchange import rows
from imbrex.exchange.crossings import Crossings
from imbrex.exchange.crossings_nvlink import NvlinkCrossings
from imbrex.runtime.tracing import differentiated, traced

Dispatched8 = tuple[tuple[Tensor, Tensor], Tensor, Tensor, list[Tensor]]
"""Values and scales, weights_R, counts_e, state."""


def unfit(wire: Wire, width: int) -> str | None:
    """None if rows cross in a form that fp8 experts take, else why not."""
    codec = wire.dispatch
    if not (isinstance(codec, Fp8) and codec.wire_dtype == torch.float8_e4m3fn):
        return f"they cross as {codec.name}, not as fp8"
    return f"they have {width} values, no multiple of {BLOCK}" if width % BLOCK else None


def unfit_call(x_TD: Tensor, weights_TK: Tensor) -> bool:
    """Whether somebody differentiates or traces this call, or tokens are not bfloat16."""
    return x_TD.dtype != torch.bfloat16 or differentiated(x_TD, weights_TK) or traced(x_TD, weights_TK)


def dispatch_fp8(
    crossings: Crossings | NvlinkCrossings, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor
) -> Dispatched8:
    """As `run_dispatch` of the crossings, with rows in fp8."""
    if isinstance(crossings, NvlinkCrossings):
        return crossings.run_dispatch_fp8(x_TD, weights_TK, ids_TK)
    observer, layer = crossings.observer, crossings.layer
    with observer.span("plan", layer=layer):
        made = crossings.make_plans([(x_TD, Routing(ids_TK=ids_TK, weights_TK=weights_TK))])[0]
    with observer.span("dispatch", layer=layer):
        encoded = crossings.write_dispatch(made, x_TD, weights_TK)
        received = crossings.begin_out(encoded, made.traffic).finish()
        return read_dispatch_fp8(crossings, made, encoded, received, weights_TK)


def read_dispatch_fp8(
    crossings: Crossings, made: Plan, encoded: Tensor, received: Tensor, weights_TK: Tensor
) -> Dispatched8:
    """As `read_dispatch` of the crossings, with rows in fp8; the own ones are among what was written."""
    width = crossings.geometry.hidden_size
    nbytes = crossings.wire.dispatch.nbytes(width, torch.bfloat16)
    weights_R, state = crossings.place(made, received, weights_TK)
    bytes_RB = rows.expand([encoded[:, :nbytes], received[:, :nbytes]], state[0])
    values_RD = bytes_RB[:, :width].view(torch.float8_e4m3fn)
    return (values_RD, bytes_RB[:, width:].view(torch.float32)), weights_R, made.counts_e, state
