"""The torch operators of an exchange, forward and backward.

A backward calls another operator, never a collective directly, so that `torch.compile(fullgraph=True)` sees
one node. Operators find their exchange by a key; the registry holds weak references only.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, get_ctx

MOST_FORMS = 1 << 16
_live: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_keys = itertools.count(1)
_forms: dict[tuple, int] = {}


def register(owner: Any, *form: Any) -> int:
    """A key by which operators find `owner` for as long as it lives. form: all that the shapes of its results
    depend on; its number is the key's remainder by `MOST_FORMS`."""
    number = _forms.setdefault((type(owner), *form), len(_forms))
    assert number < MOST_FORMS
    key = next(_keys) * MOST_FORMS + number
    _live[key] = owner
    return key


def release(key: int) -> None:
    """Forget an owner."""
    _live.pop(key, None)


def owner_of(key: int) -> Any:
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


class Owner:
    """What operators of an exchange find by `key`, with the crossings begun earlier, by ticket."""

    def __init__(self, *form: Any) -> None:
        """form: as `register` says."""
        self.begun: dict[int, tuple] = {}
        self._tickets = itertools.count()
        self.key = register(self, *form)

    def begin(self, *started: Any) -> int:
        ticket = next(self._tickets)
        self.begun[ticket] = started
        return ticket

    def start_combine(
        self, rows_RD: Tensor, weights_R: Tensor | None, state: Sequence[Tensor], num_tokens: int
    ) -> tuple[Any, ...]:
        """Nothing, where all of a combine is one kernel."""
        return (None,)

    def close(self) -> None:
        """Forget what was begun; operators do not find it any more."""
        self.begun.clear()
        release(self.key)


@custom_op("imbrex::dispatch", mutates_args=())
def dispatch(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, key: int, ticket: int
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """rows_RD, weights_R, counts_e, and the state that the other operators want. See `Exchange`."""
    return owner_of(key).run_dispatch(x_TD, weights_TK, ids_TK, ticket)


@dispatch.register_fake
def _(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, key: int, ticket: int):
    owner, size = owner_of(key), get_ctx().new_dynamic_size
    rows = size()
    return (
        x_TD.new_empty(rows, x_TD.shape[1]),
        weights_TK.new_empty(rows),
        ids_TK.new_empty(owner.num_local_slots),
        owner.fake_state(ids_TK, rows, size),
    )


def run_dispatch_backward(
    d_rows_RD: Tensor, d_weights_R: Tensor, state: Sequence[Tensor], num_tokens: int, top_k: int, key: int
) -> tuple[Tensor, Tensor]:
    """d_x_TD, d_weights_TK."""
    return owner_of(key).run_dispatch_backward(d_rows_RD, d_weights_R, state, num_tokens)


dispatch_backward = custom_op("imbrex::dispatch_backward", run_dispatch_backward, mutates_args=())


@dispatch_backward.register_fake
def _(d_rows_RD, d_weights_R, state, num_tokens, top_k, key):
    return d_rows_RD.new_empty(num_tokens, d_rows_RD.shape[1]), d_weights_R.new_empty(num_tokens, top_k)


def set_up_dispatch(ctx, inputs, output):
    x_TD, weights_TK, _ids, ctx.key, _ticket = inputs
    ctx.shape, ctx.width, ctx.dtype = weights_TK.shape, x_TD.shape[1], x_TD.dtype
    # Else autograd makes zeros for every integer tensor among the outputs.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], *output[3])


def differentiate_dispatch(ctx, d_rows_RD, d_weights_R, *_, run: Callable[..., Any] = dispatch_backward):
    """run: `dispatch_backward`, or `run_dispatch_backward`."""
    weights_R, *state = ctx.saved_tensors
    if d_rows_RD is None:
        d_rows_RD = weights_R.new_zeros(weights_R.shape[0], ctx.width, dtype=ctx.dtype)
    d_weights_R = torch.zeros_like(weights_R) if d_weights_R is None else d_weights_R
    d_x_TD, d_weights_TK = run(d_rows_RD, d_weights_R, state, *ctx.shape, ctx.key)
    return d_x_TD, d_weights_TK, None, None, None


dispatch.register_autograd(differentiate_dispatch, setup_context=set_up_dispatch)


def run_combine(
    rows_RD: Tensor,
    weights_R: Tensor,
    addend_TD: Tensor | None,
    state: Sequence[Tensor],
    num_tokens: int,
    key: int,
    ticket: int,
    weighted: bool,
) -> Tensor:
    """y_TD, the rows of every token summed, times `weights_R` unless they are `weighted` already."""
    weights = None if weighted else weights_R
    return owner_of(key).run_combine(rows_RD, weights, addend_TD, state, num_tokens, ticket)


combine = custom_op("imbrex::combine", run_combine, mutates_args=())


@combine.register_fake
def _(rows_RD, weights_R, addend_TD, state, num_tokens, key, ticket, weighted):
    return rows_RD.new_empty(num_tokens, rows_RD.shape[1])


def run_combine_backward(
    d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor], key: int
) -> tuple[Tensor, Tensor]:
    """d_rows_RD, d_weights_R. Without `rows_RD` they were weighted before, and d_weights_R is empty."""
    return owner_of(key).run_combine_backward(d_y_TD, rows_RD, weights_R, state)


combine_backward = custom_op("imbrex::combine_backward", run_combine_backward, mutates_args=())


@combine_backward.register_fake
def _(d_y_TD, rows_RD, weights_R, state, key):
    d_weights_R = weights_R.new_empty(weights_R.shape[0] if rows_RD is not None else 0)
    return d_y_TD.new_empty(weights_R.shape[0], d_y_TD.shape[1]), d_weights_R


def set_up_combine(ctx, inputs, output):
    rows_RD, weights_R, addend, state, _tokens, ctx.key, _ticket, ctx.weighted = inputs
    ctx.has_addend, ctx.num_state = addend is not None, len(state)
    # Rows that were weighted before are not needed again, and they are the largest tensor of a layer.
    ctx.save_for_backward(None if ctx.weighted else rows_RD, weights_R, *state)


def differentiate_combine(ctx, d_y_TD, *, run: Callable[..., Any] = combine_backward):
    """run: `combine_backward`, or `run_combine_backward`."""
    rows_RD, weights_R, *state = ctx.saved_tensors
    d_rows_RD, d_weights_R = run(d_y_TD, rows_RD, weights_R, state, ctx.key)
    d_weights, d_addend = None if ctx.weighted else d_weights_R, d_y_TD if ctx.has_addend else None
    return d_rows_RD, d_weights, d_addend, [None] * ctx.num_state, None, None, None, None


combine.register_autograd(differentiate_combine, setup_context=set_up_combine)
