"""Dispatch and combine for people who bring their own router or experts.

A token goes once to every rank that hosts one of its experts; there it is copied to its expert-major rows.
On the way back, the rows of a token on one rank are weighted and summed there in float32, one partial sum
crosses the wire, and the token's rank adds the partial sums in rank order: the same bits every run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.codec import check_bytes, make_wire
from imbrex.contracts import Codec, Dispatched, Handle, Placement, Routing, Split, Transport, Wire
from imbrex.exchange import crossings_fp8, eager
from imbrex.exchange.agreement import DTYPES, agree
from imbrex.exchange.crossings import Crossings
from imbrex.exchange.crossings_alone import STATE as ALONE
from imbrex.exchange.crossings_alone import AloneCrossings
from imbrex.exchange.crossings_nvlink import NvlinkCrossings
from imbrex.exchange.geometry import Geometry
from imbrex.exchange.nvlink_fit import unfit, unfit_use
from imbrex.observe import Observer
from imbrex.placement import make_split, split_evenly
from imbrex.runtime.tracing import differentiated
from imbrex.transport import Auto, Nvlink
from imbrex.transport import make as make_transport
from imbrex.transport.nodes import Nodes, launched_on


class Exchange:
    """Dispatch and combine over one group of ranks.

    placement: where the experts live; `placement.num_ranks * tensor_parallel` is the size of `group`.
    group: the ranks that exchange; rank r is tensor rank `r % tensor_parallel` of expert rank
        `r // tensor_parallel`. `None` is one process alone.
    transport, codec: a name or an object; see `imbrex.transport` and `imbrex.codec`. `auto` picks, and
        `transport_reason` says why.
    split: which replica takes which choice, a name in `imbrex.placement.SPLITS` or a function.
    alignment: rows of a slot are padded to a multiple of it.
    rows_per_slot: from the tokens of the group to the rows that every slot is padded to instead.
    dtype: what transport `auto` must know to pick `nvlink`: that tokens are bfloat16.
    timeout: seconds until a wait for a peer ends in `RankLostError` (`IMBREX_TIMEOUT_S`, 60).
    observer, layer: who is told what happens, and under which number.

    Raises ValueError, on every rank, where the settings make no sense or differ between ranks.
    """

    def __init__(
        self,
        placement: Placement,
        hidden_size: int,
        top_k: int,
        *,
        group: dist.ProcessGroup | None = None,
        tensor_parallel: int = 1,
        transport: str | Transport | Auto = "auto",
        codec: str | Codec | Wire | Mapping[str, str | Codec] = "identity",
        split: str | Split = split_evenly,
        alignment: int = 1,
        rows_per_slot: Callable[[int], int] | None = None,
        dtype: torch.dtype | None = None,
        timeout: float | None = None,
        observer: Observer | None = None,
        layer: int = 0,
    ) -> None:
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.wire = make_wire(codec)
        self.geometry = Geometry(
            placement=placement,
            rank=0 if group is None else dist.get_rank(group),
            tensor_parallel=tensor_parallel,
            hidden_size=hidden_size,
            top_k=top_k,
            split=make_split(split),
            alignment=alignment,
            rows_per_slot=rows_per_slot,
        )
        misfit, misuse = unfit(self.geometry, self.wire), unfit_use(dtype)
        automatic = isinstance(transport, Auto) or transport == "auto"
        asks_dtype = self.world_size > 1 and automatic
        self._missed_for_dtype = asks_dtype and misfit is None and misuse is not None
        self.transport, self.transport_reason = make_transport(
            transport,
            group,
            num_ranks=placement.num_ranks,
            top_k=top_k,
            timeout=timeout,
            not_nvlink=misfit or misuse,
            row_bytes=self.wire.dispatch.nbytes(hidden_size, dtype or torch.float32),
        )
        problem, observer = None, observer or Observer()
        self._alone = None
        if self.world_size == 1 and automatic:
            self._alone = AloneCrossings(self.geometry, observer, layer)
            by_kernels = self._alone.reason_against(dtype) is None
            self.transport_reason += "; kernels order and sum its rows" if by_kernels else ""
        try:
            self._check()
            self._crossings = self._make_crossings(observer, layer)
        except ValueError as error:
            problem = error
        node_of_W = agree(self.transport, self._settings(layer), "Exchange", problem, own=launched_on())
        if isinstance(self._crossings, Crossings):
            self._crossings.nodes = Nodes.in_blocks(node_of_W)

    def _make_crossings(self, observer: Observer, layer: int) -> Crossings | NvlinkCrossings:
        if isinstance(self.transport, Nvlink):
            reason = unfit(self.geometry, self.wire)
            if reason is not None:
                raise ValueError(f"Exchange: transport 'nvlink' cannot serve it: {reason}; use 'alltoall'")
            return NvlinkCrossings(self.geometry, self.transport, self.wire, observer, layer)
        return Crossings(self.geometry, self.transport, self.wire, self.world_size, observer, layer)

    def _check(self) -> None:
        geometry = self.geometry
        ranks, tensor = geometry.placement.num_ranks, geometry.tensor_parallel
        if tensor < 1 or ranks * tensor != self.world_size:
            raise ValueError(
                f"Exchange: {ranks} expert ranks x {tensor} tensor ranks do not make a group of "
                f"{self.world_size}; give a placement for {self.world_size} / tensor_parallel ranks"
            )
        num_experts = geometry.placement.num_experts
        if not 1 <= geometry.top_k <= num_experts:
            raise ValueError(
                f"Exchange: top_k is {geometry.top_k}; use 1 to {num_experts}, the number of experts"
            )
        check_bytes(self.wire, geometry.hidden_size)
        encoded = {self.wire.combine.name, self.wire.dispatch_backward.name} - {"identity"}
        if self.transport.replicated and encoded and not hasattr(self.transport, "sum_encoded"):
            raise ValueError(
                f"Exchange: the {self.transport.name} transport has no sum_encoded and cannot carry rows "
                f"written as {encoded.pop()}; use codec='identity', or transport 'allreduce' or 'alltoall'"
            )

    def _settings(self, layer: int) -> dict[str, int | str]:
        geometry, wire = self.geometry, self.wire
        codecs = wire.dispatch, wire.combine, wire.dispatch_backward, wire.combine_backward
        return {
            "hidden_size": geometry.hidden_size,
            "top_k": geometry.top_k,
            "the number of experts": geometry.placement.num_experts,
            "the placement": repr(geometry.placement),
            "the split": getattr(geometry.split, "__name__", type(geometry.split).__name__),
            "tensor_parallel": geometry.tensor_parallel,
            "the transport": self.transport.name,
            "the codecs": " ".join(codec.name for codec in codecs),
            "the alignment": geometry.alignment,
            "the layer": layer,
        }

    @property
    def _all_crossings(self) -> list[Crossings | NvlinkCrossings | AloneCrossings]:
        return [self._crossings] if self._alone is None else [self._crossings, self._alone]

    @property
    def observer(self) -> Observer:
        return self._crossings.observer

    @observer.setter
    def observer(self, observer: Observer) -> None:
        for crossings in self._all_crossings:
            crossings.observer = observer

    @property
    def layer(self) -> int:
        return self._crossings.layer

    def relocate(self, placement: Placement | None = None, split: Split | None = None) -> None:
        """From the next dispatch on, experts live at `placement` and `split` chooses replicas. What was
        dispatched before is combined and differentiated as it was planned. Every rank must call it between
        the same two dispatches, with weights that are already there.

        Raises ValueError where the placement has other experts, or other slots per rank.
        """
        old = self.geometry.placement
        new = old if placement is None else placement
        if (new.num_experts, new.rank_offsets) != (old.num_experts, old.rank_offsets):
            raise ValueError(
                f"Exchange: from {old.num_experts} experts in slots {old.rank_offsets} to {new.num_experts} "
                f"in {new.rank_offsets}; a placement of another shape needs a new exchange"
            )
        self.geometry = replace(self.geometry, placement=new, split=split or self.geometry.split)
        for crossings in self._all_crossings:
            crossings.geometry = self.geometry

    @property
    def counts_on_device(self) -> bool:
        """Whether replicas are split on the device, where `count_into` counts. Elsewhere the split is a
        function that is given all counts."""
        return isinstance(self._crossings, NvlinkCrossings) and self._crossings.counts_on_device

    def count_into(self, tally_WS: Tensor | None) -> None:
        """From the next dispatch on, add the choices of every rank for every slot to int32 [W, S], in place
        on the device; `None` ends it. A captured call goes on adding to the tensor that it was captured with.
        """
        assert isinstance(self._crossings, NvlinkCrossings)
        self._crossings.tally_WS = tally_WS

    def problem_with(self, x: Tensor) -> bool:
        """Whether tokens [..., D] have a wrong width, dtype or device."""
        wrong_shape = x.dim() < 1 or x.shape[-1] != self.geometry.hidden_size
        return wrong_shape or x.dtype not in DTYPES or x.device.type != self._crossings.device_type(x)

    def check_in(self, x: Tensor) -> None:
        """Tell the other ranks whether tokens [..., D] can be dispatched: ValueError on every rank where one
        rank's cannot. For callers who communicate between having tokens and dispatching them. A rank that
        finds its own tokens wrong may call it alone: the others hear it in their `dispatch`."""
        x_TD = x.reshape(-1, x.shape[-1]) if x.dim() else x[None, None]
        ids_TK = torch.full((x_TD.shape[0], self.geometry.top_k), -1, dtype=torch.int64, device=x.device)
        weights_TK = torch.zeros(ids_TK.shape, dtype=torch.float32, device=x.device)
        self._crossings.handshake(x_TD, Routing(ids_TK=ids_TK, weights_TK=weights_TK))

    def dispatch(
        self, x_TD: Tensor, routing: Routing, *, fp8_rows: bool = False, in_place: bool = False
    ) -> Dispatched:
        """Rows for the local experts. Differentiable in `x_TD` and `routing.weights_TK`.

        x_TD: [T, hidden_size], float32, bfloat16, float16 or float64; T may differ between ranks and be 0.
        fp8_rows: leave rows as they cross, with `scales_RB`, where that is fp8, tokens are bfloat16, and
            nobody differentiates or traces; elsewhere rows come as they do without it. Ranks may differ in
            it: the same bytes cross.
        in_place: leave the tokens where they are, and give `index_R` from rows to them, where kernels serve a
            rank alone and nobody differentiates; elsewhere rows come as they do without it.
        Raises ValueError on every rank, before any row moves, where one rank's input is wrong; RankLostError
        where a rank does not answer.
        """
        return self._dispatch(x_TD, routing, -1, fp8_rows=fp8_rows, in_place=in_place)

    @property
    def not_fp8_rows(self) -> str | None:
        """None if rows cross in fp8, so that `dispatch(fp8_rows=True)` can leave them so, else why not."""
        return crossings_fp8.unfit(self.wire, self.geometry.hidden_size)

    def leaves_fp8_rows(self, x_TD: Tensor, weights_TK: Tensor) -> bool:
        """Whether a dispatch of these that is asked for rows in fp8 gives them."""
        return self.not_fp8_rows is None and not crossings_fp8.unfit_call(x_TD, weights_TK)

    @contextmanager
    def dispatching_again(self, x_TD: Tensor, dispatched: Dispatched) -> Iterator[None]:
        """What is computed inside keeps no rows for its backward: they are dispatched again when it wants
        them, one crossing for the memory of R rows. `x_TD` is what was dispatched; every rank must do it."""
        kept, state = dispatched.rows_RD, dispatched.handle.state
        address, shape, x_TD = kept.data_ptr(), kept.shape, x_TD.detach()
        del kept, dispatched

        def pack(saved: Tensor) -> Tensor | None:
            return None if saved.data_ptr() == address and saved.shape == shape else saved

        def unpack(packed: Tensor | None) -> Tensor:
            if packed is not None:
                return packed
            return self._that_made(state).dispatch_again(x_TD, state, shape[0])

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def begin_dispatch(self, x_TD: Tensor, routing: Routing) -> BegunDispatch:
        """Start a dispatch; its `finish()` gives what `dispatch` gives. Not inside a compiled graph."""
        with torch.no_grad():
            started = self._crossings.start_dispatch(x_TD, routing.weights_TK, routing.ids_TK)
        return BegunDispatch(self, x_TD, routing, self._crossings.begin(*started))

    def _dispatch(
        self,
        x_TD: Tensor,
        routing: Routing,
        ticket: int,
        *,
        fp8_rows: bool = False,
        in_place: bool = False,
    ) -> Dispatched:
        if not torch.compiler.is_compiling():
            if self._missed_for_dtype:
                self._tell_of_dtype(x_TD.dtype, x_TD.device.type)
            if not x_TD.device == routing.ids_TK.device == routing.weights_TK.device:
                # An operator refuses tensors of several devices before its body can tell the other ranks.
                self._crossings.handshake(x_TD, routing)
        inputs, scales_RB, index_R = (x_TD, routing.weights_TK, routing.ids_TK), None, None
        alone = self._alone if ticket < 0 else None
        if alone is not None and not alone.serves(x_TD, routing):
            alone = None
        if fp8_rows and self.leaves_fp8_rows(*inputs[:2]):
            found = crossings_fp8.dispatch_fp8(self._crossings, *inputs)
            (rows_RD, scales_RB), weights_R, counts_e, state = found
        elif in_place and alone is not None and not differentiated(*inputs[:2]):
            (rows_RD, index_R), weights_R, counts_e, state = alone.dispatch_in_place(*inputs)
        else:
            taken = self._crossings if alone is None else alone
            rows_RD, weights_R, counts_e, state = eager.dispatch(*inputs, taken.key, ticket)
        handle = Handle(weights_R=weights_R, state=tuple(state), num_tokens=x_TD.shape[0])
        return Dispatched(
            rows_RD=rows_RD, counts_e=counts_e, handle=handle, scales_RB=scales_RB, index_R=index_R
        )

    def _that_made(self, state: Sequence[Tensor]) -> Crossings | NvlinkCrossings | AloneCrossings:
        """Whose dispatch left this state."""
        if self._alone is not None and len(state) == len(ALONE):
            return self._alone
        return self._crossings

    def _tell_of_dtype(self, dtype: torch.dtype, device_type: str) -> None:
        """Autocast and `.to(torch.bfloat16)` come after `auto` has chosen by the dtype."""
        if dtype == torch.bfloat16 and device_type == "cuda":
            self._missed_for_dtype = False
            warnings.warn(
                f"transport 'auto' took {self.transport.name} for tokens that are not bfloat16, and these "
                "are: give dtype=torch.bfloat16, or transport='nvlink' under autocast, and kernels over "
                "NVLink can move them",
                stacklevel=4,
            )

    def combine(
        self, rows_RD: Tensor, handle: Handle, addend: Tensor | None = None, *, weighted: bool = False
    ) -> Tensor:
        """Outputs [T, D] in the rows' dtype: the rows of every token times their weights, summed, plus
        `addend` [T, D] in the same float32 reduction. Differentiable in the rows, the weights and the addend.

        weighted: the rows are already times `handle.weights_R`, and are only summed.
        """
        return self._combine(rows_RD, handle, addend, weighted, -1)

    def begin_combine(self, rows_RD: Tensor, handle: Handle, *, weighted: bool = False) -> BegunCombine:
        """Start a combine; its `finish(addend)` gives what `combine` gives. Not inside a compiled graph."""
        weights_R = None if weighted else handle.weights_R
        crossings = self._that_made(handle.state)
        with torch.no_grad():
            started = crossings.start_combine(rows_RD, weights_R, handle.state, handle.num_tokens)
        return BegunCombine(self, rows_RD, handle, weighted, crossings.begin(*started))

    def _combine(
        self, rows_RD: Tensor, handle: Handle, addend: Tensor | None, weighted: bool, ticket: int
    ) -> Tensor:
        return eager.combine(
            rows_RD,
            handle.weights_R,
            addend,
            handle.state,
            handle.num_tokens,
            self._that_made(handle.state).key,
            ticket,
            weighted,
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Exchange:
        """Itself: copies of a model move their rows through one exchange, as its layers' calls do."""
        return self

    def __reduce_ex__(self, protocol: object) -> str:
        """What pickle asks."""
        raise TypeError(
            "Exchange: it cannot be pickled, nor can a model with a MoELayer, whose group is this process's; "
            "save model.state_dict(), over ranks with imbrex.parallel.checkpoint, and load into a new model"
        )

    def check(self, *, synchronize: bool = False) -> None:
        """Raise where a call has failed on the device, whose results are wrong: over `nvlink`,
        `imbrex.kernels.exchange.error.ExchangeError`. The next call, `sync_gradients` and the step of an
        optimizer do it by themselves; a loop that replays a CUDA graph asks, or goes on with old outputs.

        synchronize: wait for the device first; else calls that have not ended are not known to have failed.
        """
        check = getattr(self.transport, "check", None)
        if check is not None:
            check(synchronize=synchronize)

    def close(self) -> None:
        """Forget what was begun and free what the transport holds. The exchange cannot be used afterwards."""
        for crossings in self._all_crossings:
            crossings.close()


class BegunDispatch:
    """A dispatch under way."""

    def __init__(self, exchange: Exchange, x_TD: Tensor, routing: Routing, ticket: int) -> None:
        self._finish = lambda: exchange._dispatch(x_TD, routing, ticket)

    def finish(self) -> Dispatched:
        """Wait for the rows; once."""
        return self._finish()


class BegunCombine:
    """A combine under way."""

    def __init__(
        self, exchange: Exchange, rows_RD: Tensor, handle: Handle, weighted: bool, ticket: int
    ) -> None:
        self._finish = lambda addend: exchange._combine(rows_RD, handle, addend, weighted, ticket)

    def finish(self, addend: Tensor | None = None) -> Tensor:
        """Wait for the partial sums and add them, and `addend`; once."""
        return self._finish(addend)
