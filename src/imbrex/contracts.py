"""Everything that passes between the rooms: values, and protocols of the pieces that a user can replace.

Shape letters: T tokens of this rank, K top-k, N rows sent, M rows received, P = T + M rows in the pool,
R expert-major rows, D model width, F expert width, E experts, e local slots, S slots, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

VERSION = 1
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The experts that every token is sent to, and their weights.

    ids_TK: int64, global logical experts, an expert at most once per token; `-1` drops the choice.
    weights_TK: float32, differentiable; the weight of a dropped choice is ignored.
    losses: unweighted auxiliary losses by name, float32 scalars over the global batch, differentiable.
    kept_TK: bool, the choices that were not dropped on purpose; `None` means that none was dropped.
        Given this mask, the router returns the same routing to the bit.
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
"""The choice of replicas: from choices per expert, int64 [W, E], to choices per slot, int64 [W, S], which sum
to those of the expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The placement, this rank's part of it and the layout of rows: what all plans of an exchange share.

    rows_per_slot: given the number of tokens of the group, the rows that every slot is padded to; `None`: no
        padding beyond `alignment`.
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
    def max_rows_per_token(self) -> int:
        """The most rows that one token can have on this rank."""
        return min(self.top_k, len(self.local_slots))


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The rows that cross between ranks, seen from one rank. Rows that stay on the rank are not counted.

    sent_tokens_N: int64; the token of every row that leaves, by destination rank, then token.
    splits_2W: int64 on the host; rows sent to every rank, and rows received from every rank.
    hops: the further steps of a transport that relays rows, in its own layout.
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
    """Everything that `combine` and the backward need from a dispatch; a compiled graph can hold it.

    weights_R: float32; the routing weight of every row, 0 for padding. Differentiable.
    state: tensors private to the dispatcher that made the handle.
    num_tokens: T.
    maker: the key of that dispatcher; 0 for rows that no exchange brought.
    promised: all ranks promised at the dispatch to combine rows that fit it, so `combine` need not ask them.
    """

    weights_R: Tensor
    state: tuple[Tensor, ...]
    num_tokens: int
    maker: int = 0
    promised: bool = False


class RowForm(Enum):
    """The form in which rows reach the experts."""

    ROWS = "rows"
    """Expert-major, in the dtype of the tokens. Every dispatch can give these."""
    FP8 = "fp8"
    """Expert-major, as they crossed: float8_e4m3fn, with a scale for every 128 values."""
    INDEXED = "indexed"
    """The tokens themselves, and the token of every row."""
    UNDER_WAY = "under way"
    """Expert-major, in memory that the kernel of the experts' first product fills itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """Rows ready for the local experts.

    rows_RD: expert-major, in local slot order, within a slot by source rank and token. Padding rows are zero.
    counts_e: int64; rows of every local slot, padding included. Rows past their sum are never read.
    handle: give it to `combine`; its `weights_R` are for experts that apply the weights themselves.
    form: the form of these rows, one of those that were asked for.
    scales_RB: only with `RowForm.FP8`: float32 [R, D/128], the factor of every 128 values of `rows_RD`.
    index_R: only with `RowForm.INDEXED`: int64; `rows_RD` are the tokens [T, D], row r is token `index_R[r]`.
    beside: what kernels need with the rows: `Staged` for `UNDER_WAY`, `Groups` or `None` for `ROWS`.
    leave: experts may give it their last product to run later, before anyone reads the result.
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


