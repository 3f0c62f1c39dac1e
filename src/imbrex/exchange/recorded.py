"""Forwards over NVLink that are made again from a record: only what changes from call to call is done.

    x_TD ──meeting of hosts──▶ [dispatch, weights of rows, gate and up, down, combine] ──▶ y_TD

A forward without gradients by imbrex's own experts makes the same launches every time: of as many tokens, the
same kernels on the same grids, with the same arguments but for four addresses (tokens, ids, weights, result).
All that lies between, rows and activations, is one piece of memory, so that one more address, its own, stands
for all others. The first call that gets this memory makes the launches by the code that always makes them,
and what it launched is on record (`kernels.records`); the next ones launch that.

Nothing of a call's safety is left out: the input is looked at, hosts meet and compare their calls, every
launch asks first whether an earlier one has failed, and where one rank has not promised rows that fit all
meet again. Ranks need not agree on this: the launches are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from imbrex.contracts import Routing, RowForm
from imbrex.exchange.autograd import complete
from imbrex.exchange.nvlink_fit import DTYPE, is_coded, most_rows
from imbrex.experts.experts import surely_fit
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.exchange.groups import RowGroups
from imbrex.kernels.ffn.ffn import ffn, run_products
from imbrex.kernels.ffn.glue import COUNTERS, Groups
from imbrex.kernels.ffn.widths import fits
from imbrex.kernels.gemm.gemm import check_products
from imbrex.kernels.records import Noted, recording
from imbrex.kernels.routing.routed import Routed, Sizes
from imbrex.kernels.rows.weights import run_spread
from imbrex.runtime.tracing import traced

if TYPE_CHECKING:
    from imbrex.exchange.nvlink import NvlinkDispatcher, Part

MOST_BYTES = 512 << 20
"""The most for one piece of memory: more is easier to find in parts, and a GPU's time counts then."""
MOST_RECORDS = 256
"""More are forgotten, all at once: of a size, a piece of memory and a buffer there is one."""
ALIGNED = 256
BLANKS = {
    lay.Small: {(1, "route.ids"): 0, (1, "route.weights"): 1, (1, "x"): 2},
    lay.Expert: {(1, "route.ids"): 0, (1, "route.weights"): 1, (1, "pull.x"): 2},
    lay.Reduce: {(1, "out"): 0},
}
"""Addresses that a call brings, by the struct of the launch."""


class Memory(NamedTuple):
    """Everything between dispatch and combine, in one piece: the first byte, dtype and shape of each part."""

    words: tuple[int, torch.dtype, tuple[int, ...]]
    rows: tuple[int, torch.dtype, tuple[int, ...]]
    weights: tuple[int, torch.dtype, tuple[int, ...]]
    counts: tuple[int, torch.dtype, tuple[int, ...]]
    plan: tuple[int, torch.dtype, tuple[int, ...]]
    act: tuple[int, torch.dtype, tuple[int, ...]]
    out: tuple[int, torch.dtype, tuple[int, ...]]
    nbytes: int


class Record(NamedTuple):
    """The launches of a forward. kinds: of the exchange's calls that the first is."""

    first: Any
    kinds: tuple[str, ...]
    between: tuple[Any, ...]
    last: Any


def memory_of(sizes: Sizes, tokens: int, rows: int, room: int, weights: tuple[int, int, int]) -> Memory:
    """Memory for a routing of at most `tokens` tokens a rank, `rows` rows of a dispatch, and `room` that the
    experts may get. weights: e, D and F."""
    slots, width, inner = weights
    parts: list[tuple[torch.dtype, tuple[int, ...]]] = [
        (torch.int32, (tokens + sizes.more_rows, sizes.columns)),
        (DTYPE, (rows, width)),
        (torch.float32, (room,)),
        (torch.int64, (slots,)),
        (torch.int32, (COUNTERS + slots,)),
        (DTYPE, (room, inner)),
        (DTYPE, (room, width)),
    ]
    at, places = 0, []
    for dtype, shape in parts:
        places.append((at, dtype, shape))
        at += -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
    return Memory(*places, nbytes=at)


