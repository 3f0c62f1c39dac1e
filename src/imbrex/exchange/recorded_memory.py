"""Memory of a recorded call: all that lies between its tokens and its result, in one or two pieces.

Every tensor has a fixed place in a piece. So the address of the piece stands for all addresses in it, by
which a record of launches is found again (`imbrex.exchange.recorded`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from imbrex.exchange.nvlink_fit import DTYPE
from imbrex.kernels.exchange.groups import RowGroups
from imbrex.kernels.exchange.lease import StagedMemory, counters_of
from imbrex.kernels.ffn.glue import COUNTERS, hit_words
from imbrex.kernels.ffn.slopes import parts_of_weights
from imbrex.kernels.routing.routed import Routed, Sizes

ALIGNED = 256
"""Bytes of which every place begins at a multiple."""


class Place(NamedTuple):
    """The place of a tensor. piece: the index of its piece. at: its first byte there."""

    piece: int
    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, pieces: Sequence[Tensor]) -> Tensor:
        """The tensor, by as few views as possible: each takes the host as long as an allocation."""
        piece = pieces[self.piece]
        strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        values = piece if self.dtype == piece.dtype else piece.view(self.dtype)
        return values.as_strided(self.shape, strides, self.at // self.dtype.itemsize)


class Memory(NamedTuple):
    """Places of all tensors between dispatch and combine.

    words: the routing. rows, weights: those that arrive. counts, plan, hits: of rows by expert, for the
        experts' kernels. gate_up: what a backward needs of the experts, else empty. act, out: what the
        experts write. token, there, own: of rows that come beside a product, `token_LR`, `there_LC` and
        `own_e2` of a `Staged`, else empty. nbytes: the size of every piece. tokens: tokens of a rank, for
        which the routing has room.
    """

    words: Place
    rows: Place
    weights: Place
    counts: Place
    plan: Place
    hits: Place
    gate_up: Place
    act: Place
    out: Place
    token: Place
    there: Place
    own: Place
    nbytes: tuple[int, ...]
    tokens: int


class Scratch(NamedTuple):
    """Places of the tensors of a backward. d_out, d_rows: gradients of the experts' result and of the rows;
    one place, unless weights' gradients are computed last. act, parts, d_weights: what the experts write
    besides. token, there: as in `Memory`. nbytes: the size of the piece."""

    d_out: Place
    d_rows: Place
    act: Place
    parts: Place
    d_weights: Place
    token: Place
    there: Place
    nbytes: int


class Places(NamedTuple):
    """Where a forward that is recorded writes. gate_up_RG: `None` if it is not kept. staged, own_e2: of rows
    that come beside a product."""

    routed: Routed
    rows_RD: Tensor
    groups: RowGroups
    gate_up_RG: Tensor | None
    act_RF: Tensor
    out_RD: Tensor
    staged: StagedMemory
    own_e2: Tensor

    @classmethod
    def of(cls, memory: Memory, pieces: Sequence[Tensor], sizes: Sizes) -> Places:
        words, rows_RD, *groups, gate_up_RG, act_RF, out_RD = (place.of(pieces) for place in memory[:9])
        gate_up_RG = gate_up_RG if len(gate_up_RG) else None
        routed, own_e2 = Routed.of_words(words, sizes), memory.own.of(pieces)
        staged = staged_memory(memory, pieces)
        return cls(routed, rows_RD, RowGroups(*groups), gate_up_RG, act_RF, out_RD, staged, own_e2)


class Between(NamedTuple):
    """Where a backward that is recorded writes what lies between: as in `Scratch`. staged: `token` and
    `there`, or `None` where rows of dy come before their product."""

    d_out_RD: Tensor
    d_rows_RD: Tensor
    act_RF: Tensor
    parts_PR: Tensor
    d_weights_R: Tensor
    staged: StagedMemory | None

    @classmethod
    def of(cls, scratch: Scratch, piece: Tensor) -> Between:
        d_out, d_rows, act, parts, d_weights = (place.of([piece]) for place in scratch[:5])
        return cls(d_out, d_rows, act, parts, d_weights, staged_memory(scratch, [piece]))


def new_piece(nbytes: int, device: torch.device) -> Tensor:
    """Allocate a piece of memory: with a caching allocator mostly that of the last call, or of the layer
    before."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def new_gradient(weight: Tensor) -> Tensor:
    """Allocate a weight's gradient: with a caching allocator mostly in the place of the last step's."""
    return torch.empty_like(weight)


