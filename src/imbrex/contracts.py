"""Everything that passes between the rooms: values, and the protocols of the pieces a user can replace.

Shape letters: T tokens of this rank, K top-k, N rows sent, M rows received, P = T + M rows in the pool,
R expert-major rows, D model width, F expert width, E experts, e local slots, S slots, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

VERSION = 1
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The experts that every token wants, and their weights.

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

    def keep(self, kept_TK: Tensor | None) -> Routing:
        """This routing with only those of its choices that are in `kept_TK` too; `None`: all of them."""
        if kept_TK is None:
            return self
        return replace(self, kept_TK=kept_TK if self.kept_TK is None else self.kept_TK & kept_TK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where experts live: slot `s` holds expert `slots[s]` (`-1`: a spare), and expert-parallel rank `r`
    owns the slots `rank_offsets[r]:rank_offsets[r + 1]`. Build one through `imbrex.placement`, which checks
    that every expert has a slot and that replicas never share a rank."""

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
        experts = [s for s in self.slots if s >= 0]
        return len(experts) > len(set(experts))

    def local(self, rank: int) -> tuple[int, ...]:
        """Experts in the slots of expert-parallel rank `rank`."""
        return self.slots[self.rank_offsets[rank] : self.rank_offsets[rank + 1]]


Split = Callable[[Tensor, Placement], Tensor]
"""Which replica takes which choice: counts int64 [W, E] to int64 [W, S], summing to the counts per expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The placement, this rank's part of it and the layout of rows: what all plans of an exchange share.

    rows_per_slot: from the tokens of the group to the rows that every slot is padded to; `None`: as needed.
    """

    placement: Placement
    rank: int
    tensor_parallel: int
    hidden_size: int
    top_k: int
    split: Split
    alignment: int
    rows_per_slot: Callable[[int], int] | None = None

    @property
    def local_slots(self) -> range:
        expert_rank = self.rank // self.tensor_parallel
        return range(*self.placement.rank_offsets[expert_rank : expert_rank + 2])

    @property
    def world_size(self) -> int:
        return self.placement.num_ranks * self.tensor_parallel

    @property
    def most_rows(self) -> int:
        """Most rows that one token can have on this rank."""
        return min(self.top_k, len(self.local_slots))


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The rows that cross, seen from one rank. Those that stay on it lie where they are and are not counted.

    sent_tokens_N: int64; token of every row that leaves, by destination rank, then token.
    splits_2W: int64 on the host; rows sent to every rank, and rows received from every rank.
    hops: what a transport that passes rows on knows of its steps besides, in its own layout.
    """

    sent_tokens_N: Tensor
    splits_2W: Tensor
    hops: tuple[Tensor, ...] = ()


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
    """Everything that `combine` and the backward need of a dispatch; a compiled graph can hold it.

    weights_R: float32; the routing weight of every row, 0 for padding. Differentiable.
    state: what the dispatcher that made it knows of the rows; its alone.
    num_tokens: T.
    maker: the key of that dispatcher; 0 for rows that no exchange brought.
    promised: all ranks promised in that dispatch to combine rows that fit, so they need not meet again.
    """

    weights_R: Tensor
    state: tuple[Tensor, ...]
    num_tokens: int
    maker: int = 0
    promised: bool = False


class RowForm(Enum):
    """The form in which rows reach the experts."""

    ROWS = "rows"
    """Expert-major, in the dtype of the tokens: every dispatch can give them."""
    FP8 = "fp8"
    """Expert-major, as they crossed: float8_e4m3fn, with a scale for every 128 values."""
    INDEXED = "indexed"
    """The tokens themselves, and the token of every row."""
    UNDER_WAY = "under way"
    """Expert-major, in memory that the kernel of the experts' first product fills."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """Rows ready for the local experts.

    rows_RD: expert-major, in local slot order, within a slot by source rank and token. Padding rows are zero.
    counts_e: int64; rows of every local slot, padding included. Rows past their sum are never read.
    handle: give it to `combine`; its `weights_R` are for experts that apply the weights themselves.
    form: which of the forms that were asked for this is.
    scales_RB: of `RowForm.FP8` alone, float32 [R, D/128], the factor of every 128 values of `rows_RD`.
    index_R: of `RowForm.INDEXED` alone: `rows_RD` are the tokens [T, D], and row r is token `index_R[r]`
        (int64).
    beside: of `RowForm.UNDER_WAY` kernels' `Staged`; of `RowForm.ROWS` their `Groups`, or `None`.
    leave: experts may give it the product that makes their result: somebody calls it before that is read.
    """

    rows_RD: Tensor
    counts_e: Tensor
    handle: Handle
    form: RowForm = RowForm.ROWS
    scales_RB: Tensor | None = None
    index_R: Tensor | None = None
    beside: Any = None
    leave: Callable[[Any], None] | None = None


@runtime_checkable
class Codec(Protocol):
    """Writes a row as a fixed number of bytes, with a stated bound on the error.

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