def part_of(memory: Tensor, place: tuple[int, torch.dtype, tuple[int, ...]]) -> Tensor:
    at, dtype, shape = place
    return memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _sizes(shape: lay.Shape) -> Sizes:
    return Sizes(1, shape.ranks, shape.choices, shape.most_slots)


def new_piece(nbytes: int, device: torch.device) -> Tensor:
    """With a caching allocator mostly that of the last call, and of the layer before."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def on_gpu(x_TD: Tensor) -> bool:
    return x_TD.is_cuda


class Recorder:
    """The forwards of a dispatcher of kernels."""

    def __init__(self, dispatcher: NvlinkDispatcher) -> None:
        self.dispatcher = dispatcher
        self._memories: dict[Any, Memory] = {}
        self._records: dict[Any, Record] = {}

    def forget(self) -> None:
        """Take nothing from the record any more: experts live elsewhere, or choices are counted."""
        self._memories.clear()
        self._records.clear()

    def run(self, x_TD: Tensor, routing: Routing, experts: Any) -> Tensor | None:
        """y_TD; `None`, before any rank has heard of the call, where its steps are to be made one by one."""
        if not self._serves(x_TD, routing, experts):
            return None
        dispatcher, weights = self.dispatcher, (experts.gate_up_proj, experts.down_proj)
        dispatcher.promise = True
        (part,) = dispatcher.agree([(x_TD, routing)])
        kernels = dispatcher.transport.exchange_for(
            dispatcher.size, dispatcher.placed.placement, part.max_tokens, dispatcher.observer
        )
        kernels.layer = dispatcher.layer
        at = kernels.serial, part.max_tokens, part.backward, weights[1].shape
        memory = self._memories.get(at)
        if memory is None:
            memory = self._plan(kernels, part, weights)
            if memory is None or memory.nbytes > MOST_BYTES:
                return self._by_steps(part, x_TD, routing.weights_TK, weights)
            self._memories[at] = memory
        piece = new_piece(memory.nbytes, x_TD.device)
        y_TD, inputs = torch.empty_like(x_TD), (routing.ids_TK, routing.weights_TK, x_TD)
        buffer = 0 if part.is_small else kernels.next_buffer("pull")
        key = (at, len(x_TD), piece.data_ptr(), buffer, weights[0].data_ptr(), weights[1].data_ptr())
        record = self._records.get(key)
        if record is None:
            self._record(key, kernels, part, (memory, piece), inputs, weights, y_TD)
        else:
            kernels.launch_again(record.first, record.kinds, *[tensor.data_ptr() for tensor in inputs])
            for launch in record.between:
                launch.launch()
            check_products(x_TD.get_device())
            self._meet_again()
            kernels.launch_again(record.last, ("combine",), y_TD.data_ptr())
        return y_TD

    def _serves(self, x_TD: Tensor, routing: Routing, experts: Any) -> bool:
        """Whether the call is one of those that are the same every time."""
        dispatcher, ids_TK, weights_TK = self.dispatcher, routing.ids_TK, routing.weights_TK
        if torch.is_grad_enabled() or not on_gpu(x_TD):
            return False
        if not surely_fit(experts) or experts.implementation != "kernels":
            return False
        if experts.one_launch or not experts.inputs_unchanged:
            return False
        gate_up, down = experts.gate_up_proj, experts.down_proj
        if traced(x_TD, ids_TK, weights_TK, gate_up, down):
            return False
        if dispatcher.observer.enabled or dispatcher.placed.by_slot or dispatcher.transport.capturing:
            return False
        if is_coded(dispatcher.wire.dispatch) or is_coded(dispatcher.wire.combine):
            return False
        if not x_TD.dtype == gate_up.dtype == down.dtype == DTYPE or x_TD.dim() != 2 or not len(x_TD):
            return False
        if not (x_TD.is_contiguous() and ids_TK.is_contiguous() and weights_TK.is_contiguous()):
            return False
        return gate_up.is_contiguous() and down.is_contiguous() and fits(*down.shape[1:]) and len(down) > 0

    def _plan(self, kernels: NvlinkExchange, part: Part, weights: Sequence[Tensor]) -> Memory | None:
        """Memory for calls of this size; `None` where routing and rows take two launches, where the host
        asks how many rows there are, and where everything is looked at."""
        dispatcher, (slots, width, inner) = self.dispatcher, weights[1].shape
        shape, room = kernels.shape, most_rows(kernels.shape, part.max_tokens)
        if kernels.debug or dispatcher.counts_first(part, room):
            return None
        if part.is_small:
            few = min(shape.max_tokens, lay.SMALL_TOKENS)
            return memory_of(_sizes(shape), few, shape.row_capacity, room, (slots, width, inner))
        if kernels.place_of_routing(width * DTYPE.itemsize, dispatcher.sms.dispatch) is None:
            return None
        return memory_of(_sizes(shape), shape.max_tokens, room, room, (slots, width, inner))

    def _meet_again(self) -> None:
        if not self.dispatcher.promised:
            self.dispatcher.agree_on_rows(None, DTYPE)

    def _by_steps(
        self, part: Part, x_TD: Tensor, weights_TK: Tensor, weights: tuple[Tensor, Tensor]
    ) -> Tensor:
        dispatcher = self.dispatcher
        arrived = complete(dispatcher.dispatch(part, x_TD, weights_TK, RowForm.ROWS))
        rows_RD, weights_R, counts_e, state, beside = arrived
        out_RD = ffn(rows_RD, *weights, counts_e, weights_R=weights_R, beside=beside)
        self._meet_again()
        return complete(dispatcher.combine(out_RD, None, state, len(x_TD)))

    def _record(
        self,
        key: Any,
        kernels: NvlinkExchange,
        part: Part,
        where: tuple[Memory, Tensor],
        inputs: tuple[Tensor, Tensor, Tensor],
        weights: tuple[Tensor, Tensor],
        y_TD: Tensor,
    ) -> None:
        """Make the launches, and keep them."""
        dispatcher, (memory, piece), (ids_TK, weights_TK, x_TD) = self.dispatcher, where, inputs
        sms, choosing = dispatcher.sms, dispatcher.choosing
        words, rows_RD, *groups, act_RF, out_RD = (part_of(piece, place) for place in memory[:-1])
        routed = Routed.of_words(words, _sizes(kernels.shape))
        row_groups, tokens = RowGroups(*groups), (x_TD, ids_TK, weights_TK)
        with recording() as tape:
            if part.is_small:
                to = {"groups": row_groups, "memory": (rows_RD[None], routed)}
                kernels.dispatch_small(*tokens, sms.small, **to, **choosing)
                expected, rows_RD = kernels.shape.mean_rows(part.max_tokens), rows_RD[: len(out_RD)]
            else:
                kernels.dispatch_expert(*tokens, sms.dispatch, out=rows_RD, routed=routed, **choosing)
                run_spread(routed, len(rows_RD), len(weights[1]), row_groups, load=dispatcher.transport.load)
                expected = 0
            plan = Groups(row_groups.plan, expected=expected)
            run_products(rows_RD, weights, plan, act_RF, out_RD, row_groups.weights)
            self._meet_again()
            kernels.combine(out_RD, routed, weighted=False, num_sms=sms.combine, out=y_TD)
        if len(self._records) >= MOST_RECORDS:
            self._records.clear()
        if len(tape) == (4 if part.is_small else 5):  # products of other GPUs are on no tape
            self._records[key] = self._again(tape, ("small",) if part.is_small else ("pull", "route"))

    def _again(self, tape: Sequence[Any], kinds: tuple[str, ...]) -> Record:
        first, *between, last = tape
        return Record(
            first=first.again(BLANKS[type(first.args[1])]),
            kinds=kinds,
            between=tuple(launch.again() if isinstance(launch, Noted) else launch for launch in between),
            last=last.again(BLANKS[type(last.args[1])]),
        )
