"""The limits of the kernels over NVLink; a placement and a dispatch in the form that these kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from imbrex.contracts import Codec, Geometry, Placement, Wire
from imbrex.kernels.exchange.groups import RowGroups
from imbrex.kernels.exchange.layout import Shape
from imbrex.kernels.ffn.widths import MULTIPLE, fits
from imbrex.placement import SPLITS, split_evenly
from imbrex.transport.nvlink import MOST_CHOICES, ROW_MULTIPLE, Size

DTYPE = torch.bfloat16
FP8_OUT_MULTIPLE, FP8_BACK_MULTIPLE = 512, 256
"""The row width D must be a multiple of these if rows cross in fp8: on their way to experts (dispatch and
backward of combine), and on their way home."""
FEW_TOKENS = 256
"""The most tokens of a rank for which one kernel both routes and moves. For 128 tokens it takes 43 us, two
kernels 59; for 512 tokens both ways take 110 us (4 H200, rows of 7168 values, K=8)."""
NOTES = 1 << 32
"""The number of values of the word by which ranks compare their calls."""
SPARED = 200 << 20
"""Bytes of rows kept for a backward from which on the host waits to hear how many rows there are. Steps of
whole models on two H200 then take as long, within 1 %, with 9 to 26 % less memory. At half as many bytes they
take 10 % longer, because the host no longer runs ahead (Qwen3, 4096 tokens; benchmarks/models.py)."""
SPARED_BY_ALL = 1 << 30
"""Bytes of such rows of all layers together, from which on it waits, too. Their gate and up are once to seven
times as many: 24 layers of Qwen1.5-MoE, 4096 tokens, spare 1.5 GiB of rows and 2.1 of these. A few layers
stay below it."""


class Part(NamedTuple):
    """The plan of one dispatch over NVLink: the kernels themselves plan the rest.

    ids_TK: int64, the experts of this rank's tokens. max_tokens: the tokens of the rank with the most.
    backward: whether rows are kept for a backward. in_fp8: whether the experts of all ranks take rows in fp8.
    many: whether those that all layers keep for their backwards spare `SPARED_BY_ALL`, a rank says. All but
    the first are the same on every rank.
    """

    ids_TK: Tensor
    max_tokens: int
    backward: bool
    in_fp8: bool = False
    many: bool = False

    @property
    def is_small(self) -> bool:
        """Whether one kernel both routes and moves."""
        return self.max_tokens <= FEW_TOKENS

    def spares(self, nbytes: int) -> bool:
        """Whether to count rows first, which spares so many bytes of a layer's."""
        return self.backward and (self.many or nbytes >= SPARED)


def part_of(ids_TK: Tensor, words_W: Sequence[int]) -> tuple[Part, bool]:
    """The part of which ranks have told by these words, and whether all have promised rows that fit.

    A word is a rank's tokens, and four bits: rows are kept for a backward, all layers' rows are many, experts
    take fp8, rows that fit are promised.
    """
    # The largest word has the `backward` bit of the rank with the most tokens.
    largest, common, some = max(words_W), -1, 0
    for word in words_W:
        common &= word
        some |= word
    part = Part(ids_TK, largest >> 4, bool(largest & 8), bool(common & 2), bool(some & 4))
    return part, bool(common & 1)


class FewRows(NamedTuple):
    """The rows of a small dispatch, and what its kernel writes for the experts beside them. expected: rows of
    a rank in the mean."""

    rows_RD: Tensor
    groups: RowGroups
    expected: int


def why_not_nvlink(geometry: Geometry, wire: Wire) -> str | None:
    """Why the kernels cannot serve this exchange, or `None`."""
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
    """Whether this codec makes rows cross NVLink in fp8, not in bfloat16."""
    return codec.name == "fp8"


def why_not_dtype(dtype: torch.dtype | None) -> str | None:
    """Why the kernels cannot move tokens of `dtype`, or `None`. dtype: `None` if it is not known."""
    if dtype is None:
        return "nobody said that tokens are bfloat16 (dtype=)"
    return None if dtype == DTYPE else f"tokens are {str(dtype).removeprefix('torch.')}, not bfloat16"


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelPlacement:
    """A placement in the form that the kernels take.

    by_slot: its experts are the slots of the exchange's placement, because replicas are chosen on the host.
    balanced: the kernels choose replicas by load, otherwise in equal shares.
    """

    placement: Placement
    by_slot: bool
    balanced: bool


def kernel_placement(geometry: Geometry) -> KernelPlacement:
    """The exchange's placement in the form that the kernels take.

    The kernels can choose replicas by the splits `even` and `balanced`. With any other split the host chooses
    the slot of every choice, and the kernels see slots as experts: for the slots 0 1 | 1 2 they get experts
    0 1 | 2 3, each in one slot.
    """
    placement, balanced = geometry.placement, geometry.split is SPLITS["balanced"]
    if balanced or geometry.split is split_evenly:
        return KernelPlacement(placement=placement, by_slot=False, balanced=balanced)
    slots = tuple(range(placement.num_slots))
    named = Placement(slots=slots, rank_offsets=placement.rank_offsets, num_experts=len(slots))
    return KernelPlacement(placement=named, by_slot=True, balanced=False)


def why_not_whole(wire: Wire, placed: KernelPlacement, sizes: Sequence[int]) -> str | None:
    """Why no call launches the kernels of a whole layer at once, or `None`: because rows do not cross as they
    are, to slots that kernels choose, or kernels do not take the weights as they are. sizes: experts, D and
    F."""
    slots, width, inner = sizes
    if is_coded(wire.dispatch) or is_coded(wire.combine):
        return "rows cross as fp8"
    if placed.by_slot:
        return "the host chooses replicas"
    if not slots:
        return "there are no experts here"
    return None if fits(width, inner) else f"D and F are no multiples of {MULTIPLE}"


class Spared(NamedTuple):
    """The bytes of a layer's rows that exactly many rows spare, for every token of a rank."""

    by_token: int

    @classmethod
    def of(cls, size: Size, ranks: int) -> Spared:
        # Of one rank, as benchmarks count calls, there is nothing to spare.
        return cls(max(1, (ranks - 1) * min(size.choices, size.most_slots) * size.row_bytes))

    def many_tokens(self, layers: int) -> int:
        """Tokens of a rank from which on so many layers spare `SPARED_BY_ALL`; never as few as one kernel
        routes and moves, for which there is always room for all."""
        return max(-(-SPARED_BY_ALL // (self.by_token * max(layers, 1))), FEW_TOKENS + 1)

    def about(self, exact: bool | None, layers: int) -> str:
        """A clause for `MoELayer.reasons`. exact: as `Nvlink` was told."""
        if exact is not None:
            return "; rows as many as there are" if exact else "; room for all rows that could come"
        tokens = min(-(-SPARED // self.by_token), self.many_tokens(layers))
        shared = f", with {layers} layers" if layers > 1 else ""
        return f"; a backward keeps as many rows as there are from {tokens} tokens a rank on{shared}"


def row_capacity_for(shape: Shape, max_tokens: int) -> int:
    """The number of rows to allocate for at most `max_tokens` tokens of every rank.

    It is the capacity of the symmetric heap, halved as long as that is enough. So there are few sizes, and
    torch's allocator finds freed memory of the same size.

    Example: if the heap is for 16384 tokens and a call has at most 5000, there are rows for 8192.
    """
    tokens = shape.max_tokens
    while tokens % 2 == 0 and tokens // 2 >= max_tokens:
        tokens //= 2
    return shape.row_capacity // shape.max_tokens * tokens
