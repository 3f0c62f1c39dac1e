"""Launches of the exchange's kernels: how many blocks, what shared memory, which arguments."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from imbrex.contracts import Placement
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.groups import RowGroups, group_fields
from imbrex.kernels.exchange.variants import BESIDE_THREADS, MOVER_THREADS
from imbrex.kernels.routing.routed import Routed, Tables

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
    """The shape of a push. row_bytes: of a row that crosses. besides: bytes of shared memory for something
    else."""
    quantisers = lay.quantisers_of(row_bytes, ranks, besides) if quantise else 0
    stages, shared = lay.mover_shared(row_bytes, ranks, quantisers, besides)
    return PushShape(stages=stages, quantisers=quantisers, shared=shared)


def dispatch_shape(shape: lay.Shape, row_bytes: int, blocks: int, *, quantise: bool) -> PushShape | None:
    """The shape of a push that routes, or `None` where rows and routing do not fit one block: two kernels do
    it then."""
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
    """The arguments of a pull and the shared memory of a block. buffer: as for `push_args`."""
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
        pitch=lay.fp8_pitch(x.shape[-1]),
        stages=stages,
        buffer=buffer[0],
        lag=buffer[1],
        early_groups=early_groups,
    )
    return args, shared


class Choosing(TypedDict, total=False):
    """How a call of an exchange routes.

    tally: int32 [L, W, S]; choices of every rank for every slot are added to it. tables: of another placement
    of as many experts in the same slots; layers share a heap. balanced: replicas are chosen by the loads of
    this batch, as `split_balanced`; else in equal parts. traffic: int32 [L, W, W]; how many tokens of every
    rank every rank wants, its own included, is written to it (`route` alone).
    """

    tally: Tensor | None
    tables: Tables
    balanced: bool
    traffic: Tensor | None


class RoutingPlan(NamedTuple):
    """The common part of all routings of an exchange: its slots, and room for how many replicas of an expert.

    tables: of the placement, where a call brings none."""

    shape: lay.Shape
    layout: lay.Layout
    slots: int
    room: int
    tables: Tables


def route_args(
    plan: RoutingPlan,
    ids: Tensor,
    weights: Tensor,
    tokens: Tensor | None,
    routed: Routed,
    choosing: Choosing,
    *,
    small: bool = False,
) -> ctypes.Structure:
    """The struct of the routing kernel. small: of a kernel that routes a small batch by itself."""
    shape, where, room, to = plan.shape, plan.layout, plan.room, routed.addresses
    tables = choosing.get("tables") or plan.tables
    return lay.Route(
        ids=ids,
        weights=weights,
        tokens=tokens,
        first_replica=tables[0],
        replica_slots=tables[1],
        rank_offsets=tables[2],
        position=to.position_LWTK,
        all_weights=to.weights_LWTK,
        recv_row=to.recv_row_LWT,
        send_row=to.send_row_LTW,
        counts=to.counts_Le,
        totals=to.totals_L4,
        all_tokens=to.tokens_LW,
        tally=choosing.get("tally"),
        traffic=choosing.get("traffic"),
        ids_at=where.small_ids if small else where.ids,
        counts_at=0 if small else where.counts,
        tokens_at=where.small_tokens if small else where.tokens,
        num_tokens=ids.shape[-2],
        max_tokens=routed.max_tokens,
        choices=shape.choices,
        experts=shape.experts,
        most_slots=shape.most_slots,
        alignment=shape.alignment,
        row_capacity=shape.row_capacity,
        token_capacity=shape.token_capacity,
        tensor=shape.tensor,
        replicated=room > 0,
        slots=plan.slots,
        room=room if choosing.get("balanced") else 0,
    )


def check_inputs(
    shape: lay.Shape, ids: Tensor, weights: Tensor, tokens: Tensor | None, max_tokens: int
) -> None:
    """ValueError where choices are not those of a token, or more than there is room for."""
    if tokens is None and (ids.shape[-1] != shape.choices or ids.shape[-2] > max_tokens):
        raise ValueError(
            f"exchange: ids of shape {tuple(ids.shape)}; here there is room for at most {max_tokens} tokens "
            f"of {shape.choices} choices"
        )
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    assert ids.is_contiguous()
    assert weights.is_contiguous()


def check_shape(placement: Placement, shape: lay.Shape, *, moves: bool) -> None:
    """ValueError where the kernels cannot serve. moves: rows, not only routing."""
    if placement.num_ranks * shape.tensor != shape.ranks or placement.num_experts != shape.experts:
        raise ValueError(
            f"exchange: a placement of {placement.num_experts} experts on {placement.num_ranks} ranks for "
            f"a shape of "
            f"{shape.experts} experts on {shape.ranks}"
        )
    if shape.choices > 32 or shape.row_bytes % 16:
        raise ValueError("exchange: at most 32 choices a token, and rows of a multiple of 16 bytes")
    if shape.ranks > (lay.MOST_RANKS if moves else lay.MAX_RANKS):
        raise ValueError(
            f"exchange: {shape.ranks} ranks; at most {lay.MOST_RANKS} exchange rows, {lay.MAX_RANKS} route "
            "(compact=False, expert=False)"
        )


MOST_FP8 = 17408
"""Values of a row whose scales every warp has room for."""


def check_wire(wire: str, width: int) -> None:
    """Raise ValueError where sums of `width` values cannot cross as `wire`."""
    if wire not in ("bf16", "fp8") or (wire == "fp8" and (width % 256 or width > MOST_FP8)):
        raise ValueError(
            f"exchange: wire {wire!r} for {width} values; bf16, or fp8 for multiples of 256 up to {MOST_FP8}"
        )


class Sums(TypedDict, total=False):
    """The terms of a combine, and how they cross.

    weighted: multiply rows by the gate weights (by default in `combine` alone). addend: bf16, shaped as the
    result, joins the sum last (the shared experts' output). values: float32 numbers of the rows, [R] (or [L,
    row_capacity]), and where those of every choice's row go, [T, K] (or [L, max_tokens, K]). pieces: as of
    `lay.combine_pieces`, the same on all ranks. wire: "bf16", or "fp8": a rank's sums cross as rows of the
    `fp8` codec; D is then a multiple of 256.
    """

    weighted: bool
    addend: Tensor | None
    values: tuple[Tensor, Tensor] | None
    pieces: tuple[int, int, int] | None
    wire: str


def reduce_args(
    shape: lay.Shape, layout: lay.Layout, rows: Tensor, out: Tensor, routed: Routed, sums: Sums
) -> ctypes.Structure:
    """Arguments of a combine of expert-major rows. pieces: tokens that a warp draws at once, parts of a row,
    warps that begin by reducing."""
    width, max_tokens, at = rows.shape[-1], routed.max_tokens, routed.addresses
    wire, addend = sums.get("wire", "bf16"), sums.get("addend")
    check_wire(wire, rows.shape[-1])
    pieces = sums.get("pieces") or lay.combine_pieces(max_tokens, wire, 2 * width)
    numbers, home = sums.get("values") or (None, None)
    for value in (numbers, home) if numbers is not None else ():
        assert value is not None
        assert value.dtype == torch.float32
        assert value.is_contiguous()
    return lay.Reduce(
        rows=rows,
        addend=addend,
        out=out,
        position=at.position_LWTK,
        weights=at.weights_LWTK if sums.get("weighted") else None,
        recv_row=at.recv_row_LWT,
        send_row=at.send_row_LTW,
        tokens=at.tokens_LW,
        # No rows have no address, by which the kernel would take it that no numbers go home.
        values=numbers if numbers is None or numbers.numel() else home,
        values_out=home,
        values_at=layout.values,
        values_bytes=layout.value_bytes,
        partials_at=layout.partials,
        buffer_bytes=layout.partial_bytes,
        rows_stride=rank_stride(rows),
        x_stride=rank_stride(addend),
        out_stride=rank_stride(out),
        max_tokens=max_tokens,
        choices=shape.choices,
        row_bytes=2 * width,
        wire_bytes=lay.wire_bytes(2 * width, wire),
        piece_tokens=pieces[0],
        parts=pieces[1],
        reducers=pieces[2],
        out_float=out.dtype == torch.float32,
        out_tokens=out.shape[-2],
        early=0,
        each=0,
    )


def small_args(
    shape: lay.Shape,
    layout: lay.Layout,
    route: Any,
    x: Tensor,
    out: Tensor,
    few: int,
    num_sms: int,
    groups: RowGroups | None,
) -> ctypes.Structure:
    """Arguments of a dispatch of at most `few` tokens a rank, which routes by `route` and writes `groups`."""
    if num_sms < 2:
        raise ValueError(
            "exchange: a small dispatch needs at least 2 SMs, as some push and some route; give more"
        )
    row_bytes = x.shape[-1] * x.element_size()
    return lay.Small(
        route=route,
        x=x,
        out=out,
        staged_at=layout.small_staged,
        buffer_bytes=shape.ranks * few * shape.row_bytes,
        x_stride=rank_stride(x),
        out_stride=rank_stride(out),
        out_bytes=out.shape[-2] * row_bytes,
        row_bytes=row_bytes,
        parts=lay.SMALL_PARTS,
        pushers=lay.small_pushers(shape.ranks, num_sms),
        **group_fields(groups),
    )


def gather_args(
    shape: lay.Shape,
    layout: lay.Layout,
    own: Tensor,
    addend: Tensor | None,
    out: Tensor,
    routed: Routed,
    buffer: int,
) -> tuple[ctypes.Structure, lay.GatherShape]:
    """Arguments of a combine of sums that stand in the heap, and how its blocks are cut."""
    row_bytes = 2 * own.shape[-1]
    block = lay.gather_shape(row_bytes)
    args = lay.Gather(
        own=own,
        addend=addend,
        out=out,
        send_row=routed.send_row_LTW,
        tokens=routed.tokens_LW,
        sums_at=layout.reduced + buffer * shape.token_capacity * shape.row_bytes,
        x_stride=rank_stride(own),
        out_stride=rank_stride(out),
        out_bytes=out.shape[-2] * own.shape[-1] * out.element_size(),
        max_tokens=routed.send_row_LTW.shape[1],
        row_bytes=row_bytes,
        piece_bytes=block.piece_bytes,
        crews=block.crews,
        adders=block.adders,
        slots=block.slots,
        out_float=out.dtype == torch.float32,
    )
    return args, block
