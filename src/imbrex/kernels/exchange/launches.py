"""Launch parameters of the exchange's kernels: blocks, shared memory and argument structs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
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
"""Bytes of shared memory for a block's record of its scratch, and of windows of it."""
FEW_SMS, NARROW_BYTES = 32, 8192
"""Fewer SMs, and rows shorter than this, take two kernels to dispatch. Rows of 4096 bytes on 4 H200: 244 us
in one kernel and 228 in two on 24 SMs, 195 and 205 on 32. In the one kernel half as many threads route."""
STAGE_SMS = 128
"""Blocks of a kernel that stages, with routing or without, at most as many as the GPU has SMs. With routing
16384 tokens of 2048 values on two H200 take 42 us on 132 SMs (on 32 65, on 64 41), of 7168 values 77 (144,
90). Without, in a backward, 132 save 12 to 19 us over 64 (2048 values, two and four H100)."""
FEW, MORE = (8, 16), (24, 32)
"""SMs for compact and for expert-major rows, in each case for long rows and for rows shorter than
`NARROW_BYTES`, of which an SM moves fewer bytes. These saturate the wire."""
MOST_WINDOW = 4
"""The most chunks that a kernel which also moves rows routes at once. More leave less shared memory for
rows."""


def default_sms(row_bytes: int, *, compact: bool) -> int:
    """The SMs of a call without `num_sms`."""
    return (FEW if compact else MORE)[row_bytes < NARROW_BYTES]


@dataclass(frozen=True, kw_only=True, slots=True)
class PushShape:
    """A block of a pushing kernel. quantisers: warps that quantise. scratch_at, early_from: offsets of the
    routing's shared memory, for `window` chunks at once."""

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
    """The shape of a push. row_bytes: bytes of a row that crosses. besides: bytes of shared memory kept for
    other uses."""
    quantisers = lay.quantisers_of(row_bytes, ranks, besides) if quantise else 0
    stages, shared = lay.mover_shared(row_bytes, ranks, quantisers, besides)
    return PushShape(stages=stages, quantisers=quantisers, shared=shared)


def dispatch_shape(shape: lay.Shape, row_bytes: int, blocks: int, *, quantise: bool) -> PushShape | None:
    """The shape of a push that also routes; `None` if rows and routing do not fit one block's shared memory,
    so that it takes two kernels."""
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
    """Offsets, in the shared memory of a kernel that routes and then pulls, of the routing's scratch and of
    the word after it; `None` if there is no room, or two kernels are faster.
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
    """Bytes from one rank's part of a tensor to the next; 0 for tensors of a single rank."""
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
    """The arguments of a push. buffer: its number, and how many calls ago it was last used."""
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
    """Options of a call's routing.

    tally: int32 [L, W, S]; the choices of every rank for every slot are added to it.
    tables: those of another placement, of as many experts and slots: layers share a heap.
    balanced: replicas are chosen by the loads of this batch, as `split_balanced` does; else in equal parts.
    traffic: int32 [L, W, W]; `route` writes the tokens that every rank sends to every rank to it, with those
        that stay.
    """

    tally: Tensor | None
    tables: Tables
    balanced: bool
    traffic: Tensor | None


class RoutingPlan(NamedTuple):
    """The common part of all routings of an exchange. slots: of all ranks. room: the slots that replicas may
    take. tables: the placement's, for calls that bring none."""

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
    """The argument of the routing kernel. small: of a small dispatch, whose blocks route by themselves."""
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
    """Raise ValueError if ids have another number of choices, or more tokens than there is room for."""
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
    """Raise ValueError if the kernels cannot serve this shape. moves: they move rows too, not only route."""
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
"""The most values of a row whose scales fit a warp's shared memory."""


def check_wire(wire: str, width: int) -> None:
    """Raise ValueError where sums of `width` values cannot cross as `wire`."""
    if wire not in ("bf16", "fp8") or (wire == "fp8" and (width % 256 or width > MOST_FP8)):
        raise ValueError(
            f"exchange: wire {wire!r} for {width} values; bf16, or fp8 for multiples of 256 up to {MOST_FP8}"
        )


class Sums(TypedDict, total=False):
    """The terms of a combine, and the form in which they cross.

    weighted: multiply rows by the gate weights; by default only `combine` does.
    addend: bf16, shaped as the result; added last (the shared experts' output).
    values: float32 numbers of the rows, [R] (or [L, row_capacity]), and the memory at home for the number of
        every choice, [T, K] (or [L, max_tokens, K]).
    pieces: as `lay.combine_pieces` gives them, the same on all ranks.
    wire: "bf16", or "fp8": sums cross as rows of the `fp8` codec, and D is a multiple of 256.
    behind: of the launch right before, if that is one that dispatches as well (`kernels.fused.few`), the
        blocks of a rank that do, at least 1. Sums cross as bf16.
    """

    weighted: bool
    addend: Tensor | None
    values: tuple[Tensor, Tensor] | None
    pieces: tuple[int, int, int] | None
    wire: str
    behind: int


def reduce_args(
    shape: lay.Shape, layout: lay.Layout, rows: Tensor, out: Tensor, routed: Routed, sums: Sums
) -> ctypes.Structure:
    """The arguments of a combine of expert-major rows."""
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
        # An empty tensor has no address, and the kernel reads a null as: no numbers go home.
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


def bytes_of_row(shape: lay.Shape, x: Tensor) -> int:
    """The bytes of a token; ValueError if the kernels cannot move tokens like `x`."""
    if not x.is_contiguous():
        raise ValueError("exchange: the tokens must be contiguous; call .contiguous() before")
    nbytes = x.shape[-1] * x.element_size()
    if nbytes % 16 or nbytes > shape.row_bytes:
        raise ValueError(
            f"exchange: rows of {nbytes} bytes; they must be a multiple of 16, at most {shape.row_bytes}: "
            "pad them"
        )
    return nbytes


class SmallCall(NamedTuple):
    """A small dispatch that has yet to be launched, on `sms` multiprocessors a rank. shared: bytes of shared
    memory that a block routes in."""

    args: Any
    sms: int
    shared: int
    rows: Tensor
    routed: Routed


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
    """The arguments of a dispatch of at most `few` tokens a rank. route: its routing's. groups: memory that
    it writes the groups to."""
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


def empty_sums(local_ranks: int, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Unset memory for a combine's result. size: tokens and their width."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"exchange: combine to {dtype}; bfloat16 or float32")
    return torch.empty((local_ranks, *size) if local_ranks > 1 else size, dtype=dtype, device=device)


def gather_args(
    shape: lay.Shape,
    layout: lay.Layout,
    own: Tensor,
    addend: Tensor | None,
    out: Tensor,
    routed: Routed,
    buffer: int,
) -> tuple[ctypes.Structure, lay.GatherShape]:
    """The arguments of a combine of sums that stand in the heap, and the shape of its blocks."""
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
