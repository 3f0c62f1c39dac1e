"""Differentiable dispatch and combine: torch operators while a call is traced, plain functions otherwise.

Each of the four crossings (dispatch, combine and their backwards) is a custom operator, so that
`torch.compile(fullgraph=True)` sees one node and no collective. An operator finds its dispatcher by a key, an
integer; the registry holds weak references only. Outside of tracing (`torch.compile`, `make_fx`), the same
functions run as `torch.autograd.Function`s, because calling a custom operator costs 20 to 70 us of host time.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op, get_ctx

from imbrex.contracts import Arrived, Crossing, Dispatched, Dispatcher, Handle, Routing
from imbrex.exchange.agreement import is_plain, raise_in_data_group
from imbrex.runtime.compiling import tell_compiling
from imbrex.runtime.tracing import differentiated, once_differentiable, traced

Value = TypeVar("Value")
MAX_SIGNATURES = 1 << 16
"""The most signatures a process can have; see `register`."""
_live: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_keys = itertools.count(1)
_signatures: dict[tuple, int] = {}


def register(dispatcher: object, *signature: Any) -> int:
    """Return a new key, by which operators find `dispatcher` for as long as it lives.

    signature: all that the shapes of its results depend on, besides its class. The key modulo
        `MAX_SIGNATURES` is the signature's number.
    """
    number = _signatures.setdefault((type(dispatcher), *signature), len(_signatures))
    assert number < MAX_SIGNATURES
    key = next(_keys) * MAX_SIGNATURES + number
    _live[key] = dispatcher
    return key


def release(key: int) -> None:
    """Forget a dispatcher."""
    _live.pop(key, None)


def dispatcher_by(key: int) -> Dispatcher:
    """The dispatcher of a key. Raises RuntimeError if its exchange has been closed or deleted."""
    if isinstance(key, torch.SymInt):
        # The compiler traces with a symbolic key, so that one graph serves all layers of one signature: they
        # have the same shapes. `int` makes the compiler guard on the signature's number.
        int(key % MAX_SIGNATURES)
        key = key.node.hint
    try:
        return _live[key]
    except KeyError:
        raise RuntimeError(
            "this exchange was closed, or deleted while a result of it is still in use: make a new one"
        ) from None


def sizes_of_run(fake: Any) -> Callable[[], Any]:
    """A function that makes sizes known only at run time, for an operator that runs on `fake` tensors.

    `get_ctx().new_dynamic_size` is torch's own. But an operator that uses it breaks the graph of
    `torch.compile(model)`, unless `capture_dynamic_output_shape_ops` is set, as `fullgraph=True` sets it. A
    model of L layers would become L + 1 graphs, each with its guards. So the sizes are unbacked symbols of
    the fake tensors' shape environment, as in torch's device meshes.
    """
    shapes = fake.fake_mode.shape_env if hasattr(fake, "fake_mode") else None
    if shapes is None:
        return get_ctx().new_dynamic_size

    def size() -> Any:
        symbol = shapes.create_unbacked_symint()
        torch.sym_constrain_range_for_size(symbol, min=0)
        return symbol

    return size


def complete(crossing: Crossing[Value]) -> Value:
    """Run a crossing to its end: move it, wait for it, and return what it reads."""
    pending = crossing.move()
    return crossing.read(None if pending is None else pending.finish())


class StartedCrossing:
    """A crossing whose move has started."""

    def __init__(self, crossing: Crossing[Any]) -> None:
        self.read, self.pending = crossing.read, crossing.move()

    def finish(self) -> Any:
        """Wait for the move, and return what the crossing reads. Call it once."""
        return self.read(None if self.pending is None else self.pending.finish())


def without_choices(x: Tensor, top_k: int, kept_TK: Tensor | None = None) -> tuple[Tensor, Routing]:
    """Tokens [..., D] as [T, D], with a routing that sends them nowhere: what ranks check in with."""
    if not is_plain(x):
        x_TD, tokens = x, 0
    else:
        x_TD = x.reshape(-1, x.shape[-1]) if x.dim() else x[None, None]
        tokens = x_TD.shape[0]
    choices = (tokens, top_k) if kept_TK is None else kept_TK.shape
    ids_TK = torch.full(choices, -1, dtype=torch.int64, device=x.device)
    weights_TK = torch.zeros(ids_TK.shape, dtype=torch.float32, device=x.device)
    return x_TD, Routing(ids_TK=ids_TK, weights_TK=weights_TK, kept_TK=kept_TK)


@custom_op("imbrex::check_in", mutates_args=())
def check_in_op(x_TD: Tensor, key: int, data_group: str) -> Tensor:
    """Meet the ranks before the sums of a router over the global batch, where plain calls meet too: see
    `Exchange.check_in` and `raise_in_data_group`. data_group: its name, or nothing.

    Returns 0 in float32. What communicates next adds it to its numbers, so that no graph puts that first.
    """
    dispatcher, problem = dispatcher_by(key), None
    try:
        dispatcher.check_in(*without_choices(x_TD, dispatcher.geometry.top_k))
    except ValueError as error:
        problem = error
    group: Any = dist.distributed_c10d._resolve_process_group(data_group) if data_group else None  # pyright: ignore
    raise_in_data_group(group, problem)
    return x_TD.new_zeros((), dtype=torch.float32)


@check_in_op.register_fake
def _(x_TD: Tensor, key: int, data_group: str):
    return x_TD.new_zeros((), dtype=torch.float32)


def arrive(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, key: int) -> Arrived:
    """Plan a dispatch and run it: the rows, and what comes with them; see `Exchange.dispatch`."""
    dispatcher = dispatcher_by(key)
    (plan,) = dispatcher.agree([(x_TD, Routing(ids_TK=ids_TK, weights_TK=weights_TK))])
    return complete(dispatcher.dispatch(plan, x_TD, weights_TK))


def run_dispatch(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, key: int, compiled: bool
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return rows_RD, weights_R, counts_e, and the state that the other three operators need. compiled: a
    graph runs this, whose rows fit since it was traced."""
    if compiled:
        dispatcher_by(key).promise = True
    return arrive(x_TD, weights_TK, ids_TK, key)[:4]