class Roles(NamedTuple):
    """Blocks of the fused kernels: how many make tokens ready for peers (`stage`), begin with sums of dx
    (`sums`), bring rows (`rows`), sum others' tokens beside down (`first`). dy: 0 if rows of dy move before
    their product. `None`: the default. No bit depends on them."""

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

    A strategy asks it for the four crossings, moves them, and reads them: `serial` one of each, a schedule in
    chunks one of each for every chunk. All ranks ask for them in the same order.

    key: the number by which operators and handles name it. family: it, and who takes the calls it cannot
    serve. roles: blocks of its fused kernels, as tuned. promise, uncompiled: set before a dispatch, if this
    rank will combine rows that fit it, or goes on as no compiled layer does, which ranks compare.
    promised: whether all ranks did. room_for_all: `rows_RD` has a row for every choice, dropped ones too.
    """

    key: int
    roles: Roles
    promise: bool
    uncompiled: bool
    promised: bool
    room_for_all: bool
    observer: Listener
    layer: int
    dtypes: Sequence[torch.dtype]
    """The dtypes of rows that `combine` can sum."""

    @property
    def geometry(self) -> Geometry: ...

    @property
    def counts_on_device(self) -> bool: ...

    @property
    def family(self) -> Sequence[Dispatcher]: ...

    def take_agreement(self, number: int, node_of_W: Sequence[int]) -> None:
        """Take what ranks agreed on at construction: the number of this exchange, and every rank's node."""

    def relocate(self, geometry: Geometry) -> None:
        """Take another placement or split of replicas, from the next dispatch on."""

    def for_call(self, x_TD: Tensor, routing: Routing) -> Dispatcher:
        """The dispatcher of the family that serves this call."""
        ...

    def run_whole(
        self, x_TD: Tensor, routing: Routing, experts: Experts, addend: Callable[[], Tensor] | None
    ) -> Tensor | None:
        """The whole call at once: y_TD, with the bits of the single steps. `None` if this dispatcher cannot:
        the caller takes the steps, and nothing but `addend` has run."""

    def beside(self, chunks: int, *, in_turn: bool = False) -> Dispatcher:
        """A dispatcher for crossings that run while experts compute, in this many chunks. in_turn: no row
        leaves early, together with the plan; for callers that time plans and moves apart."""
        ...

    def fusing(self, roles: Roles | None = None, inner: int = 0) -> Dispatcher:
        """A dispatcher for fused kernels: rows come `UNDER_WAY` if experts ask for that, and dx goes home
        beside the weights' gradients, unless `why_not_form` forbids it. All ranks or none. inner: F, or 0."""
        ...

    def why_not_form(self, form: RowForm) -> str | None:
        """Why rows of this exchange cannot come in `form`, or `None`."""

    def form_of(self, forms: Sequence[RowForm], x_TD: Tensor, weights_TK: Tensor) -> RowForm:
        """The first of `forms` in which this call can get its rows."""
        ...

    def why_not_tokens(self, x: Tensor) -> str | None:
        """Why tokens [..., D] of this width, dtype and device cannot be dispatched, or `None`."""
        ...

    def agree_on_rows(self, problem: str | None, dtype: torch.dtype) -> None:
        """Raise ValueError on every rank if one rank's rows cannot be combined, or have another dtype. Where
        hosts would wait for GPUs, only at the first combine. problem, dtype: those of this rank's rows."""

    def check_in(self, x_TD: Tensor, routing: Routing, *, before: int = 0) -> None:
        """Tell every rank whether this input can be dispatched; raise ValueError on all if one rank's cannot.
        before: the number of parts that `agree` gets next, whose message may say that all is well."""

    def agree(self, parts: Sequence[tuple[Tensor, Routing]], form: RowForm = ...) -> Sequence[Any]:
        """The plans of several dispatches: what ranks must know before rows move. Checks like `check_in`.
        form: of rows, on this rank."""
        ...

    def dispatch(self, plan: Any, x_TD: Tensor, weights_TK: Tensor, form: RowForm = ...) -> Crossing[Arrived]:
        """Send tokens to the ranks of their experts. form: as in `agree`, the one that `form_of` returned."""
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
        """Send the experts' rows home, summed: outputs [T, D], in `out_TD` if given. weights_R: `None` if
        the rows are weighted already."""
        ...

    def combine_backward(
        self, d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> Crossing[tuple[Tensor, Tensor]]:
        """Send dy to the experts: gradients of the rows and of their weights. rows_RD: `None` if they were
        weighted before; the gradient of the weights is empty then."""
        ...

    def dispatch_backward(
        self,
        d_rows_RD: Tensor,
        d_weights_R: Tensor,
        state: Sequence[Tensor],
        num_tokens: int,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> Crossing[tuple[Tensor, Tensor]]:
        """Send row gradients home: gradients of the tokens and of their weights, in `out` if given."""
        ...

    def combine_beside(self, left: Sequence[Any], *args: Any, **kwargs: Any) -> Crossing[Tensor]:
        """Combine, after or while computing the products that experts left (`Dispatched.leave`)."""
        ...

    def combine_backward_beside(self, *args: Any, **kwargs: Any) -> Crossing[tuple[Tensor, Any]]:
        """Gradients of rows that were weighted before, and what brings them; `None` if they are there."""
        ...

    def dispatch_backward_beside(self, left: Any, *args: Any, **kwargs: Any) -> Crossing[Any]:
        """Run `dispatch_backward`, perhaps while computing the weight gradients in the `Deferral` `left`."""
        ...

    def redispatch(self, x_TD: Tensor, state: Sequence[Tensor], num_rows: int) -> Tensor:
        """Move the rows of an earlier dispatch once more."""
        ...

    def fake_state(self, ids_TK: Tensor, rows: Any, size: Callable[[], Any]) -> list[Tensor]:
        """A handle's state as the compiler sees it, shapes only. size: makes one known only at run time."""
        ...

    def count_into(self, tally_WS: Tensor | None) -> None:
        """Add choices by rank and slot to int32 [W, S] from now on, if `counts_on_device`; `None` ends it."""

    def check(self, *, synchronize: bool = False) -> None:
        """Raise if a call has failed on the device; see `imbrex.Exchange.check`."""

    def close(self) -> None:
        """Free what it holds. Operators can no longer find it."""


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


class Experts(Protocol):
    """Computes the rows of this rank's slots; does not communicate.

    applies_weights: whether it multiplies the rows it returns by `handle.weights_R`.
    forms: the forms of rows that a call accepts now, best first, `RowForm.ROWS` among them. Those after it
        are for strategies that ask for them.
    """

    applies_weights: bool

    def parameters(self) -> Iterable[Tensor]:
        """Parameters, trained or not; a module has this method."""
        ...

    @property
    def forms(self) -> Sequence[RowForm]: ...

    def __call__(self, dispatched: Dispatched) -> Tensor: ...


class RowExchange(Protocol):
    """An exchange as a strategy sees it; see `imbrex.Exchange`.

    herald: tells all ranks that an input cannot be dispatched, and raises. A strategy whose ranks do not meet
        in the exchange of counts sets it.
    """

    group: dist.ProcessGroup | None
    world_size: int
    transport: Backend
    dispatcher: Dispatcher
    geometry: Geometry
    wire: Wire
    layer: int
    herald: Callable[[Tensor, Routing], None] | None

    @property
    def observer(self) -> Listener: ...

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
        redispatch: Any = None,
    ) -> Tensor: ...

    def redispatching(self, x_TD: Tensor, dispatched: Dispatched) -> AbstractContextManager[Any]: ...

    def check_rows(self, rows_RD: Tensor, handle: Handle, *, together: bool) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """The result of a strategy: outputs [T, D] and, if it dropped choices, a mask of those that it kept, bool
    [T, K]. Given this mask, it returns the same outputs again."""

    y_TD: Tensor
    kept_TK: Tensor | None = None


@runtime_checkable
class Strategy(Protocol):
    """Decides when the steps of a layer run. Results are those of `serial`."""

    name: str

    def reason(self, exchange: RowExchange) -> str:
        """Why this strategy was chosen, and what it does over the exchange's transport."""
        ...

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        exchange: RowExchange,
        experts: Experts,
        addend: Callable[[], Tensor] | None,
    ) -> Output:
        """Dispatch, compute, combine. addend: computes what is added to the outputs, [T, D], or `None`."""
        ...