def can_be_added(added_TD: Tensor, x_TD: Tensor) -> bool:
    """Whether the kernel that sums can add `added_TD` as it is."""
    return (
        added_TD.shape == x_TD.shape
        and added_TD.dtype == x_TD.dtype
        and added_TD.device == x_TD.device
        and added_TD.is_contiguous()
    )


def memory_of(
    sizes: Sizes,
    tokens: int,
    rows: int,
    room: int,
    weights: tuple[int, int, int],
    *,
    keep: bool,
    beside: bool = False,
) -> Memory:
    """Memory for at most `tokens` tokens of a rank. rows: rows that the dispatch writes. room: rows that the
    experts compute at most. weights: e, D and F. keep: a backward follows, which needs all up to gate and up;
    the others have a piece of their own then. beside: rows come beside a product."""
    (slots, width, inner), movers = weights, movers_of(room if beside else 0)
    parts: list[tuple[torch.dtype, tuple[int, ...]]] = [
        (torch.int32, (tokens + sizes.more_rows, sizes.columns)),
        (DTYPE, (rows, width)),
        (torch.float32, (room,)),
        (torch.int64, (slots,)),
        (torch.int32, (COUNTERS + slots,)),
        (torch.int32, (hit_words(slots),)),
        (DTYPE, (room if keep else 0, 2 * inner)),
        (DTYPE, (room, inner)),
        (DTYPE, (room, width)),
        *movers,
        (torch.int32, (slots if beside else 0, 2)),
    ]
    first = len(parts) - 5 * keep
    places, nbytes = places_of(parts[:first], 0)
    others, more = places_of(parts[first:], 1)
    return Memory(*places, *others, nbytes=(nbytes, more)[: 1 + keep], tokens=tokens)


def scratch_of(memory: Memory, down_eDF: Tensor, *, home: bool) -> Scratch:
    """Memory for the backward of a forward with `memory`. home: the gradients of weights are computed last,
    beside sums that go home."""
    (room, inner), width = memory.act.shape, memory.out.shape[1]
    parts = parts_of_weights(room, down_eDF)
    rows, floats = (DTYPE, (room, width)), ((torch.float32, (parts, room)), (torch.float32, (room,)))
    tensors = [rows, (DTYPE, (room, inner)), *floats, *movers_of(room if home else 0), *[rows] * home]
    (d_out, *others), nbytes = places_of(tensors, 0)
    d_rows = others.pop() if home else d_out
    return Scratch(d_out, d_rows, *others, nbytes=nbytes)


def movers_of(room: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and sizes of `token` and `there` for so many rows."""
    return [(torch.int32, (room,)), (torch.int32, (counters_of(room),))]


def places_of(tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]], piece: int) -> tuple[list[Place], int]:
    """Places of tensors behind one another, and their bytes."""
    places, nbytes = [], 0
    for dtype, shape in tensors:
        places.append(Place(piece, nbytes, dtype, shape))
        nbytes += -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
    return places, nbytes


def staged_memory(places: Memory | Scratch, pieces: Sequence[Tensor]) -> StagedMemory:
    """The memory of rows that come beside a product."""
    return StagedMemory(places.token.of(pieces)[None], places.there.of(pieces)[None])


def parts_of(memory: Memory, piece: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Words, rows, weights, plan and gate_up, in the piece that is kept for a backward."""
    rows_RD = memory.rows.of([piece])[: memory.gate_up.shape[0]]
    words, weights_R, plan, gate_up_RG = (
        place.of([piece]) for place in (memory.words, memory.weights, memory.plan, memory.gate_up)
    )
    return words, rows_RD, weights_R, plan, gate_up_RG
