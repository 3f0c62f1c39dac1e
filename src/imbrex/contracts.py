"""What passes between the rooms: values, and the protocols of the pieces a user can replace.

Shape letters: T tokens of this rank, K top-k, N rows sent, M rows received, P = T + M rows in the pool,
R expert-major rows, D model width, F expert width, E experts, e local slots, S slots, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Which experts every token wants.

    ids_TK: int64, global logical experts, an expert at most once per token; `-1` drops the choice.
    weights_TK: float32, differentiable; the weight of a dropped choice is ignored.
    losses: unweighted auxiliary losses by name, float32 scalars over the global batch, differentiable.
    kept_TK: bool, the choices left after dropping on purpose; `None` means that none was dropped.
        The router given this mask again returns the same routing to the bit.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    kept_TK: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where experts live: slot `s` holds expert `slots[s]` (`-1`: a spare), and expert-parallel rank `r`
    owns the slots `rank_offsets[r]:rank_offsets[r + 1]`. Build one through `imbrex.placement`, which checks
    that every expert has a slot and that replicas never share a rank.
    """

    slots: tuple[int, ...]
    rank_offsets: tuple[int, ...]
    num_experts: int

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    @property
    def num_ranks(self) -> int:
        return len(self.rank_offsets) - 1

    @property
    def has_replicas(self) -> bool:
        held = [s for s in self.slots if s >= 0]
        return len(held) > len(set(held))

    def local(self, rank: int) -> tuple[int, ...]:
        """Experts in the slots of expert-parallel rank `rank`."""
        return self.slots[self.rank_offsets[rank] : self.rank_offsets[rank + 1]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Which rows cross, seen from one rank. The rows of the own rank stay in place and are not counted.

    sent_tokens_N: int64; token of every row that leaves, by destination rank, then token.
    splits_2W: int64 on the host; rows sent to every rank, and rows received from every rank. For transports
        that relay more rows follow: see `transport.relay`.
    relay_XM: uint8, for transports that relay: which ranks of this node want the tokens it passes on.
    """

    sent_tokens_N: Tensor
    splits_2W: Tensor
    relay_XM: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The position of every row before any data moves. Pure index arithmetic; see `imbrex.exchange.plan`.

    slot_TK, position_TK: int64; the slot that takes a choice and its row among the expert-major rows of the
        ranks that own the slot; `-1` where the choice was dropped.
    counts_e: int64; rows of every local slot, padding included. num_rows: R, their sum.
    """

    slot_TK: Tensor
    position_TK: Tensor
    traffic: Traffic
    counts_e: Tensor
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Handle:
    """What `combine` and the backward need of a dispatch; a compiled graph can hold it.

    weights_R: float32; the routing weight of every row, 0 for padding. Differentiable.
    state: what the crossings that made it know of the rows; theirs alone.
    num_tokens: T.
    """

    weights_R: Tensor
    state: tuple[Tensor, ...]
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """Rows ready for the local experts.

    rows_RD: expert-major, in local slot order, within a slot by source rank and token. Padding rows are zero.
    counts_e: int64; rows of every local slot, padding included. Rows past their sum are never read.
    handle: give it to `combine`; its `weights_R` are for experts that apply the weights themselves.
    scales_RB: only for who asked for rows in fp8: `rows_RD` is float8_e4m3fn, and these are float32
        [R, D/128]; a value stands for itself times the scale of its 128.
    index_R: only for who asked for tokens in place: `rows_RD` are the tokens [T, D], and row r is token
        `index_R[r]` (int64).
    """

    rows_RD: Tensor
    counts_e: Tensor
    handle: Handle
    scales_RB: Tensor | None = None
    index_R: Tensor | None = None


@runtime_checkable
class Codec(Protocol):
    """How a row is written on the wire: a fixed number of bytes, a stated bound on the error.

    `error_bound(amax)` bounds |decode(encode(row)) - row| per value, for a row whose largest magnitude is
    `amax`. Encoding must be deterministic. Neither direction is differentiated: gradients pass straight
    through and are themselves encoded where they cross the wire.
    """

    name: str

    def nbytes(self, width: int, dtype: torch.dtype) -> int:
        """Bytes of one encoded row of `width` values that are `dtype` outside."""
        ...

    def encode(self, rows_ND: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows (`dtype` or float32) to uint8 [N, nbytes(D, dtype)]."""
        ...

    def decode(self, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """uint8 [N, nbytes] to rows [N, D] of `dtype`."""
        ...

    def error_bound(self, amax: float, dtype: torch.dtype) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """The codecs of the four crossings: rows out and partial sums back, forward and backward."""

    dispatch: Codec
    combine: Codec
    dispatch_backward: Codec
    combine_backward: Codec


class Pending(Protocol):
    """A move under way; `finish` waits for it, once, and returns the rows."""

    def finish(self) -> Tensor: ...


class Transport(Protocol):
    """How opaque encoded rows move between ranks. Knows neither codecs nor weights.

    replicated: the tokens are the same on every rank; nothing is moved, and `all_reduce` sums the outputs.
    broadcasts: every token goes to every rank, wanted there or not; the plan is made accordingly.
    device: where the rows must lie.
    """

    name: str
    replicated: bool
    broadcasts: bool
    device: torch.device

    def exchange_counts(self, message: Tensor) -> Tensor:
        """int64 [L] of this rank to int64 [W, L] of all ranks, on the host."""
        ...

    def begin_move(self, encoded_TB: Tensor, traffic: Traffic) -> Pending:
        """uint8 [T, B], a row per token, to uint8 [M, B], by source rank, then token."""
        ...

    def begin_move_back(self, encoded_MB: Tensor, traffic: Traffic) -> Pending:
        """The way back: uint8 [M, B], a row per row received, to uint8 [N, B], a row per row sent."""
        ...

    def all_reduce(self, partial_TD: Tensor) -> Tensor:
        """Sum over ranks; only where `replicated`."""
        ...


class Experts(Protocol):
    """The local experts. `applies_weights`: the rows returned are already times `handle.weights_R`.

    May have `takes_fp8_rows`, a bool: whether this call may get rows in fp8, with `scales_RB`; and
    `takes_tokens_in_place`, another: tokens, with `index_R`.
    """

    applies_weights: bool

    def __call__(self, dispatched: Dispatched) -> Tensor: ...


class Strategy(Protocol):
    """When the steps of a layer run. Same numbers as `serial`."""

    name: str

    def run(self, x_TD: Tensor, routing: Routing, exchange, experts: Experts, addend) -> Tensor:
        """`addend`: a function of no arguments that computes what is added to the output, or `None`."""
        ...


Split = Callable[[Tensor, Placement], Tensor]
"""Which replica takes which choice: counts int64 [W, E] to int64 [W, S], summing to the counts per expert."""
