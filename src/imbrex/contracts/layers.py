"""The parts of a layer: experts, a dispatcher, the exchange around it, and a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.contracts.crossings import Addend, Arrived, Backend, Crossing, Wire
from imbrex.contracts.values import Dispatched, Geometry, Handle, Output, Roles, Routing, RowForm


class Listener(Protocol):
    """Hears what happens; see `imbrex.observe.Observer`."""

    enabled: bool

    def span(self, name: str, **where: int) -> AbstractContextManager[Any]: ...

    def count(self, name: str, value: Any, **where: int) -> None: ...


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


class Dispatcher(Protocol):
    """Takes tokens to the ranks of their experts and sums the results at home, forward and backward.

    A strategy asks it for the four crossings, moves them, and reads them: `serial` one of each, a schedule in
    chunks one of each for every chunk. All ranks ask for them in the same order.

    key: the number by which operators and handles name it. family: it, and who takes the calls it cannot
    serve. roles: blocks of its fused kernels, as tuned. promise, uncompiled: set before a dispatch, if this
    rank will combine rows that fit it, or goes on as no compiled layer does, which ranks compare.
    promised: whether all ranks did. room_for_all: `rows_RD` has a row for every choice, dropped ones too.
    about_rows: a clause of a layer's `reasons`, or nothing.
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
    def about_rows(self) -> str: ...

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

    def about_whole(self, experts: object, schedule: str) -> str:
        """A clause of a layer's `reasons` about `run_whole`, if there is something to say of it with these
        experts, by the schedule of this name."""
        ...

    def beside(self, chunks: int, *, in_turn: bool = False) -> Dispatcher:
        """A dispatcher for crossings that run while experts compute, in this many chunks. in_turn: no row
        leaves early, together with the plan; for callers that time plans and moves apart."""
        ...

    def fusing(self, roles: Roles | None = None, inner: int = 0) -> Fusing:
        """A dispatcher for fused kernels, where `why_not_form` does not forbid rows `UNDER_WAY`: they come so
        if experts ask for that, and dx goes home beside the weights' gradients. All ranks or none. inner: F,
        or 0."""
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


class Fusing(Dispatcher, Protocol):
    """A dispatcher whose rows also move in the launch of a product, in the caller's stream.

    Each of its own calls has the bits of the one without `beside`, and does the same where products cannot
    take the rows: then they run before or behind it.
    """

    def combine_beside(
        self,
        left: Sequence[Callable[[], Any]],
        rows_RD: Tensor,
        weights_R: Tensor | None,
        state: Sequence[Tensor],
        num_tokens: int,
        addend: Addend | None,
        out_TD: Tensor,
    ) -> Crossing[Tensor]:
        """Combine, behind or beside the products that the experts left (`Dispatched.leave`)."""
        ...

    def combine_backward_beside(
        self, d_y_TD: Tensor, weights_R: Tensor, state: Sequence[Tensor]
    ) -> Crossing[tuple[Tensor, Any]]:
        """Gradients of rows that were weighted before, and what brings them; `None` if they are there."""
        ...

    def dispatch_backward_beside(
        self,
        left: Any,
        d_rows_RD: Tensor,
        d_weights_R: Tensor,
        state: Sequence[Tensor],
        num_tokens: int,
        out: tuple[Tensor, Tensor],
    ) -> Crossing[tuple[Tensor, Tensor]]:
        """Run `dispatch_backward`, perhaps beside the weights' gradients in the `Deferral` `left`."""
        ...


class RowExchange(Protocol):
    """An exchange as a strategy sees it; see `imbrex.Exchange`."""

    group: dist.ProcessGroup | None
    world_size: int
    transport: Backend
    dispatcher: Dispatcher
    geometry: Geometry
    wire: Wire
    layer: int

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


@runtime_checkable
class Strategy(Protocol):
    """Decides when the steps of a layer run. Results are those of `serial`."""

    name: str

    def reason(self, exchange: RowExchange, experts: Experts) -> str:
        """Why this strategy was chosen, and what it does over the exchange's transport with these experts;
        asked before the first call, too."""
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


@runtime_checkable
class Heralding(Strategy, Protocol):
    """A strategy whose ranks do not meet in the exchange of counts."""

    def herald(self, exchange: RowExchange) -> Callable[[Tensor, Routing], None] | None:
        """A function that tells all ranks that an input cannot be dispatched, and raises; `None` while ranks
        meet all the same."""
        ...