class Crossing(NamedTuple, Generic[Value]):
    """Rows on their way. What crosses has been written when a `Crossing` is made.

    move: begins it, in the same order on all ranks; gives `None` where nothing is left to wait for.
    read: takes what the `finish` of that gave, or `None`, once, and gives what the crossing was for.
    Tensors that a crossing was made of stay as they are until it has been read.
    """

    move: Callable[[], Pending | None]
    read: Callable[[Any], Value]


class Arrived(NamedTuple):
    """The rows that the crossing of a dispatch gives; see `Dispatched` and `Handle`. beside: scales of fp8
    rows; the index of indexed ones; what brings those under way; of plain rows `Groups` or `None`."""

    rows_RD: Tensor
    weights_R: Tensor
    counts_e: Tensor
    state: list[Tensor]
    beside: Any = None


Addend = Callable[[], Tensor | None]
"""Gives what is added to the sums of a combine, [T, D], or `None`; asked once, when it is needed."""
Add = Callable[[Sequence[tuple[Tensor, Tensor]], int], Tensor]
"""Sums encoded rows by target row: (rows, targets) in order, and how many targets there are."""


class Roles(NamedTuple):
    """How many blocks of fused kernels make tokens ready for peers (stage), begin with sums of dx, bring
    rows, sum others' tokens beside down (first). dy: 0 where it moves before its product. `None`: default."""

    stage: int | None = None
    sums: int | None = None
    rows: int | None = None
    dy: int | None = None
    first: int | None = None


class Listener(Protocol):
    """Hears what happens; see `imbrex.observe.Observer`."""

    enabled: bool

    def span(self, name: str, **where: int) -> AbstractContextManager[Any]: ...

    def count(self, name: str, value: Any, **where: int) -> None: ...


