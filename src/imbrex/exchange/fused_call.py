"""A fused layer of imbrex's own experts in one function each way: in a compiled graph (`layer_op`), step by
step in an eager call (`FusedSteps`), and with memory of the caller's, for a record (`recorded`).

    x_TD ──stage▶ [rows, gate and up] ──▶ [down, and sums home] ──▶ y_TD
    d_y_TD ──stage▶ [rows of dy, SwiGLU's gradient] ──▶ rows' gradient ──▶ [weights' gradients, sums home]

What stands in brackets is one launch where that is faster. `imbrex.overlap.chunks` takes the same steps as
tasks, for experts that hooks read, or that are somebody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import RowForm
from imbrex.exchange.autograd import complete
from imbrex.exchange.nvlink_fit import Part
from imbrex.exchange.recorded_memory import Between, Places
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.exchange.launches import Sums
from imbrex.kernels.exchange.lease import Staged
from imbrex.kernels.ffn.ffn import (
    LeftGradient,
    Over,
    Saved,
    Slots,
    can_bring_gradient,
    ffn_gradients,
    run_ffn,
    run_first,
    run_gradients,
)
from imbrex.kernels.ffn.glue import Groups
from imbrex.kernels.fused.home import home_beside_gradients, why_not_home
from imbrex.kernels.fused.rows_out import rows_out
from imbrex.kernels.gemm.gemm import ALONE
from imbrex.kernels.routing.routed import Routed
from imbrex.kernels.rows.weights import run_spread
from imbrex.runtime.deferred import Deferral
from imbrex.runtime.tracing import Node, once_differentiable

Weights = tuple[Tensor, Tensor]
"""gate_up_eGD and down_eDF."""


def run_forward(
    dispatcher: Any,
    part: Part,
    inputs: tuple[Tensor, Tensor, Tensor | None],
    weights: Weights,
    *,
    keep: bool,
    one_launch: bool | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return y_TD, and what the backward needs: rows_RD, weights_R, gate_up_RG (empty unless `keep`), the
    plan of the experts' groups, and the state of the crossings. inputs: x_TD, weights_TK, and what is added
    to the output."""
    x_TD, weights_TK, addend_TD = inputs
    arrived = complete(dispatcher.dispatch(part, x_TD, weights_TK, RowForm.UNDER_WAY))
    weights_R, rows_RD = arrived.weights_R, arrived.rows_RD
    left: list[Any] = []
    beside = groups = None
    if isinstance(arrived.beside, Staged):
        beside = rows_out(arrived.beside)._replace(leave=left.append)
    else:
        groups = arrived.beside
        groups.one_launch = one_launch
    out_RD, gate_up_RG, plan = run_ffn(rows_RD, *weights, arrived.counts_e, weights_R, keep, beside, groups)
    addend, y_TD = None if addend_TD is None else lambda: addend_TD, x_TD.new_empty(x_TD.shape)
    complete(dispatcher.combine_beside(left, out_RD, None, arrived.state, x_TD.shape[0], addend, y_TD))
    return y_TD, [rows_RD, weights_R, gate_up_RG, plan, *arrived.state]


