"""The recorder of backwards of recorded calls: it repeats the launches of an earlier one, by the addresses of
the memory that the forward kept, of a piece for what lies between, and of the weights' gradients.

    d_y_TD ──▶ [pull, SwiGLU's gradient and its sums, both weights' gradients, rows', combine] ──▶ d_x_TD

A backward that cannot be recorded takes the usual steps (`back_by_steps`), on tensors in the memory that the
forward kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from imbrex.exchange import autograd, fused_call, recorded_memory
from imbrex.exchange.kernel_dispatcher import KernelDispatcher
from imbrex.exchange.nvlink_fit import is_coded
from imbrex.exchange.recorded_launches import BLANKS_BACK, MOST_BYTES, Pattern, Records, sizes_of
from imbrex.exchange.recorded_memory import Between, Scratch, parts_of, scratch_of
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.exchange.launches import Sums
from imbrex.kernels.ffn.ffn import Saved, Slots, can_bring_gradient, ffn_backward, run_gradients
from imbrex.kernels.gemm.gemm import check_products
from imbrex.kernels.gemm.portable import is_portable
from imbrex.kernels.jit import launch_all
from imbrex.kernels.records import recording
from imbrex.kernels.routing.routed import Routed


class BackRecorder:
    """The recorder of a dispatcher's backwards."""

    def __init__(self, dispatcher: KernelDispatcher, records: Records) -> None:
        self.dispatcher: KernelDispatcher = weakref.proxy(dispatcher)
        self.records = records

    def launch(
        self,
        pattern: Pattern,
        saved: Sequence[Tensor],
        d_y_TD: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> list[Tensor | None] | None:
        """Launch the kernels of a backward: gradients of tokens, of their choices' weights, of gate_up and of
        down, each `None` if not needed. `None` in place of all if the caller is to take the steps. saved: the
        piece of memory that the forward kept, and both weights."""
        (memory, size, _, choices, *_), (piece, *weights) = pattern, saved
        dispatcher = self.dispatcher
        if dispatcher.observer.enabled or dispatcher.transport.capturing:
            return None
        if pattern.roles is not None and not all(needs[2:]):
            return None
        scratch = self.records.scratches.get(size)
        if scratch is None:
            scratch = self._plan(pattern, saved)
            if scratch is None:
                return None
            self.records.scratches[size] = scratch
        kernels, d_y_TD = dispatcher.kernels_of(memory.tokens), d_y_TD.contiguous()
        tokens, between = d_y_TD.shape[0], recorded_memory.new_piece(scratch.nbytes, piece.device)
        home = needs[0] or needs[1] or pattern.roles is not None  # as all who fuse send it
        d_x_TD = torch.empty_like(d_y_TD) if home else None
        d_weights_TK = d_y_TD.new_empty(tokens, choices, dtype=torch.float32) if home else None
        gradients = [
            recorded_memory.new_gradient(w) if need else None
            for w, need in zip(weights, needs[2:], strict=True)
        ]
        at = [0 if t is None else t.data_ptr() for t in (piece, between, *weights, *gradients)]
        key = size, kernels.serial, needs, tokens, kernels.next_buffer("pull", peek=True), *at
        record, results = self.records.launches.get(key), (d_x_TD, d_weights_TK)
        if record is None:
            what = d_y_TD, results, gradients
            places = Between.of(scratch, between)
            self._launch_recording(key, kernels, pattern, saved, places, *what)
        else:
            kernels.launch_again(record.first, record.kinds, d_y_TD.data_ptr())
            launch_all(record.between)
            check_products(d_y_TD.get_device())
            if d_x_TD is not None and d_weights_TK is not None:
                kernels.launch_again(record.last, ("combine",), d_x_TD.data_ptr(), d_weights_TK.data_ptr())
        return [d_x_TD if needs[0] else None, d_weights_TK if needs[1] else None, *gradients]

    def _plan(self, pattern: Pattern, saved: Sequence[Tensor]) -> Scratch | None:
        """The memory of a backward. `None` if rows cross in fp8, if products are the portable ones, which no
        tape records, if it is too much, or if weights' gradients are to come last and cannot."""
        wire, down_eDF, home = self.dispatcher.wire, saved[-1], pattern.roles is not None
        coded = is_coded(wire.combine_backward) or is_coded(wire.dispatch_backward)
        if coded or is_portable(down_eDF.get_device()):
            return None
        if home and fused_call.why_not_last(saved_of(pattern, saved)[0]) is not None:
            return None
        scratch = scratch_of(pattern.memory, down_eDF, home=home)
        return scratch if scratch.nbytes <= MOST_BYTES else None

    def _launch_recording(
        self,
        key: Any,
        kernels: NvlinkExchange,
        pattern: Pattern,
        saved_tensors: Sequence[Tensor],
        between: Between,
        d_y_TD: Tensor,
        home: tuple[Tensor | None, Tensor | None],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Launch the kernels of a backward in the usual way, and keep the record."""
        dispatcher, roles, (d_x_TD, d_weights_TK) = self.dispatcher, pattern.roles, home
        saved, words = saved_of(pattern, saved_tensors)
        routed = Routed.of_words(words, sizes_of(kernels.shape))
        with recording() as tape:
            if roles is not None:
                if not (pattern.moves_beside and roles.dy != 0 and can_bring_gradient(saved.down_eDF)):
                    between = between._replace(staged=None)
                what: Any = saved, between, (*home, *gradients), pattern.mean_rows
                fusing: Any = dispatcher.fusing(roles)
                fused_call.launch_back(fusing, kernels, d_y_TD, routed, *what)
            else:
                to = Slots(*between[2:5], None if d_x_TD is None else between.d_rows_RD, *gradients)
                kernels.pull(d_y_TD, routed, num_sms=dispatcher.sms.dispatch, out=between.d_out_RD)
                run_gradients(between.d_out_RD, saved, to, pattern.mean_rows)
                if d_x_TD is not None and d_weights_TK is not None:
                    values: Sums = {"weighted": False, "values": (between.d_weights_R, d_weights_TK)}
                    sms_home = dispatcher.sms_home.combine
                    kernels.combine(between.d_rows_RD, routed, num_sms=sms_home, out=d_x_TD, **values)
        first, *others = tape
        last = None if d_x_TD is None else others.pop().again(BLANKS_BACK[lay.Reduce])
        self.records.keep(key, first.again(BLANKS_BACK[type(first.args[1])]), ("pull",), others, last)


def saved_of(pattern: Pattern, saved_tensors: Sequence[Tensor]) -> tuple[Saved, Tensor]:
    """The experts' part of what a forward keeps, and its routing. saved_tensors: the piece of memory that it
    keeps, and both weights."""
    piece, gate_up_eGD, down_eDF = saved_tensors
    words, rows_RD, weights_R, plan, gate_up_RG = parts_of(pattern.memory, piece)
    return Saved(rows_RD, gate_up_eGD, down_eDF, plan, weights_R, gate_up_RG), words


def back_by_steps(
    ctx: Any, d_y_TD: Tensor, saved_tensors: Sequence[Tensor], as_operators: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of tokens, of their choices' weights, of gate_up and of down, each `None` if not needed.
    saved_tensors: the piece of memory that the forward kept, and both weights."""
    pattern, (saved, words) = ctx.pattern, saved_of(ctx.pattern, saved_tensors)
    if pattern.roles is not None and not as_operators:
        fusing, weights = autograd.dispatcher_by(pattern.key).fusing(pattern.roles), saved_tensors[1:]
        tensors = [saved.rows_RD, saved.weights_R, saved.gate_up_RG, saved.plan, words]
        return fused_call.steps_back(ctx, fusing, d_y_TD, tensors, weights, pattern.choices)
    if ctx.consumed:  # by a backward that retained the graph: computed again, the same bits
        saved = saved._replace(gate_up_RG=saved.gate_up_RG[:0])
    ctx.consumed = ctx.consumed or not as_operators
    x, choices, gate_up, down, *_ = ctx.needs_input_grad
    run: Any = autograd.combine_backward_op if as_operators else autograd.run_combine_backward
    d_out_RD, _ = run(d_y_TD, None, saved.weights_R, [words], pattern.key)
    results = ffn_backward(d_out_RD, saved, (x or choices, gate_up, down), as_operators=as_operators)
    d_rows_RD, d_gate_up, d_down, d_weights_R = results
    d_gate_up, d_down = d_gate_up if gate_up else None, d_down if down else None
    if not (x or choices):
        return None, None, d_gate_up, d_down
    run = autograd.dispatch_backward_op if as_operators else autograd.run_dispatch_backward
    d_x_TD, d_weights_TK = run(d_rows_RD, d_weights_R, [words], d_y_TD.shape[0], pattern.choices, pattern.key)
    return d_x_TD if x else None, d_weights_TK if choices else None, d_gate_up, d_down
