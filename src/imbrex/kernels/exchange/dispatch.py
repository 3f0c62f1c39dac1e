"""Arguments of the pushing kernels: with `dispatch_rows`, which routes besides, their shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.variants import BESIDE_THREADS, MOVER_THREADS
from imbrex.kernels.routing.routed import Routed

SCRATCH_BYTES, WINDOWS_BYTES = 320, 640
"""Room for what a block knows of its scratch, and of windows of it."""
FEW_SMS, NARROW_BYTES = 32, 8192
"""Rows of 4096 bytes on 4 H200: 244 us in one kernel, 228 in two on 24 SMs; 195 and 205 on 32. Half as many
threads route beside those that stage."""
STAGE_SMS = 64
"""Blocks of routing with staging: 16384 tokens of 2048 values on two H200 in 41 us (32 SMs: 65, 132: 42), of
7168 values in 90 (144, 77)."""
FEW, MORE = (8, 16), (24, 32)
"""SMs for compact and for expert-major rows: enough for the wire, and for rows shorter than `NARROW_BYTES`,
of which an SM moves fewer bytes."""
MOST_WINDOW = 4
"""Chunks that are routed at once beside rows: more shared memory for routing is less for rows."""


def default_sms(row_bytes: int, *, compact: bool) -> int:
    """SMs of a call that does not say how many."""
    return (FEW if compact else MORE)[row_bytes < NARROW_BYTES]


@dataclass(frozen=True, kw_only=True, slots=True)
class PushShape:
    """A block of a pushing kernel. quantisers: warps. scratch_at, early_from: where routing keeps
    what it knows in shared memory, `window` chunks at once."""

    stages: int
    quantisers: int
    shared: int
    scratch_at: int = 0
    early_from: int = 0
    window: int = 0

    @property
    def threads(self) -> int:
        movers = MOVER_THREADS + 32 * lay.QUANTISERS * (self.quantisers > 0)
        return movers + BESIDE_THREADS * (self.window > 0)


def push_shape(row_bytes: int, ranks: int, *, quantise: bool, besides: int = 0) -> PushShape:
    quantisers = lay.quantisers_of(row_bytes, ranks, besides) if quantise else 0
    stages, shared = lay.mover_shared(row_bytes, ranks, quantisers, besides)
    return PushShape(stages=stages, quantisers=quantisers, shared=shared)


def dispatch_shape(shape: lay.Shape, row_bytes: int, blocks: int, *, quantise: bool) -> PushShape | None:
    """None where rows and routing do not fit one block: then the two kernels are for it."""
    chunks = -(-shape.ranks * -(-shape.max_tokens // lay.CHUNK) // blocks)
    owners, segments = shape.ranks // shape.tensor, -(-shape.max_tokens // lay.SEGMENT)
    early = 4 * (1 + shape.ranks * owners + 2 * -(-segments // blocks) * owners) + segments * owners
    early = -(-early // 16) * 16
    window = min(chunks, 2 if quantise else MOST_WINDOW)
    besides = early + WINDOWS_BYTES + lay.route_shared(shape, chunks, 0, window)
    try:
        rows = push_shape(row_bytes, shape.ranks, quantise=quantise, besides=besides)
    except ValueError:
        return None
    early_from = -(-rows.shared // 16) * 16
    return PushShape(
        stages=rows.stages,
        quantisers=rows.quantisers,
        shared=early_from + besides,
        scratch_at=early_from + early,
        early_from=early_from,
        window=window,
    )


def expert_shape(shape: lay.Shape, row_bytes: int, blocks: int, room: int) -> tuple[int, int] | None:
    """Where routing keeps what it knows and the word after it, in the shared memory of a kernel that pulls
    rows later; None where there is no room, or two kernels are quicker.
    """
    if blocks < FEW_SMS and row_bytes < NARROW_BYTES:
        return None
    chunks = -(-shape.ranks * -(-shape.max_tokens // lay.CHUNK) // blocks)
    stages, shared = lay.mover_shared(row_bytes, shape.choices)
    scratch_at = shared - stages * (-(-row_bytes // 128) * 128)
    if scratch_at % 16 + lay.route_shared(shape, chunks, room) + SCRATCH_BYTES + 32 > shared - scratch_at:
        return None
    return -(-scratch_at // 16) * 16, shared - 16


def rank_stride(x: Tensor | None) -> int:
    """Bytes between the ranks of a launch; 0 where there is one, whose tensors need no dimension for it."""
    return x.stride(0) * x.element_size() if x is not None and x.dim() == 3 else 0


def push_args(
    shape: lay.Shape,
    layout: lay.Layout,
    block: PushShape,
    x: Tensor,
    send_row: Tensor,
    tokens: Tensor | None,
    buffer: tuple[int, int],
) -> Any:
    """Arguments of a push. buffer: which of the buffers, and how many calls ago it was last used."""
    quantise = block.quantisers > 0
    assert not quantise or x.dtype == torch.bfloat16
    row_bytes = x.shape[-1] * x.element_size()
    wire_bytes = lay.fp8_bytes(x.shape[-1]) if quantise else row_bytes
    pitch = lay.fp8_pitch(x.shape[-1]) if quantise else row_bytes
    return lay.Push(
        x=x,
        send_row=send_row,
        tokens=tokens,
        rows_at=layout.received,
        buffer_bytes=shape.token_capacity * shape.row_bytes,
        x_stride=rank_stride(x),
        num_tokens=x.shape[-2],
        max_tokens=send_row.shape[1],
        row_bytes=row_bytes,
        wire_bytes=wire_bytes,
        pitch=pitch,
        stages=block.stages,
        quantisers=block.quantisers,
        buffer=buffer[0],
        lag=buffer[1],
    )


def pull_args(
    shape: lay.Shape,
    layout: lay.Layout,
    x: Tensor,
    out: Tensor,
    routed: Routed,
    buffer: tuple[int, int],
    early_groups: int = 0,
) -> tuple[Any, int]:
    """And the shared memory of a block. buffer: as for `push_args`."""
    row_bytes, at = x.shape[-1] * x.element_size(), routed.addresses
    stages, shared = lay.mover_shared(row_bytes, shape.choices)
    args = lay.Pull(
        x=x,
        out=out,
        position=at.position_LWTK,
        tokens=at.tokens_LW,
        staged_at=layout.staged,
        buffer_bytes=shape.max_tokens * shape.row_bytes,
        inbox_at=layout.inbox,
        x_stride=rank_stride(x),
        out_stride=rank_stride(out),
        out_bytes=out.shape[-2] * row_bytes,
        max_tokens=routed.max_tokens,
        choices=shape.choices,
        row_bytes=row_bytes,
        stages=stages,
        buffer=buffer[0],
        lag=buffer[1],
        early_groups=early_groups,
    )
    return args, shared
