"""Dispatch and combine as autograd sees them: torch operators where somebody traces, else functions.

A backward calls another operator, never a collective directly, so that `torch.compile(fullgraph=True)` sees
one node. Operators find their dispatcher by a key; the registry holds weak references only. Where nobody
traces, the same formulas run without torch's dispatcher of operators, which costs 20 to 70 us a call.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.library import custom_op, get_ctx

from imbrex.contracts import Arrived, Crossing, Dispatched, Dispatcher, Handle, Routing
from imbrex.runtime.tracing import differentiated, once_differentiable, traced

Value = TypeVar("Value")
MOST_FORMS = 1 << 16
_live: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_keys = itertools.count(1)
_forms: dict[tuple, int] = {}


def register(dispatcher: object, *form: Any) -> int:
    """A key by which operators find `dispatcher` for as long as it lives. form: all that the shapes of its
    results depend on; its number is the key's remainder by `MOST_FORMS`."""
    number = _forms.setdefault((type(dispatcher), *form), len(_forms))
    assert number < MOST_FORMS
    key = next(_keys) * MOST_FORMS + number
    _live[key] = dispatcher
    return key


def release(key: int) -> None:
    """Forget a dispatcher."""
    _live.pop(key, None)


def dispatcher_by(key: int) -> Dispatcher:
    """The dispatcher of a key. Raises RuntimeError where its exchange is closed."""
    if isinstance(key, torch.SymInt):
        # A compiled graph may serve many layers: all whose keys end in this form, so shapes of one are shapes
        # of all. `int` is the compiler's guard.
        int(key % MOST_FORMS)
        key = key.node.hint
    try:
        return _live[key]
    except KeyError:
        raise RuntimeError(
            "this exchange was closed, or deleted while a result of it is still in use: make a new one"
        ) from None