def run_backward(
    dispatcher: Any,
    d_y_TD: Tensor,
    saved: Sequence[Tensor],
    weights: Weights,
    top_k: int,
    needs: Sequence[bool],
    *,
    over: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return d_x_TD, d_weights_TK, d_gate_up_eGD and d_down_eDF. needs: whether the gradients of gate_up and
    of down are needed; one that is not is empty. over: gate_up_RG may be written over."""
    rows_RD, weights_R, gate_up_RG, plan, *state = saved
    dy = d_y_TD.contiguous(), weights_R, state
    if can_bring_gradient(weights[1]):
        d_y_RD, staged = complete(dispatcher.combine_backward_beside(*dy))
    else:
        d_y_RD, staged = complete(dispatcher.combine_backward(dy[0], None, *dy[1:]))[0], None
    beside = ALONE if staged is None else rows_out(staged)
    of_ffn, deferral = Saved(rows_RD, *weights, plan, weights_R, gate_up_RG), None
    if all(needs):
        deferral = Deferral(early=True)
    more = {"deferral": deferral, "beside": beside, "over": Over(gate_up=over)}
    d_rows_RD, d_gate_up, d_down, d_weights_R = ffn_gradients(
        d_y_RD, of_ffn, (True, needs[0], needs[1]), **more
    )
    out = d_y_TD.new_empty(d_y_TD.shape), weights_R.new_empty(d_y_TD.shape[0], top_k)
    arguments = d_rows_RD, d_weights_R, state, d_y_TD.shape[0], out
    if deferral is None:
        complete(dispatcher.dispatch_backward(*arguments))
        return *out, d_gate_up, d_down
    complete(dispatcher.dispatch_backward_beside(deferral, *arguments))
    # A gradient is None on a rank without slots, or without room for rows.
    d_gate_up, d_down = (
        torch.zeros_like(w) if d is None else d
        for w, d in zip(weights, deferral.gradients(weights), strict=True)
    )
    return *out, d_gate_up, d_down


class FusedSteps(Node):
    """A fused call as one node of autograd, taken step by step."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x_TD, weights_TK, gate_up_eGD, down_eDF, addend_TD, (dispatcher, part, one_launch) = inputs
        weights, tokens = (gate_up_eGD, down_eDF), (x_TD, weights_TK, addend_TD)
        y_TD, saved = run_forward(dispatcher, part, tokens, weights, keep=True, one_launch=one_launch)
        ctx.save_for_backward(*weights, *saved)
        ctx.dispatcher, ctx.top_k, ctx.consumed = dispatcher, weights_TK.shape[1], False
        ctx.set_materialize_grads(False)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (d_y_TD,), (gate_up_eGD, down_eDF, *saved) = gradients, ctx.saved_tensors
        if d_y_TD is None:
            return (None,) * 6
        d_added_TD = d_y_TD if ctx.needs_input_grad[4] else None
        results = steps_back(ctx, ctx.dispatcher, d_y_TD, saved, (gate_up_eGD, down_eDF), ctx.top_k)
        return *results, d_added_TD, None


def steps_back(
    ctx: Any, dispatcher: Any, d_y_TD: Tensor, saved: list[Any], weights: Sequence[Tensor], top_k: int
) -> tuple[Tensor | None, ...]:
    """Gradients of tokens, of their choices' weights, of gate_up and of down, each `None` if not needed, of a
    node whose backward may come again: gate and up are computed again then, with the same bits."""
    needs = ctx.needs_input_grad[:4]
    if ctx.consumed:
        saved[2] = saved[2][:0]
    ctx.consumed = True
    results = run_backward(dispatcher, d_y_TD, saved, (weights[0], weights[1]), top_k, needs[2:], over=True)
    return (*(d if need else None for d, need in zip(results, needs, strict=True)),)


def launch_forward(
    dispatcher: Any,
    kernels: NvlinkExchange,
    tokens: tuple[Tensor, Tensor, Tensor],
    weights: Weights,
    places: Places,
    y_TD: Tensor,
    addend_TD: Tensor | None,
    mean_rows: int,
) -> None:
    """Queue the kernels of a forward into `places` and `y_TD`. tokens: they, their ids and their weights.
    addend_TD: what is added to the sums, or `None`. mean_rows: of a rank."""
    groups, out_RD, roles = places.groups, places.out_RD, dispatcher.roles
    memory = places.routed, places.staged
    how = {"out": places.rows_RD, "memory": memory, **dispatcher.choosing}
    staged, routed = kernels.stage(*tokens, dispatcher.sms.stage, **how)
    run_spread(routed, len(out_RD), len(weights[1]), groups, load=dispatcher.transport.load)
    plan, own_e2 = Groups(groups.plan, mean_rows=mean_rows), None if roles.first is None else places.own_e2
    brought = replace(staged, movers=roles.rows, plan=plan.plan, own_e2=own_e2, mean_rows=mean_rows)
    into = (places.act_RF, out_RD), groups.weights, places.gate_up_RG
    left = run_first(places.rows_RD, weights, plan, *into, rows_out(brought))
    addend = None if addend_TD is None else lambda: addend_TD
    state = [routed.words_TC]
    complete(dispatcher.combine_beside([left], out_RD, None, state, len(y_TD), addend, y_TD))


def pair_of(
    saved: Saved, d_y_RD: Tensor, act_RF: Tensor, results: tuple[Tensor | None, Tensor | None], mean_rows: int
) -> tuple[LeftGradient, LeftGradient]:
    """The gradients of both weights, of which gate_up's has written over gate and up."""
    groups = Groups(saved.plan, mean_rows=mean_rows)
    d_gate_up, d_down = results
    common = {"groups": groups, "add_to": None}
    return (
        LeftGradient(
            d_out=saved.gate_up_RG, rows=saved.rows_RD, weight=saved.gate_up_eGD, out=d_gate_up, **common
        ),
        LeftGradient(d_out=d_y_RD, rows=act_RF, weight=saved.down_eDF, out=d_down, **common),
    )


def why_not_last(saved: Saved) -> str | None:
    """Why weights' gradients of this forward cannot be computed beside sums, or `None`."""
    inner = saved.down_eDF.shape[2]
    return why_not_home(pair_of(saved, saved.rows_RD, saved.gate_up_RG[:, :inner], (None, None), 0))


def launch_back(
    dispatcher: Any,
    kernels: NvlinkExchange,
    d_y_TD: Tensor,
    routed: Routed,
    saved: Saved,
    between: Between,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    mean_rows: int,
) -> None:
    """Queue the kernels of a backward that needs all gradients, and for which `why_not_last` says nothing.
    results: memory for what `run_backward` returns."""
    d_x_TD, d_weights_TK, d_gate_up, d_down = results
    d_out_RD, d_rows_RD, act_RF, parts_PR, d_weights_R, memory = between
    product = ALONE
    if memory is not None:
        staged = kernels.stage_again(d_y_TD, routed, dispatcher.sms.stage, out=d_out_RD, memory=memory)
        product = rows_out(replace(staged, movers=dispatcher.roles.rows))
    else:
        kernels.pull(d_y_TD, routed, num_sms=dispatcher.sms.dispatch, out=d_out_RD)
    to = Slots(act_RF, parts_PR, d_weights_R, d_rows_RD, None, None)
    run_gradients(d_out_RD, saved, to, mean_rows, beside=product, keep=True)
    pair = pair_of(saved, d_out_RD, act_RF, (d_gate_up, d_down), mean_rows)
    sums: Sums = {"values": (d_weights_R, d_weights_TK), "wire": "bf16"}
    first = {} if dispatcher.roles.sums is None else {"first_blocks": dispatcher.roles.sums}
    home_beside_gradients(kernels, d_rows_RD[None], routed, sums, d_x_TD, [pair], **first)
