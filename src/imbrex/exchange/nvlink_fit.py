"""The limits of the kernels over NVLink, and the forms in which they take a placement and a dispatch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from imbrex.contracts import Codec, Geometry, Placement, Wire
from imbrex.kernels.exchange.layout import Shape
from imbrex.placement import SPLITS, split_evenly
from imbrex.transport.nvlink import MOST_CHOICES, ROW_MULTIPLE

DTYPE = torch.bfloat16
FP8_OUT_MULTIPLE, FP8_BACK_MULTIPLE = 512, 256
FEW_TOKENS = 256
"""The most tokens of a rank for which one kernel both routes and moves. It takes 43 us for 128 tokens, where
two kernels take 59; for 512 tokens 110, like two (4 H200, rows of 7168 values, K=8)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The choices of one dispatch. max_tokens: those of the rank with the most. backward: whether a backward
    keeps the rows. Both are the same on every rank."""

    ids_TK: Tensor
    max_tokens: int
    backward: bool

    @property
    def is_small(self) -> bool:
        return self.max_tokens <= FEW_TOKENS


def why_not_nvlink(geometry: Geometry, wire: Wire) -> str | None:
    """Why the kernels do not serve this exchange, or `None`."""
    out, back = (wire.dispatch, wire.combine_backward), (wire.combine, wire.dispatch_backward)
    if any(codec.name not in ("identity", "fp8") for codec in (*out, *back)):
        return "its kernels write rows as they are or as fp8"
    for codecs, multiple in ((out, FP8_OUT_MULTIPLE), (back, FP8_BACK_MULTIPLE)):
        if any(is_coded(codec) for codec in codecs) and geometry.hidden_size % multiple:
            return f"its kernels write fp8 rows of multiples of {multiple} values"
    if geometry.rows_per_slot is not None or geometry.alignment != 1:
        return "rows are padded"
    if geometry.hidden_size * DTYPE.itemsize % ROW_MULTIPLE or geometry.top_k > MOST_CHOICES:
        return f"rows must be multiples of {ROW_MULTIPLE} bytes, choices at most {MOST_CHOICES}"
    return None


def is_coded(codec: Codec) -> bool:
    """Whether rows by this codec cross NVLink in another form than bfloat16."""
    return codec.name == "fp8"


def why_not_dtype(dtype: torch.dtype | None) -> str | None:
    """Why the kernels do not move tokens of `dtype`, or `None`."""
    if dtype is None:
        return "nobody said that tokens are bfloat16 (dtype=)"
    return None if dtype == DTYPE else f"tokens are {str(dtype).removeprefix('torch.')}, not bfloat16"


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelPlacement:
    """A placement in the form that the kernels take. by_slot: its experts are the slots of the placement that
    was given. balanced: the kernels choose replicas by the loads, else in equal parts."""

    placement: Placement
    by_slot: bool
    balanced: bool


def kernel_placement(geometry: Geometry) -> KernelPlacement:
    """The placement as kernels take it. With a split of the caller's they choose no replicas: slots
    0 1 | 1 2 are to them experts 0 1 | 2 3, each in one slot."""
    placement, balanced = geometry.placement, geometry.split is SPLITS["balanced"]
    if balanced or geometry.split is split_evenly:
        return KernelPlacement(placement=placement, by_slot=False, balanced=balanced)
    slots = tuple(range(placement.num_slots))
    named = Placement(slots=slots, rank_offsets=placement.rank_offsets, num_experts=len(slots))
    return KernelPlacement(placement=named, by_slot=True, balanced=False)


def most_rows(shape: Shape, max_tokens: int) -> int:
    """Rows that `max_tokens` tokens of every rank can be, for a heap that may have room for more. Of a few
    sizes only, so that memory for them is found again: that of the heap halved while it is enough.

    Example: kernels for 16384 tokens that are given 5000 at most have rows for 8192.
    """
    room = shape.max_tokens
    while room % 2 == 0 and room // 2 >= max_tokens:
        room //= 2
    return shape.row_capacity // shape.max_tokens * room