def sizes_of_run(fake: Any) -> Callable[[], Any]:
    """A maker of sizes that only the run knows, where an operator runs on `fake` tensors.

    `torch.compile(model)` as it is breaks its graph at an operator that asks torch for one, unless
    `capture_dynamic_output_shape_ops` is set, as `fullgraph=True` does: a model of L layers would be L + 1
    graphs, each with its guards. So they come from where torch's own device meshes have theirs.
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
    """Move it and read it, with nobody beside it."""
    pending = crossing.move()
    return crossing.read(None if pending is None else pending.finish())


class Begun:
    """A crossing under way."""

    def __init__(self, crossing: Crossing[Any]) -> None:
        self.read, self.pending = crossing.read, crossing.move()

    def finish(self) -> Any:
        """Wait for it and read it; once."""
        return self.read(None if self.pending is None else self.pending.finish())


def arrive(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, key: int) -> Arrived:
    """The rows of a dispatch and what comes with them. See `Exchange`."""
    dispatcher = dispatcher_by(key)
    (plan,) = dispatcher.agree([(x_TD, Routing(ids_TK=ids_TK, weights_TK=weights_TK))])
    return complete(dispatcher.dispatch(plan, x_TD, weights_TK))


def run_dispatch(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, key: int
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """rows_RD, weights_R, counts_e, and the state that the other operators want."""
    return arrive(x_TD, weights_TK, ids_TK, key)[:4]


dispatch_op = custom_op("imbrex::dispatch", run_dispatch, mutates_args=())


@dispatch_op.register_fake
def _(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, key: int):
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
    """d_x_TD, d_weights_TK."""
    return complete(dispatcher_by(key).dispatch_backward(d_rows_RD, d_weights_R, state, num_tokens))


dispatch_backward_op = custom_op("imbrex::dispatch_backward", run_dispatch_backward, mutates_args=())


@dispatch_backward_op.register_fake
def _(d_rows_RD, d_weights_R, state, num_tokens, top_k, key):
    return d_rows_RD.new_empty(num_tokens, d_rows_RD.shape[1]), d_weights_R.new_empty(num_tokens, top_k)


def set_up_dispatch(ctx, inputs, output):
    """Keep for the backward what `differentiate_dispatch` reads."""
    x_TD, weights_TK, _ids, ctx.key = inputs
    ctx.shape, ctx.width, ctx.dtype = weights_TK.shape, x_TD.shape[1], x_TD.dtype
    # Else autograd makes zeros for every integer tensor among the outputs.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], *output[3])


def differentiate_dispatch(ctx, d_rows_RD, d_weights_R, *_, run: Callable[..., Any] = dispatch_backward_op):
    """Gradients of the inputs of `run_dispatch`. run: `dispatch_backward_op`, or `run_dispatch_backward`."""
    weights_R, *state = ctx.saved_tensors
    if d_rows_RD is None:
        d_rows_RD = weights_R.new_zeros(weights_R.shape[0], ctx.width, dtype=ctx.dtype)
    d_weights_R = torch.zeros_like(weights_R) if d_weights_R is None else d_weights_R
    d_x_TD, d_weights_TK = run(d_rows_RD, d_weights_R, state, *ctx.shape, ctx.key)
    return d_x_TD, d_weights_TK, None, None


dispatch_op.register_autograd(differentiate_dispatch, setup_context=set_up_dispatch)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        x_TD, weights_TK, ids_TK, (key, begun, besides) = inputs
        arguments = x_TD, weights_TK, ids_TK, key
        rows_RD, weights_R, counts_e, state, beside = arrive(*arguments) if begun is None else begun.finish()
        besides.append(beside)
        ctx.mark_non_differentiable(counts_e, *state)
        set_up_dispatch(ctx, arguments, (rows_RD, weights_R, counts_e, state))
        return rows_RD, weights_R, counts_e, *state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        run = dispatch_backward_op if traced(*gradients[:2]) else run_dispatch_backward
        return differentiate_dispatch(ctx, *gradients, run=run)


def dispatch(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, key: int, begun: Begun | None = None
) -> Arrived:
    """Does what `run_dispatch` does, differentiably. begun: the crossing, where it is under way already."""
    if begun is None and traced(x_TD, weights_TK, ids_TK):
        return Arrived(*dispatch_op(x_TD, weights_TK, ids_TK, key))
    if not differentiated(x_TD, weights_TK):
        return arrive(x_TD, weights_TK, ids_TK, key) if begun is None else begun.finish()
    besides: list[Any] = []
    how = key, begun, besides
    rows_RD, weights_R, counts_e, *state = _Dispatch.apply(x_TD, weights_TK, ids_TK, how)
    return Arrived(rows_RD, weights_R, counts_e, state, *besides)


def run_combine(
    rows_RD: Tensor,
    weights_R: Tensor,
    addend_TD: Tensor | None,
    state: Sequence[Tensor],
    num_tokens: int,
    key: int,
    weighted: bool,
) -> Tensor:
    """y_TD, the rows of every token summed, times `weights_R` unless they are `weighted` already."""
    weights, addend = None if weighted else weights_R, None if addend_TD is None else lambda: addend_TD
    return complete(dispatcher_by(key).combine(rows_RD, weights, state, num_tokens, addend))


combine_op = custom_op("imbrex::combine", run_combine, mutates_args=())


@combine_op.register_fake
def _(rows_RD, weights_R, addend_TD, state, num_tokens, key, weighted):
    return rows_RD.new_empty(num_tokens, rows_RD.shape[1])


def run_combine_backward(
    d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor], key: int
) -> tuple[Tensor, Tensor]:
    """d_rows_RD, d_weights_R. Without `rows_RD` they were weighted before, and d_weights_R is empty."""
    return complete(dispatcher_by(key).combine_backward(d_y_TD, rows_RD, weights_R, state))


combine_backward_op = custom_op("imbrex::combine_backward", run_combine_backward, mutates_args=())


@combine_backward_op.register_fake
def _(d_y_TD, rows_RD, weights_R, state, key):
    d_weights_R = weights_R.new_empty(weights_R.shape[0] if rows_RD is not None else 0)
    return d_y_TD.new_empty(weights_R.shape[0], d_y_TD.shape[1]), d_weights_R


def set_up_combine(ctx, inputs, output):
    """Keep for the backward what `differentiate_combine` reads."""
    rows_RD, weights_R, addend, state, _tokens, ctx.key, ctx.weighted = inputs
    ctx.has_addend, ctx.num_state = addend is not None, len(state)
    # Rows that were weighted before are not needed again, and they are the largest tensor of a layer.
    ctx.save_for_backward(None if ctx.weighted else rows_RD, weights_R, *state)


def differentiate_combine(ctx, d_y_TD, *, run: Callable[..., Any] = combine_backward_op):
    """Gradients of the inputs of `run_combine`. run: `combine_backward_op`, or `run_combine_backward`."""
    rows_RD, weights_R, *state = ctx.saved_tensors
    d_rows_RD, d_weights_R = run(d_y_TD, rows_RD, weights_R, state, ctx.key)
    d_weights, d_addend = None if ctx.weighted else d_weights_R, d_y_TD if ctx.has_addend else None
    return d_rows_RD, d_weights, d_addend, [None] * ctx.num_state, None, None, None


combine_op.register_autograd(differentiate_combine, setup_context=set_up_combine)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        rows_RD, weights_R, addend_TD, (num_tokens, key, weighted, begun, ctx.again), *state = inputs
        arguments = rows_RD, weights_R, addend_TD, state, num_tokens, key, weighted
        set_up_combine(ctx, arguments, None)
        return run_combine(*arguments) if begun is None else begun.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        run = combine_backward_op if traced(*gradients) else run_combine_backward
        d_rows_RD, d_weights_R, d_addend, *_ = differentiate_combine(ctx, *gradients, run=run)
        if ctx.again is not None:
            ctx.again.fetch()
        return d_rows_RD, d_weights_R, d_addend, None, *[None] * ctx.num_state


def combine(
    rows_RD: Tensor,
    handle: Handle,
    addend_TD: Tensor | None,
    weighted: bool,
    begun: Begun | None = None,
    again: Again | None = None,
) -> Tensor:
    """Does what `run_combine` does, differentiably. begun: the crossing, where it is under way already.
    again: rows that the backward dispatches once more."""
    weights_R, state, facts = handle.weights_R, handle.state, (handle.num_tokens, handle.maker, weighted)
    if begun is None and traced(rows_RD, weights_R, addend_TD):
        return combine_op(rows_RD, weights_R, addend_TD, state, *facts)
    if not differentiated(rows_RD, weights_R, addend_TD):
        return run_combine(rows_RD, weights_R, addend_TD, state, *facts) if begun is None else begun.finish()
    # torch looks at every argument by itself
    return _Combine.apply(rows_RD, weights_R, addend_TD, (*facts, begun, again), *state)


class _Rows:
    """Rows that saved tensors of a graph are parts of, once they have come again."""

    rows_RD: Tensor | None = None


class Again:
    """A context in which nothing keeps the rows of a dispatch for its backward: they are dispatched again.

    The backward of the combine does that, once on every rank, whatever was saved of them: how many tensors,
    or none on a rank without rows. So ranks never differ in their collectives.
    """

    def __init__(self, x_TD: Tensor, dispatched: Dispatched) -> None:
        handle, rows_RD = dispatched.handle, dispatched.rows_RD
        self._maker, self._inputs = handle.maker, (x_TD.detach(), handle.state, rows_RD.shape[0])
        # Of the rows themselves nothing is kept once the context is left.
        self._seen = rows_RD.untyped_storage(), rows_RD.dtype, rows_RD._version, rows_RD.storage_offset()
        self._wanted: Callable[[], _Rows | None] = lambda: None
        self._hooks: Any = None

    def __enter__(self) -> Again:
        place = _Rows()
        self._wanted = weakref.ref(place)

        def pack(saved: Tensor) -> Any:
            storage, dtype, version, first = self._seen
            same = saved.untyped_storage() is storage and saved.dtype == dtype
            if not same or saved._version != version:
                return saved, None
            return place, (saved.shape, saved.stride(), saved.storage_offset() - first)

        def unpack(packed: Any) -> Tensor:
            source, part = packed
            if part is None:
                return source
            rows_RD = self.fetch() if source.rows_RD is None else source.rows_RD
            return rows_RD.as_strided(*part)

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        del self._seen, self._hooks

    def fetch(self) -> Tensor:
        """Dispatch them. Every rank must."""
        rows_RD, place = dispatcher_by(self._maker).redispatch(*self._inputs), self._wanted()
        if place is not None:
            place.rows_RD = rows_RD
        return rows_RD
