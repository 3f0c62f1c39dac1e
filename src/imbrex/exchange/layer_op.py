"""Two layers that are one operator in a compiled graph: the fused layer, and the layer of a rank alone.

The operators of `exchange.autograd` are single steps (dispatch, experts, combine). Between them a graph
passes tensors only, which is not enough for two kinds of call. Both have the bits of the single steps.

`fused_layer`, for `schedule="fused"`: kernels move rows while they multiply, so a move and a product must be
in one operator. The forward is one operator, the backward another, which sends dx home while it computes the
weights' gradients.

`layer_alone`, for one rank without gradients: the dispatch of a small batch knows more than tensors say (the
experts' groups, which experts have rows, how many rows to expect). As single operators, the experts would
plan their groups again, and their two products would be two launches.

The forward returns the tensors that the backward needs as further results, because a graph may reorder its
operators, and decides itself what to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, custom_op, register_fake

from imbrex.contracts import Routing, RowForm
from imbrex.exchange.alone_recorded import adds, serves_few
from imbrex.exchange.autograd import complete, dispatcher_by, sizes_of_run
from imbrex.exchange.fused_call import run_backward, run_forward
from imbrex.kernels.ffn.ffn import run_ffn
from imbrex.kernels.ffn.glue import COUNTERS, Groups
from imbrex.kernels.ffn.tokens import ffn_in_place
from imbrex.runtime.compiling import tell_compiling


def fused_layer(
    x_TD: Tensor,
    routing: Routing,
    addend_TD: Tensor | None,
    weights: tuple[Tensor, Tensor],
    key: int,
) -> Tensor:
    """The output y_TD of a layer whose crossings run inside the products' kernels; all bfloat16.

    Differentiable in `x_TD`, the routing weights, `addend_TD` and the experts' `weights`, gate_up_eGD and
    down_eDF (G = 2F). key: the dispatcher's. Without gradients nothing is kept for a backward.
    """
    if torch.compiler.is_compiling():
        tell_compiling()
    inputs = x_TD, routing.weights_TK, addend_TD, *weights
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    return fused_op(x_TD, routing.weights_TK, routing.ids_TK, addend_TD, *weights, key, keep)[0]


def run_fused(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    addend_TD: Tensor | None,
    gate_up_eGD: Tensor,
    down_eDF: Tensor,
    key: int,
    keep: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Return y_TD, and what the backward needs, as `fused_call.run_forward`."""
    dispatcher = dispatcher_by(key).fusing(inner=down_eDF.shape[2])
    (plan,) = dispatcher.agree([(x_TD, Routing(ids_TK=ids_TK, weights_TK=weights_TK))])
    inputs = x_TD, weights_TK, addend_TD
    return run_forward(dispatcher, plan, inputs, (gate_up_eGD, down_eDF), keep=keep)


fused_op = custom_op("imbrex::fused", run_fused, mutates_args=())


@fused_op.register_fake
def _(x_TD, weights_TK, ids_TK, addend_TD, gate_up_eGD, down_eDF, key, keep):
    size = sizes_of_run(x_TD)
    rows = size()
    return x_TD.new_empty(x_TD.shape), [
        x_TD.new_empty(rows, x_TD.shape[1]),
        weights_TK.new_empty(rows),
        x_TD.new_empty(rows if keep else 0, gate_up_eGD.shape[1]),
        ids_TK.new_empty(COUNTERS + gate_up_eGD.shape[0], dtype=torch.int32),
        *dispatcher_by(key).fake_state(ids_TK, rows, size),
    ]