class Dispatcher(Protocol):
    """Takes tokens to the ranks of their experts and sums the results at home, forward and backward.

    A strategy asks it for the four crossings, moves them, and reads them; `serial` has one of each, others
    one a chunk. Ranks ask for them in the same order.

    key: by which operators find it, and handles name it. family: itself, and the dispatcher of the calls that
    it leaves to another. roles: of its fused kernels, as they were tuned. promise: that this rank combines
    rows that fit, of the next dispatch; promised: of all ranks, in the last. room_for_all: a dispatch has as
    many rows as there are choices, where there is room to spare.
    """

    key: int
    roles: Roles
    promise: bool
    promised: bool
    room_for_all: bool
    observer: Listener
    layer: int
    dtypes: Sequence[torch.dtype]
    """Dtypes of the experts' rows that `combine` sums."""

    @property
    def geometry(self) -> Geometry: ...

    @property
    def counts_on_device(self) -> bool: ...

    @property
    def family(self) -> Sequence[Dispatcher]: ...

    def take_agreement(self, number: int, node_of_W: Sequence[int]) -> None:
        """Take what ranks agreed upon when they made it: this exchange's number, and every rank's node."""

    def relocate(self, geometry: Geometry) -> None:
        """Take another placement or split of replicas, from the next dispatch on."""

    def for_call(self, x_TD: Tensor, routing: Routing) -> Dispatcher:
        """The dispatcher of the family that serves this call."""
        ...

    def run_whole(
        self, x_TD: Tensor, routing: Routing, experts: Experts, addend: Callable[[], Tensor] | None
    ) -> Tensor | None:
        """Run the call at once, if this dispatcher can: y_TD, with the bits of the single steps. Else `None`,
        and the caller makes the steps; only `addend` may have run."""

    def beside(self, chunks: int, *, in_turn: bool = False) -> Dispatcher:
        """The dispatcher for crossings that are under way while experts compute, in so many chunks. in_turn:
        no row leaves with the plan, before its move; for callers who time the two."""
        ...

    def fusing(self, roles: Roles | None = None, inner: int = 0) -> Dispatcher:
        """The dispatcher whose rows are under way where experts ask for that, and whose dx goes home beside
        the weights' gradients, unless `why_not_form` forbids it. All ranks or none; inner: F, or 0."""
        ...

    def why_not_form(self, form: RowForm) -> str | None:
        """Why rows of this exchange never come in `form`, or `None`."""

    def form_of(self, forms: Sequence[RowForm], x_TD: Tensor, weights_TK: Tensor) -> RowForm:
        """The first of `forms` that this call can have."""
        ...

    def why_not_tokens(self, x: Tensor) -> str | None:
        """Why tokens [..., D] of this width, dtype and device cannot be dispatched, or `None`."""
        ...

    def agree_on_rows(self, problem: str | None, dtype: torch.dtype) -> None:
        """ValueError on every rank where one rank's rows cannot be combined, or have another dtype. Where
        hosts would wait for GPUs, at the first combine only. problem, dtype: of this rank's rows."""

    def check_in(self, x_TD: Tensor, routing: Routing, *, before: int = 0) -> None:
        """Tell every rank whether this input can be dispatched: ValueError on all where one's cannot.
        before: parts that `agree` comes for next; what is fine it may tell by itself."""

    def agree(self, parts: Sequence[tuple[Tensor, Routing]]) -> Sequence[Any]:
        """Plans of several dispatches: what ranks must know before rows move. Checks as `check_in` does."""
        ...

    def dispatch(self, plan: Any, x_TD: Tensor, weights_TK: Tensor, form: RowForm = ...) -> Crossing[Arrived]:
        """Tokens to the ranks of their experts. form: as `form_of` gave it."""
        ...

    def combine(
        self,
        rows_RD: Tensor,
        weights_R: Tensor | None,
        state: Sequence[Tensor],
        num_tokens: int,
        addend: Addend | None = None,
        out_TD: Tensor | None = None,
    ) -> Crossing[Tensor]:
        """The experts' rows, summed, back home: outputs [T, D], in `out_TD` where there is one. Without
        weights the rows were weighted before."""
        ...

    def combine_backward(
        self, d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> Crossing[tuple[Tensor, Tensor]]:
        """Gradients of the rows and of their weights. Without rows these were weighted before, and the
        gradient of the weights is empty."""
        ...

    def dispatch_backward(
        self,
        d_rows_RD: Tensor,
        d_weights_R: Tensor,
        state: Sequence[Tensor],
        num_tokens: int,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> Crossing[tuple[Tensor, Tensor]]:
        """Gradients of the tokens and of their weights, in `out` where there is one."""
        ...

    def combine_beside(self, left: Sequence[Any], *args: Any, **kwargs: Any) -> Crossing[Tensor]:
        """Does `combine`; what experts left (`Dispatched.leave`) is called before, or computed beside it."""
        ...

    def combine_backward_beside(self, *args: Any, **kwargs: Any) -> Crossing[tuple[Tensor, Any]]:
        """Gradients of rows that were weighted, and what brings them; `None` if they are there."""
        ...

    def dispatch_backward_beside(self, left: Any, *args: Any, **kwargs: Any) -> Crossing[Any]:
        """Does `dispatch_backward`; gradients that the `Deferral` `left` holds may be computed beside it."""
        ...

    def redispatch(self, x_TD: Tensor, state: Sequence[Tensor], num_rows: int) -> Tensor:
        """The rows of an earlier dispatch, moved once more."""
        ...

    def fake_state(self, ids_TK: Tensor, rows: Any, size: Callable[[], Any]) -> list[Tensor]:
        """The shapes of a handle's state, for the compiler. `size` makes sizes that only the run knows."""
        ...

    def count_into(self, tally_WS: Tensor | None) -> None:
        """Add choices by rank and slot to int32 [W, S] from now on, if `counts_on_device`; `None` ends it."""

    def check(self, *, synchronize: bool = False) -> None:
        """Raise where a call has failed on the device; see `imbrex.Exchange.check`."""

    def close(self) -> None:
        """Free what it holds; operators do not find it any more."""


class Backend(Protocol):
    """The way in which ranks reach each other: a `Transport`, which moves bytes, or the kernels of `Nvlink`.

    replicated: the tokens are the same on every rank. device: where the rows must lie.
    """

    name: str
    replicated: bool
    device: torch.device

    def exchange_counts(self, message: Tensor) -> Tensor:
        """int64 [L] of this rank to int64 [W, L] of all ranks, on the host."""
        ...


class Transport(Backend, Protocol):
    """Moves opaque encoded rows between ranks. Knows neither codecs nor weights.
    `imbrex.transport.BytesTransport` has all of it but the moves.

    replicated: the tokens are the same on every rank; nothing is moved, and `all_reduce` sums the outputs.
    broadcasts: every token goes to every rank, wanted there or not; the plan is made accordingly.
    relays: other ranks pass rows on, and `plan` asks for more than the rows between ranks.
    sums_on_the_way: the rows of a token may come back as their sum.
    sums_encoded: there is `sum_encoded`, for replicated tokens whose sums cross encoded.
    ranks_per_node: neighbouring ranks of a node, where the transport knows it.
    """

    broadcasts: bool
    relays: bool
    sums_encoded: bool

    @property
    def sums_on_the_way(self) -> bool: ...

    @property
    def ranks_per_node(self) -> int | None: ...

    def plan(self, wanted: Sequence[Tensor], rows: Sequence[Tensor] | None) -> list[Traffic]:
        """The traffic of several dispatches at once. Collective unless `rows` are known.

        wanted: the ranks that want this rank's tokens, bool [T, W]; its own column is not looked at.
        rows: what every rank sends to every other, int64 [W, W] on the host with a diagonal of zeros.
        """
        ...

    def fake_hops(self, ids_TK: Tensor, size: Callable[[], Any]) -> list[Tensor]:
        """The shapes of `Traffic.hops`, for the compiler."""
        ...

    def begin_move(self, encoded_TB: Tensor, traffic: Traffic) -> Pending:
        """uint8 [T, B], a row per token, to uint8 [M, B], by source rank, then token."""
        ...

    def begin_move_back(self, encoded_MB: Tensor, traffic: Traffic, add: Add | None = None) -> Pending:
        """The way back: uint8 [M, B], a row per row received, to uint8 [N, B], the rows that `home` lists.
        add: how to sum encoded rows; given to those who `sums_on_the_way`, and to nobody else."""
        ...

    def home(self, traffic: Traffic) -> tuple[Tensor, list[int]]:
        """The token of every row that comes back, and how many come under which rank."""
        ...

    def rows_sent(self, traffic: Traffic, *, back: bool) -> Tensor:
        """int64 [W] on the host: rows that this rank sends to every other, with those that it passes on."""
        ...

    def all_reduce(self, partial_TD: Tensor) -> Tensor:
        """Sum over ranks; only where `replicated`."""
        ...

    def sum_encoded(
        self, partial_TD: Tensor, encode: Callable[[Tensor], Tensor], decode: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Sum over ranks of rows that cross encoded, float32 [T, D]; only where `sums_encoded`."""
        ...


class Experts(Protocol):
    """Computes the rows of this rank's slots; does not communicate.

    applies_weights: the rows returned are already times `handle.weights_R`.
    forms: the forms of rows that a call takes now, the best first; `RowForm.ROWS` is one of them. Those after
        it are for strategies that ask for them.
    """

    applies_weights: bool

    @property
    def forms(self) -> Sequence[RowForm]: ...

    def __call__(self, dispatched: Dispatched) -> Tensor: ...


class RowExchange(Protocol):
    """An exchange as a strategy sees it; see `imbrex.Exchange`.

    herald: tells all ranks of an input that cannot be dispatched, and raises; set by a strategy whose ranks
        do not meet in the exchange of counts.
    """

    herald: Callable[[Tensor, Routing], None] | None

    @property
    def dispatcher(self) -> Dispatcher: ...

    @property
    def transport(self) -> Backend: ...

    @property
    def geometry(self) -> Geometry: ...

    @property
    def wire(self) -> Wire: ...

    @property
    def world_size(self) -> int: ...

    @property
    def observer(self) -> Listener: ...

    @property
    def layer(self) -> int: ...

    def dispatch(
        self, x_TD: Tensor, routing: Routing, *, forms: Sequence[RowForm] = ..., promise: bool = ...
    ) -> Dispatched: ...

    def combine(
        self,
        rows_RD: Tensor,
        handle: Handle,
        addend: Tensor | None = None,
        *,
        weighted: bool = False,
        again: Any = None,
    ) -> Tensor: ...

    def dispatching_again(self, x_TD: Tensor, dispatched: Dispatched) -> AbstractContextManager[Any]: ...

    def check_rows(self, rows_RD: Tensor, handle: Handle, *, together: bool) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """The result of a strategy: outputs [T, D] and, where it dropped choices, those of the routing that it
    kept (bool [T, K]); given this mask, it returns the same outputs again."""

    y_TD: Tensor
    kept_TK: Tensor | None = None


class Strategy(Protocol):
    """Decides when the steps of a layer run. The numbers are those of `serial`."""

    name: str

    def reason(self, exchange: RowExchange) -> str:
        """Why this one, and what it does over the exchange's transport."""
        ...

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        exchange: RowExchange,
        experts: Experts,
        addend: Callable[[], Tensor] | None,
    ) -> Output:
        """Dispatch, compute, combine. addend: computes what is added to the outputs [T, D], or `None`."""
        ...
