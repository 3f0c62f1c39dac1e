"""Rows that cross: codecs, moves under way, and the transports that carry bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from imbrex.contracts.values import Traffic

Value = TypeVar("Value")


@runtime_checkable
class Codec(Protocol):
    """Writes a row as a fixed number of bytes, with a stated bound on the error.

    `error_bound(amax)` bounds |decode(encode(row)) - row| per value, for a row whose largest magnitude is
    `amax`. Encoding must be deterministic. Neither direction is differentiated: gradients pass straight
    through, and are encoded themselves when they cross.
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
    """A transfer that has started. Call `finish` once: it waits, and returns the rows."""

    def finish(self) -> Tensor: ...


class Crossing(NamedTuple, Generic[Value]):
    """Rows on their way between ranks, encoded already when a `Crossing` is made.

    move: starts the transfer; `None` if there is nothing to wait for. All ranks move in the same order.
    read: takes the result of `Pending.finish`, or `None`, and returns what the crossing is for. Call it once.
    The tensors that a crossing was made from must not change until it is read.
    """

    move: Callable[[], Pending | None]
    read: Callable[[Any], Value]


class Arrived(NamedTuple):
    """The result of a dispatch's crossing; see `Dispatched` and `Handle`. beside: the scales of fp8 rows, the
    index of indexed rows, the `Staged` of rows under way, `Groups` or `None` for plain rows."""

    rows_RD: Tensor
    weights_R: Tensor
    counts_e: Tensor
    state: list[Tensor]
    beside: Any = None


Addend = Callable[[], Tensor | None]
"""Returns what a combine adds to its sums, [T, D] or `None`. Called once, when the sums are made."""


Add = Callable[[Sequence[tuple[Tensor, Tensor]], int], Tensor]
"""Sums encoded rows by target row. Takes pairs (rows, targets) in order, and the number of targets."""


class Backend(Protocol):
    """The way ranks reach each other: a `Transport`, which moves bytes, or the kernels of `Nvlink`.

    replicated: whether the tokens are the same on every rank. device: where the rows must be.
    """

    name: str
    replicated: bool
    device: torch.device

    def exchange_counts(self, message: Tensor) -> Tensor:
        """Gather int64 [L] of every rank: int64 [W, L] on the host."""
        ...


class Transport(Backend, Protocol):
    """Moves opaque encoded rows between ranks. Knows neither codecs nor weights.
    `imbrex.transport.BytesTransport` implements all of it but the moves.

    replicated: the tokens are the same on every rank; nothing is moved, and `all_reduce` sums the outputs.
    broadcasts: every token goes to every rank, whether or not an expert there wants it.
    relays: other ranks pass rows on, so `plan` needs more than the numbers of rows between ranks.
    sums_on_the_way: the rows of a token may come back as their sum.
    sums_encoded: `sum_encoded` works: sums of replicated tokens can cross encoded.
    ranks_per_node: how many neighbouring ranks share a node, if the transport knows.
    """

    broadcasts: bool
    relays: bool
    sums_encoded: bool

    @property
    def sums_on_the_way(self) -> bool: ...

    @property
    def ranks_per_node(self) -> int | None: ...

    def plan(self, destinations: Sequence[Tensor], rows: Sequence[Tensor] | None) -> list[Traffic]:
        """The traffic of several dispatches at once. Collective, unless `rows` is given.

        destinations: for each dispatch, the ranks that each token goes to, bool [T, W]; the column of this
            rank is ignored.
        rows: the rows that every rank sends to every other, int64 [W, W] on the host, zeros on the diagonal.
        """
        ...

    def fake_hops(self, ids_TK: Tensor, size: Callable[[], Any]) -> list[Tensor]:
        """`Traffic.hops` as the compiler sees it: shapes only."""
        ...

    def begin_move(self, encoded_TB: Tensor, traffic: Traffic) -> Pending:
        """Send uint8 [T, B], a row per token. They arrive as uint8 [M, B], by source rank, then token."""
        ...

    def begin_move_back(self, encoded_MB: Tensor, traffic: Traffic, add: Add | None = None) -> Pending:
        """Send uint8 [M, B], a row per row received, back. They arrive as uint8 [N, B], as `home` lists them.
        add: how to sum encoded rows; passed only if `sums_on_the_way`."""
        ...

    def home(self, traffic: Traffic) -> tuple[Tensor, list[int]]:
        """The token of every row that comes back, and the number of rows from each rank."""
        ...

    def rows_sent(self, traffic: Traffic, *, back: bool) -> Tensor:
        """int64 [W] on the host: rows that this rank sends to every other, relayed rows included."""
        ...

    def all_reduce(self, partial_TD: Tensor) -> Tensor:
        """Sum over ranks; only where `replicated`."""
        ...

    def sum_encoded(
        self, partial_TD: Tensor, encode: Callable[[Tensor], Tensor], decode: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Sum over ranks of rows that cross encoded, float32 [T, D]; only where `sums_encoded`."""
        ...
