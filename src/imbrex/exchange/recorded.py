"""The recorder of calls over NVLink: it repeats the launches of an earlier call with the addresses of this
one.

    x_TD ──meeting of hosts──▶ [dispatch, weights of rows, gate and up, down, combine] ──▶ y_TD

Fused calls are recorded, too: some of these launches are one then (`fused_call`).

Forwards of imbrex's own experts with the same number of tokens launch the same kernels on the same grids.
Only four arguments differ: the addresses of tokens, ids, weights and result. All other tensors lie in one
piece of memory, or in two if a backward keeps some of them, and a caching allocator mostly gives the same
piece again. The first call with a piece launches its kernels in the usual way, on record (`kernels.records`).
Later calls with this piece launch the record.

To autograd the call is one node, whose backward is recorded in the same way (`recorded_back.py`).

A recorded call is as safe as any: its input is checked, hosts meet and compare their calls, every launch
refuses after one that failed, and ranks meet again if one of them has not promised rows that fit. Each rank
records by itself, since the launches are the same either way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import Handle, Routing, RowForm
from imbrex.exchange import autograd, fused_call, recorded_memory
from imbrex.exchange.autograd import StartedCrossing
from imbrex.exchange.kernel_dispatcher import KernelDispatcher
from imbrex.exchange.nvlink_fit import DTYPE, Part, row_capacity_for, why_not_whole
from imbrex.exchange.one_kernel import about_one_kernel, why_apart
from imbrex.exchange.recorded_back import BackRecorder, back_by_steps
from imbrex.exchange.recorded_launches import (
    BLANKS,
    BLANKS_ADDED,
    MOST_BYTES,
    Pattern,
    Records,
    sizes_of,
)
from imbrex.exchange.recorded_memory import Memory, Places, can_be_added, memory_of
from imbrex.experts.experts import surely_fit
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.exchange.launches import Sums
from imbrex.kernels.ffn import both
from imbrex.kernels.ffn.ffn import ffn, run_products
from imbrex.kernels.ffn.glue import Groups
from imbrex.kernels.fused.few import dispatching_sms, run_few, why_not_few
from imbrex.kernels.gemm.gemm import check_products
from imbrex.kernels.jit import launch_all
from imbrex.kernels.records import recording
from imbrex.kernels.rows.weights import run_spread
from imbrex.runtime.deferred import recording as recording_gradients
from imbrex.runtime.gradients import saves_elsewhere
from imbrex.runtime.members import member
from imbrex.runtime.tracing import Node, differentiated, once_differentiable, seen, traced

Call = tuple[Any, NvlinkExchange, Part, Pattern]
"""A call that ranks have agreed upon, and the dispatcher that asked them."""


def on_gpu(x_TD: Tensor) -> bool:
    """Whether calls can be recorded on the device of these tokens; tests replace this function."""
    return x_TD.is_cuda


class Recorder:
    """The recorder of a dispatcher: its records, and the memory that they are for."""

    def __init__(self, dispatcher: KernelDispatcher) -> None:
        # With a strong reference a dropped layer would keep its heaps until Python collects cycles.
        self.dispatcher: KernelDispatcher = weakref.proxy(dispatcher)
        self.records = Records()
        self.back = BackRecorder(dispatcher, self.records)
        self._served: torch.Size | None = None
        """The sizes of experts' weights for which the dispatcher launches the same kernels every time."""
        self._apart: str | None = None
        """Why the last batch that was to be one kernel, and was recorded, is none, or `None`."""

    def forget(self) -> None:
        """Drop all records: experts have moved, choices are counted from now on, or there are too many."""
        self.records.forget()
        self._served = None

    def about_one_kernel(self, experts: object, schedule: str) -> str:
        """The clause of `about_whole`."""
        return about_one_kernel(self.dispatcher, experts, schedule, self._apart)

    def run(
        self,
        dispatcher: KernelDispatcher,
        x_TD: Tensor,
        routing: Routing,
        experts: Any,
        addend: Callable[[], Tensor] | None = None,
    ) -> Tensor | None:
        """Run the whole call: y_TD, or `None` if the caller is to take its steps one by one, of which no rank
        has heard yet. dispatcher: the own one, or its copy for calls whose kernels move rows and multiply.
        addend: computes what is added to the output. It runs before the dispatch, and of the calls that
        return `None` in those alone whose addend cannot be added to tokens."""
        weights = self._weights_of(x_TD, routing, experts)
        if weights is None:
            return None
        fuses, leaves = dispatcher.fuses, (x_TD, routing.weights_TK, *weights)
        keep, in_graph = differentiated(*leaves), dispatcher.transport.capturing
        if keep and (in_graph or experts.gradient_sums is not None or recording_gradients(weights[0])):
            return None
        what = experts.one_launch, weights[1].shape
        if fuses and keep and saves_elsewhere():
            return None
        if in_graph and why_apart(dispatcher, x_TD.shape[0], *what) is not None:
            return None  # the rank with most has at least as many tokens
        added_TD = None if addend is None else addend()
        if added_TD is not None:
            if not can_be_added(added_TD, x_TD):
                return None
            keep = keep or differentiated(added_TD)
        dispatcher.promise = True
        part = dispatcher.meet(x_TD, routing)
        dispatcher.promised |= fuses  # where kernels do both nobody asks
        kernels, roles = dispatcher.kernels_for(part), dispatcher.roles if fuses else None
        size = kernels.serial, *part[1:], keep, *what, dispatcher.transport.one_kernel, roles
        pattern = self.records.patterns.get(size)
        if pattern is None:
            memory = self._plan(dispatcher, kernels, part, weights, keep)
            if memory is None or sum(memory.nbytes) > MOST_BYTES:
                return self._by_steps(dispatcher, part, x_TD, routing, weights, added_TD, what[0])
            small, mean_rows = part.is_small, kernels.shape.mean_rows(part.max_tokens)
            in_one = small and not keep and why_apart(dispatcher, part.max_tokens, *what) is None
            about = dispatcher.key, routing.ids_TK.shape[1], what[0]
            pattern = Pattern(memory, size, *about, small, in_one, roles, mean_rows)
            self.records.patterns[size] = pattern
        if in_graph and not pattern.one_kernel:
            return self._by_steps(dispatcher, part, x_TD, routing, weights, added_TD, what[0])
        call = dispatcher, kernels, part, pattern
        if keep:
            y_TD: Any = _Whole.apply(*leaves, added_TD, (self, call, routing.ids_TK))
            return y_TD
        tokens = x_TD, routing.ids_TK, routing.weights_TK
        return self.launch(call, tokens, weights, added_TD, again=not in_graph)[0]

    def launch(
        self,
        call: Call,
        tokens: tuple[Tensor, Tensor, Tensor],
        weights: tuple[Tensor, Tensor],
        added_TD: Tensor | None,
        *,
        again: bool = True,
    ) -> tuple[Tensor, list[Tensor]]:
        """Launch the kernels of a call, from a record if there is one: y_TD, and the pieces of memory.
        tokens: they, their ids and their weights. weights: the experts'. added_TD: what is added to the sums,
        or `None`. again: whether it may be from a record, which a graph does not capture."""
        (dispatcher, kernels, _, pattern), (x_TD, ids_TK, weights_TK) = call, tokens
        pieces = [recorded_memory.new_piece(nbytes, x_TD.device) for nbytes in pattern.memory.nbytes]
        y_TD = torch.empty_like(x_TD)
        buffer = 0 if pattern.small else kernels.next_buffer("pull", peek=True)
        at = [tensor.data_ptr() for tensor in (*pieces, *weights)]
        key = pattern.size, x_TD.shape[0], buffer, added_TD is not None, *at
        record = self.records.launches.get(key) if again else None
        if record is None:
            self._launch_recording(key, call, pieces, tokens, weights, added_TD, y_TD)
        else:
            begins = ids_TK.data_ptr(), weights_TK.data_ptr(), x_TD.data_ptr()
            kernels.launch_again(record.first, record.kinds, *begins)
            launch_all(record.between)
            check_products(x_TD.get_device())
            if not dispatcher.promised:
                self._agree_on_rows(dispatcher)
            ends = () if added_TD is None else (added_TD.data_ptr(),)
            kernels.launch_again(record.last, ("combine",), y_TD.data_ptr(), *ends)
        return y_TD, pieces

    def _weights_of(self, x_TD: Tensor, routing: Routing, experts: Any) -> tuple[Tensor, Tensor] | None:
        """The experts' weights, or `None` if not every call like this launches the same kernels."""
        dispatcher, ids_TK, weights_TK = self.dispatcher, routing.ids_TK, routing.weights_TK
        if torch.compiler.is_compiling() or not on_gpu(x_TD) or not surely_fit(experts):
            return None
        if experts.implementation != "kernels" or not experts.inputs_unchanged:
            return None
        gate_up, down = member(experts, "gate_up_proj"), member(experts, "down_proj")
        if seen(x_TD, ids_TK, weights_TK, gate_up, down):
            return None
        if dispatcher.observer.enabled:
            return None
        shape = down.shape
        if shape != self._served and not self._serves(shape):
            return None
        if not x_TD.dtype == gate_up.dtype == down.dtype == DTYPE or x_TD.dim() != 2 or not x_TD.shape[0]:
            return None
        contiguous = x_TD.is_contiguous() and ids_TK.is_contiguous() and weights_TK.is_contiguous()
        return (gate_up, down) if contiguous and gate_up.is_contiguous() and down.is_contiguous() else None

    def _serves(self, shape: torch.Size) -> bool:
        """Whether rows cross as they are, to slots that kernels choose, and kernels take weights of `shape`
        as they are."""
        if why_not_whole(self.dispatcher.wire, self.dispatcher.placed, shape) is not None:
            return False
        self._served = shape
        return True

    @staticmethod
    def _plan(
        dispatcher: KernelDispatcher,
        kernels: NvlinkExchange,
        part: Part,
        weights: Sequence[Tensor],
        keep: bool,
    ) -> Memory | None:
        """The memory of calls of this size. `None` if routing and rows take two launches, if the host waits
        to hear how many rows there are, or if the kernels check everything (`debug`)."""
        slots, width, inner = weights[1].shape
        shape, room = kernels.shape, row_capacity_for(kernels.shape, part.max_tokens)
        beside = dispatcher.fuses and not part.is_small
        counts = dispatcher.transport.exact_rows if beside else dispatcher.counts_first(part, room)
        if kernels.debug or counts:
            return None
        if part.is_small:
            few = min(shape.max_tokens, lay.SMALL_TOKENS)
            return memory_of(sizes_of(shape), few, shape.row_capacity, room, (slots, width, inner), keep=keep)
        if not beside and kernels.place_of_routing(width * DTYPE.itemsize, dispatcher.sms.dispatch) is None:
            return None
        sizes = sizes_of(shape), shape.max_tokens, room, room, (slots, width, inner)
        return memory_of(*sizes, keep=keep, beside=beside)

    @staticmethod
    def _agree_on_rows(dispatcher: KernelDispatcher) -> None:
        if not (dispatcher.promised or dispatcher.transport.capturing):  # as the exchange does
            dispatcher.agree_on_rows(None, DTYPE)

    def _by_steps(
        self,
        dispatcher: Any,
        part: Part,
        x_TD: Tensor,
        routing: Routing,
        weights: tuple[Tensor, Tensor],
        added_TD: Tensor | None,
        one_launch: bool | None,
    ) -> Tensor:
        """Take the steps of a call that ranks have agreed upon, and that cannot be recorded: y_TD."""
        inputs = x_TD, routing.weights_TK
        if dispatcher.fuses:
            if differentiated(*inputs, *weights, added_TD):
                y_TD: Any = fused_call.FusedSteps.apply(
                    *inputs, *weights, added_TD, (dispatcher, part, one_launch)
                )
                return y_TD
            return fused_call.run_forward(dispatcher, part, (*inputs, added_TD), weights, keep=False)[0]
        with torch.no_grad():
            begun = StartedCrossing(dispatcher.dispatch(part, *inputs, RowForm.ROWS))
        arrived = autograd.dispatch(*inputs, routing.ids_TK, dispatcher.key, begun)
        rows_RD, weights_R, counts_e, state, beside = arrived
        if isinstance(beside, Groups):
            beside.one_launch = one_launch
        out_RD = ffn(rows_RD, *weights, counts_e, weights_R=weights_R, beside=beside)
        self._agree_on_rows(dispatcher)
        known = {"weights_R": weights_R, "state": tuple(state), "maker": dispatcher.key}
        return autograd.combine(out_RD, Handle(num_tokens=len(x_TD), **known), added_TD, weighted=True)

    def _launch_recording(
        self,
        key: Any,
        call: Call,
        pieces: Sequence[Tensor],
        tokens: tuple[Tensor, Tensor, Tensor],
        weights: tuple[Tensor, Tensor],
        added_TD: Tensor | None,
        y_TD: Tensor,
    ) -> None:
        """Launch the kernels of a call in the usual way, and keep the record."""
        dispatcher, kernels, _, pattern = call
        places = Places.of(pattern.memory, pieces, sizes_of(kernels.shape))
        with recording() as tape:
            if pattern.moves_beside:
                what = tokens, weights, places, y_TD, added_TD, pattern.mean_rows
                fused_call.launch_forward(dispatcher, kernels, *what)
                noted = True
            else:
                sums: Sums = {"weighted": False, "addend": added_TD}
                launches = self._launch_rows(call, places, tokens, weights, sums)
                self._agree_on_rows(dispatcher)
                home = {"num_sms": dispatcher.sms.combine, "out": y_TD}
                kernels.combine(places.out_RD, places.routed, **home, **sums)
                noted = len(tape) == launches + 1  # no tape records the portable products
        if not noted or dispatcher.transport.capturing:
            return  # a graph's memory is its own
        first, *between, last = tape
        kinds = ("small",) if pattern.small else ("pull", "route")
        ends = BLANKS[lay.Reduce] if added_TD is None else BLANKS_ADDED
        self.records.keep(key, first.again(BLANKS[type(first.args[1])]), kinds, between, last.again(ends))

    def _launch_rows(
        self,
        call: Call,
        places: Places,
        tokens: tuple[Tensor, Tensor, Tensor],
        weights: tuple[Tensor, Tensor],
        sums: Sums,
    ) -> int:
        """Launch a dispatch and the experts of its rows: how many launches these are. sums: options of the
        combine behind, to which those that follow are added."""
        dispatcher, kernels, _, pattern = call
        sms, choosing, small = dispatcher.sms, dispatcher.choosing, pattern.small
        routed, rows_RD, row_groups, gate_up_RG, act_RF, out_RD, *_ = places
        mean_rows = pattern.mean_rows
        about = {"expected": mean_rows if small else 0, "mean_rows": mean_rows}
        plan = Groups(row_groups.plan, hits=row_groups.hits, one_launch=pattern.one_launch, **about)
        how = {"sizes": weights[1].shape[1:], "keep": gate_up_RG is not None, "elsewhere": False}
        why_two = both.why_not_both(plan, **how)
        in_one = why_two is None
        if pattern.one_kernel:
            self._apart = why_two
        if not small:
            load = dispatcher.transport.load
            kernels.dispatch_expert(*tokens, sms.dispatch, out=rows_RD, routed=routed, **choosing)
            run_spread(routed, len(rows_RD), len(weights[1]), row_groups, load=load)
        elif pattern.one_kernel and in_one and (behind := self._launch_few(call, places, tokens, weights)):
            sums["behind"] = behind
            return 1
        else:
            to = {"groups": row_groups, "memory": (rows_RD[None], routed)}
            kernels.dispatch_small(*tokens, sms.small, **to, **choosing)
        rows_RD, into = rows_RD[: len(out_RD)], (act_RF, out_RD, row_groups.weights)
        if in_one:
            both.run_both(rows_RD, *weights, plan, *into)
        else:
            run_products(rows_RD, weights, plan, *into, gate_up_RG)
        return 2 + (not in_one) + (not small)

    def _launch_few(
        self,
        call: Call,
        places: Places,
        tokens: tuple[Tensor, Tensor, Tensor],
        weights: tuple[Tensor, Tensor],
    ) -> int:
        """Launch the dispatch of a small batch and its experts in one, if that can be: the `behind` of its
        sums, else 0."""
        dispatcher, kernels, part, _ = call
        memory = places.rows_RD[None], places.routed
        sms = dispatching_sms(part.max_tokens, dispatcher.sms.small)
        small = kernels.small_call((*tokens, None), sms, places.groups, memory, dispatcher.choosing)
        self._apart = why_not_few(kernels, small, len(weights[1]))
        if self._apart is not None:
            return 0
        return run_few(kernels, small, [weights], (places.act_RF[None], places.out_RD[None]))


class _Whole(Node):
    """A recorded call as one node of autograd."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x_TD, weights_TK, gate_up_eGD, down_eDF, added_TD, (recorder, call, ids_TK) = inputs
        weights = gate_up_eGD, down_eDF
        y_TD, pieces = recorder.launch(call, (x_TD, ids_TK, weights_TK), weights, added_TD)
        ctx.save_for_backward(pieces[0], *weights)
        *_, ctx.pattern = call
        ctx.consumed = False
        ctx.set_materialize_grads(False)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (d_y_TD,) = gradients
        if d_y_TD is None:
            return (None,) * 6
        d_added_TD = d_y_TD if ctx.needs_input_grad[4] else None
        saved_tensors, as_operators = ctx.saved_tensors, traced(d_y_TD)
        if not (ctx.consumed or as_operators):
            dispatcher: Any = autograd.dispatcher_by(ctx.pattern.key)
            results = dispatcher.recorder.back.launch(
                ctx.pattern, saved_tensors, d_y_TD, ctx.needs_input_grad[:4]
            )
            if results is not None:
                ctx.consumed = True
                return *results, d_added_TD, None
        return *back_by_steps(ctx, d_y_TD, saved_tensors, as_operators), d_added_TD, None