dispatch_op = custom_op("imbrex::dispatch", run_dispatch, mutates_args=())


@dispatch_op.register_fake
def _(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, key: int, compiled: bool):
    dispatcher, size = dispatcher_by(key), sizes_of_run(x_TD)
    rows = ids_TK.numel() if dispatcher.room_for_all else size()
    return (
        x_TD.new_empty(rows, x_TD.shape[1]),
        weights_TK.new_empty(rows),
        ids_TK.new_empty(len(dispatcher.geometry.local_slots)),
        dispatcher.fake_state(ids_TK, rows, size),
    )


def run_dispatch_backward(
    d_rows_RD: Tensor, d_weights_R: Tensor, state: Sequence[Tensor], num_tokens: int, top_k: int, key: int
) -> tuple[Tensor, Tensor]:
    """Return d_x_TD and d_weights_TK."""
    return complete(dispatcher_by(key).dispatch_backward(d_rows_RD, d_weights_R, state, num_tokens))


dispatch_backward_op = custom_op("imbrex::dispatch_backward", run_dispatch_backward, mutates_args=())


@dispatch_backward_op.register_fake
def _(d_rows_RD, d_weights_R, state, num_tokens, top_k, key):
    return d_rows_RD.new_empty(num_tokens, d_rows_RD.shape[1]), d_weights_R.new_empty(num_tokens, top_k)


def set_up_dispatch(ctx, inputs, output):
    """Save for the backward what `differentiate_dispatch` needs."""
    x_TD, weights_TK, _ids, ctx.key, *_ = inputs
    ctx.shape, ctx.width, ctx.dtype = weights_TK.shape, x_TD.shape[1], x_TD.dtype
    # By default autograd makes a tensor of zeros for every integer output.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], *output[3])


def differentiate_dispatch(ctx, d_rows_RD, d_weights_R, *_, run: Callable[..., Any] = dispatch_backward_op):
    """The gradients of the inputs of `run_dispatch`, `None` for integers. run: `dispatch_backward_op`, or the
    function behind it, `run_dispatch_backward`."""
    weights_R, *state = ctx.saved_tensors
    if d_rows_RD is None:
        d_rows_RD = weights_R.new_zeros(weights_R.shape[0], ctx.width, dtype=ctx.dtype)
    d_weights_R = torch.zeros_like(weights_R) if d_weights_R is None else d_weights_R
    d_x_TD, d_weights_TK = run(d_rows_RD, d_weights_R, state, *ctx.shape, ctx.key)
    return d_x_TD, d_weights_TK, None, None, None