def run_fused_backward(
    d_y_TD: Tensor,
    saved: Sequence[Tensor],
    gate_up_eGD: Tensor,
    down_eDF: Tensor,
    top_k: int,
    key: int,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return d_x_TD, d_weights_TK, d_gate_up_eGD and d_down_eDF. needs: whether the gradients of gate_up and
    of down are needed; one that is not is empty."""
    dispatcher = dispatcher_by(key).fusing(None)
    return run_backward(dispatcher, d_y_TD, saved, (gate_up_eGD, down_eDF), top_k, needs)


fused_backward_op = custom_op("imbrex::fused_backward", run_fused_backward, mutates_args=())


@fused_backward_op.register_fake
def _(d_y_TD, saved, gate_up_eGD, down_eDF, top_k, key, needs):
    weights = zip((gate_up_eGD, down_eDF), needs, strict=True)
    d_gate_up, d_down = (w.new_empty(w.shape if need else 0) for w, need in weights)
    d_weights_TK = saved[1].new_empty(d_y_TD.shape[0], top_k)
    return d_y_TD.new_empty(d_y_TD.shape), d_weights_TK, d_gate_up, d_down


def _set_up(ctx: Any, inputs: Any, output: Any) -> None:
    _x, weights_TK, _ids, addend, gate_up, down, ctx.key, _keep = inputs
    ctx.top_k, ctx.has_addend = weights_TK.shape[1], addend is not None
    # By default autograd makes a tensor of zeros for every saved output.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gate_up, down, *output[1])


def _differentiate(ctx: Any, d_y_TD: Tensor | None, _saved: Any) -> Any:
    if d_y_TD is None:
        return (None,) * 8
    gate_up, down, *saved = ctx.saved_tensors
    needs = [*ctx.needs_input_grad[4:6]]
    d_x, d_weights, d_gate_up, d_down = fused_backward_op(
        d_y_TD, saved, gate_up, down, ctx.top_k, ctx.key, needs
    )
    d_addend = d_y_TD if ctx.has_addend else None
    d_gate_up, d_down = (d if need else None for d, need in zip((d_gate_up, d_down), needs, strict=True))
    return d_x, d_weights, None, d_addend, d_gate_up, d_down, None, None


fused_op.register_autograd(_differentiate, setup_context=_set_up)

# Registered by `Library`, because `custom_op` adds host time to every call.
_library = Library("imbrex_alone_v1", "DEF")
_library.define(
    "layer(Tensor x_TD, Tensor weights_TK, Tensor ids_TK, Tensor? addend_TD, Tensor gate_up_eGD,"
    " Tensor down_eDF, SymInt key, bool? one_launch) -> Tensor"
)


def layer_alone(
    x_TD: Tensor,
    routing: Routing,
    addend_TD: Tensor | None,
    weights: tuple[Tensor, Tensor],
    key: int,
    one_launch: bool | None,
) -> Tensor:
    """The output y_TD of a layer of one rank, as one operator; all bfloat16, without gradients. weights: the
    experts' gate_up_eGD and down_eDF. key: the dispatcher's. one_launch: as in `imbrex.experts.Experts`."""
    inputs = x_TD, routing.weights_TK, routing.ids_TK, addend_TD
    return torch.ops.imbrex_alone_v1.layer(*inputs, *weights, key, one_launch)


def _run_alone(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    addend_TD: Tensor | None,
    gate_up_eGD: Tensor,
    down_eDF: Tensor,
    key: int,
    one_launch: bool | None,
) -> Tensor:
    dispatcher: Any = dispatcher_by(key)
    (plan,) = dispatcher.agree([(x_TD, Routing(ids_TK=ids_TK, weights_TK=weights_TK))])
    tokens, own = (x_TD, ids_TK, weights_TK), (gate_up_eGD, down_eDF)
    if serves_few(tokens, own) and adds(addend_TD, x_TD):
        return dispatcher.few.run(tokens, own, one_launch, addend_TD)
    form = dispatcher.form_of((RowForm.INDEXED, RowForm.ROWS), x_TD, weights_TK)
    rows_RD, weights_R, counts_e, state, beside = complete(dispatcher.dispatch(plan, x_TD, weights_TK, form))
    if form is RowForm.INDEXED:
        rows_RD = ffn_in_place(rows_RD, beside, *own, counts_e, weights_R=weights_R)
    else:
        if isinstance(beside, Groups):
            beside.one_launch = one_launch
        rows_RD = run_ffn(rows_RD, *own, counts_e, weights_R, False, None, beside)[0]
    addend: Any = None if addend_TD is None else lambda: addend_TD
    return complete(dispatcher.combine(rows_RD, None, state, x_TD.shape[0], addend))


def _fake_alone(x_TD: Tensor, *_: Any) -> Tensor:
    return x_TD.new_empty(x_TD.shape)


_library.impl("layer", _run_alone, "CompositeExplicitAutograd")
register_fake("imbrex_alone_v1::layer", _fake_alone, lib=_library)

__all__ = ["fused_layer", "layer_alone"]