dispatch_op.register_autograd(differentiate_dispatch, setup_context=set_up_dispatch)


class _Dispatch(torch.autograd.Function):
    """Runs `run_dispatch`, or finishes a crossing that was started. `Arrived.beside` is no tensor, so it is
    returned in a list among the inputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        x_TD, weights_TK, ids_TK, (key, started, besides) = inputs
        arguments = x_TD, weights_TK, ids_TK, key
        arrived = arrive(*arguments) if started is None else started.finish()
        rows_RD, weights_R, counts_e, state, beside = arrived
        besides.append(beside)
        ctx.mark_non_differentiable(counts_e, *state)
        set_up_dispatch(ctx, arguments, (rows_RD, weights_R, counts_e, state))
        return rows_RD, weights_R, counts_e, *state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        run = dispatch_backward_op if traced(*gradients[:2]) else run_dispatch_backward
        return differentiate_dispatch(ctx, *gradients, run=run)[:4]


def dispatch(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, key: int, started: StartedCrossing | None = None
) -> Arrived:
    """Dispatch tokens [T, D]; differentiable in `x_TD` and `weights_TK`. key: the dispatcher's. started: the
    crossing, if its move has started."""
    if started is None and traced(x_TD, weights_TK, ids_TK):
        compiled = torch.compiler.is_compiling()
        if compiled:
            tell_compiling()
        return Arrived(*dispatch_op(x_TD, weights_TK, ids_TK, key, compiled))
    if not differentiated(x_TD, weights_TK):
        return arrive(x_TD, weights_TK, ids_TK, key) if started is None else started.finish()
    besides: list[Any] = []
    call = key, started, besides
    rows_RD, weights_R, counts_e, *state = _Dispatch.apply(x_TD, weights_TK, ids_TK, call)
    return Arrived(rows_RD, weights_R, counts_e, state, *besides)


def run_combine(
    rows_RD: Tensor,
    weights_R: Tensor,
    addend_TD: Tensor | None,
    state: Sequence[Tensor],
    num_tokens: int,
    key: int,
    weighted: bool,
    compiled: bool,
) -> Tensor:
    """Return y_TD: the sum of each token's rows, times `weights_R` unless they are `weighted` already, and of
    its row of `addend_TD`. compiled: a graph runs this, and meets the ranks that do not and may have other
    rows than they should."""
    if compiled and not (dispatcher := dispatcher_by(key)).promised:
        dispatcher.agree_on_rows(None, rows_RD.dtype)
    weights, addend = None if weighted else weights_R, None if addend_TD is None else lambda: addend_TD
    return complete(dispatcher_by(key).combine(rows_RD, weights, state, num_tokens, addend))


combine_op = custom_op("imbrex::combine", run_combine, mutates_args=())


@combine_op.register_fake
def _(rows_RD, weights_R, addend_TD, state, num_tokens, key, weighted, compiled):
    return rows_RD.new_empty(num_tokens, rows_RD.shape[1])


def run_combine_backward(
    d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor], key: int
) -> tuple[Tensor, Tensor]:
    """Return d_rows_RD and d_weights_R. rows_RD: `None` if the rows were weighted before the combine; then
    d_weights_R is empty."""
    return complete(dispatcher_by(key).combine_backward(d_y_TD, rows_RD, weights_R, state))


combine_backward_op = custom_op("imbrex::combine_backward", run_combine_backward, mutates_args=())


@combine_backward_op.register_fake
def _(d_y_TD, rows_RD, weights_R, state, key):
    d_weights_R = weights_R.new_empty(weights_R.shape[0] if rows_RD is not None else 0)
    return d_y_TD.new_empty(weights_R.shape[0], d_y_TD.shape[1]), d_weights_R


def set_up_combine(ctx, inputs, output):
    """Save for the backward what `differentiate_combine` needs."""
    rows_RD, weights_R, addend, state, _tokens, ctx.key, ctx.weighted, *_ = inputs
    ctx.has_addend, ctx.num_state = addend is not None, len(state)
    # The rows are needed only for the gradient of the weights, and they are the largest tensor of a layer.
    ctx.save_for_backward(None if ctx.weighted else rows_RD, weights_R, *state)


def differentiate_combine(ctx, d_y_TD, *, run: Callable[..., Any] = combine_backward_op):
    """The gradients of the inputs of `run_combine`. run: `combine_backward_op`, or the function behind it,
    `run_combine_backward`."""
    rows_RD, weights_R, *state = ctx.saved_tensors
    d_rows_RD, d_weights_R = run(d_y_TD, rows_RD, weights_R, state, ctx.key)
    d_weights, d_addend = None if ctx.weighted else d_weights_R, d_y_TD if ctx.has_addend else None
    return d_rows_RD, d_weights, d_addend, [None] * ctx.num_state, None, None, None, None


combine_op.register_autograd(differentiate_combine, setup_context=set_up_combine)


class _Combine(torch.autograd.Function):
    """Runs `run_combine`, or finishes a crossing that was started. The backward also dispatches rows once
    more if it was given a `Redispatch`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        rows_RD, weights_R, addend_TD, (num_tokens, key, weighted, started, ctx.redispatch), *state = inputs
        arguments = rows_RD, weights_R, addend_TD, state, num_tokens, key, weighted
        set_up_combine(ctx, arguments, None)
        return run_combine(*arguments, False) if started is None else started.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        run = combine_backward_op if traced(*gradients) else run_combine_backward
        d_rows_RD, d_weights_R, d_addend, *_ = differentiate_combine(ctx, *gradients, run=run)
        if ctx.redispatch is not None:
            ctx.redispatch.fetch()
        return d_rows_RD, d_weights_R, d_addend, None, *[None] * ctx.num_state


def combine(
    rows_RD: Tensor,
    handle: Handle,
    addend_TD: Tensor | None,
    weighted: bool,
    started: StartedCrossing | None = None,
    redispatch: Redispatch | None = None,
) -> Tensor:
    """Combine rows [R, D] into y_TD; differentiable in the rows, the weights and the addend. started: the
    crossing, if its move has started. redispatch: the rows that the backward dispatches once more."""
    weights_R, state, call = handle.weights_R, handle.state, (handle.num_tokens, handle.maker, weighted)
    if started is None and traced(rows_RD, weights_R, addend_TD):
        return combine_op(rows_RD, weights_R, addend_TD, state, *call, torch.compiler.is_compiling())
    if not differentiated(rows_RD, weights_R, addend_TD):
        if started is not None:
            return started.finish()
        return run_combine(rows_RD, weights_R, addend_TD, state, *call, False)
    # One tuple for all that is no tensor, because `apply` inspects every argument.
    return _Combine.apply(rows_RD, weights_R, addend_TD, (*call, started, redispatch), *state)


class _FetchedRows:
    """The rows that saved tensors of a graph are views of, once they have been dispatched again."""

    rows_RD: Tensor | None = None


class Redispatch:
    """A context in which autograd saves no rows of a dispatch: the backward dispatches them again.

    Tensors that are saved in the context and lie in the rows' memory are replaced by their shape and offset.
    The backward of the combine fetches the rows, once on every rank, whatever was saved of them: several
    tensors, or none on a rank without rows. So ranks never differ in their collectives.
    """

    def __init__(self, x_TD: Tensor, dispatched: Dispatched) -> None:
        handle, rows_RD = dispatched.handle, dispatched.rows_RD
        self._maker, self._inputs = handle.maker, (x_TD.detach(), handle.state, rows_RD.shape[0])
        # Not the rows themselves, which must be freed when the context ends.
        self._identity = rows_RD.untyped_storage(), rows_RD.dtype, rows_RD._version, rows_RD.storage_offset()
        self._fetched: Callable[[], _FetchedRows | None] = lambda: None
        self._hooks: Any = None

    def __enter__(self) -> Redispatch:
        fetched = _FetchedRows()
        self._fetched = weakref.ref(fetched)

        def pack(saved: Tensor) -> Any:
            storage, dtype, version, first = self._identity
            same = saved.untyped_storage() is storage and saved.dtype == dtype
            if not same or saved._version != version:
                return saved, None
            return fetched, (saved.shape, saved.stride(), saved.storage_offset() - first)

        def unpack(packed: Any) -> Tensor:
            source, view = packed
            if view is None:
                return source
            rows_RD = self.fetch() if source.rows_RD is None else source.rows_RD
            return rows_RD.as_strided(*view)

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        del self._identity, self._hooks

    def fetch(self) -> Tensor:
        """Dispatch the rows again: rows_RD. Collective."""
        rows_RD, fetched = dispatcher_by(self._maker).redispatch(*self._inputs), self._fetched()
        if fetched is not None:
            fetched.rows_RD = rows_RD
        return rows_RD
