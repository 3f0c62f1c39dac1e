"""Dispatch and combine: the part of the layer to use with your own router or experts.

A token goes once to every rank that hosts one of its experts, and is copied there to its expert-major rows.
On the way back, the rows of a token on one rank are weighted and summed there in float32, one partial sum
crosses the wire, and the token's rank adds the partial sums in rank order. So every run has the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.codec import check_bytes, make_wire
from imbrex.contracts import (
    Backend,
    Codec,
    Dispatched,
    Dispatcher,
    Geometry,
    Handle,
    Placement,
    Routing,
    RowForm,
    Split,
    Transport,
    Wire,
)
from imbrex.exchange import autograd
from imbrex.exchange.agreement import SETTLES, agree
from imbrex.exchange.alone import AloneDispatcher
from imbrex.exchange.autograd import Redispatch, StartedCrossing
from imbrex.exchange.bytes import BytesDispatcher
from imbrex.exchange.dispatcher import form_of_arrival
from imbrex.exchange.nvlink import NvlinkDispatcher
from imbrex.exchange.nvlink_fit import why_not_dtype, why_not_nvlink
from imbrex.exchange.tiered import TieredDispatcher
from imbrex.observe import Observer
from imbrex.placement import make_split, split_evenly
from imbrex.placement.split import checked
from imbrex.runtime.checks import NOT_PICKLED, piece
from imbrex.runtime.waits import refuse_lost
from imbrex.transport import Auto, Nvlink, Tiers
from imbrex.transport import make as make_transport
from imbrex.transport.collective import Collective, device_of
from imbrex.transport.nodes import launched_on


class Exchange:
    """Dispatch and combine over one group of ranks.

    placement: where the experts live; `placement.num_ranks * tensor_parallel` is the size of `group`.
    group: the ranks that exchange; rank r is tensor rank `r % tensor_parallel` of expert rank
        `r // tensor_parallel`. `None` is one process alone.
    transport, codec: a name or an object; see `imbrex.transport` and `imbrex.codec`. `auto` picks, and
        `transport_reason` says why.
    split: which replica takes which choice, a name in `imbrex.placement.SPLITS` or a function.
    alignment: rows of a slot are padded to a multiple of it.
    rows_per_slot: given the number of tokens of the group, the rows that every slot is padded to instead.
    dtype: the tokens' dtype; transport `auto` picks `nvlink` only if it knows that they are bfloat16.
    timeout: seconds until a wait for a peer ends in `RankLostError` (`IMBREX_TIMEOUT_S`, 60).
    observer, layer: the observer that hears what happens, and the number of the layer in its records.

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
        transport: str | Backend | Auto = "auto",
        codec: str | Codec | Wire | Mapping[str, str | Codec] = "identity",
        split: str | Split = split_evenly,
        alignment: int = 1,
        rows_per_slot: Callable[[int], int] | None = None,
        dtype: torch.dtype | None = None,
        timeout: float | None = None,
        observer: Observer | None = None,
        layer: int = 0,
    ) -> None:
        self.group, self.world_size = group, 1 if group is None else dist.get_world_size(group)
        self.wire, self.layer = make_wire(codec), layer
        self.geometry = Geometry(
            placement=placement,
            rank=0 if group is None else dist.get_rank(group),
            tensor_parallel=tensor_parallel,
            hidden_size=hidden_size,
            top_k=top_k,
            split=checked(make_split(split)),
            alignment=alignment,
            rows_per_slot=rows_per_slot,
        )
        row_problem, dtype_problem = why_not_nvlink(self.geometry, self.wire), why_not_dtype(dtype)
        automatic = isinstance(transport, Auto) or transport == "auto"
        self._missed_for_dtype = automatic and self.world_size > 1 and not row_problem and bool(dtype_problem)
        self._make_transport = partial(
            make_transport,
            transport,
            group,
            num_ranks=placement.num_ranks,
            top_k=top_k,
            timeout=timeout,
            row_bytes=self.wire.dispatch.nbytes(hidden_size, dtype or torch.float32),
        )
        _agree_on_transport(Collective(group, timeout=timeout), transport, row_problem or dtype_problem)
        self.transport, self.transport_reason = self._make_transport(not_nvlink=row_problem or dtype_problem)
        problem, observer = None, observer or Observer()
        try:
            self._check()
            parts = self.transport, self.geometry, self.wire, observer, layer
            self.dispatcher: Dispatcher = dispatcher_of(*parts)
        except ValueError as error:
            problem = error
        self._agree(layer, problem)
        if self.world_size == 1 and automatic:
            alone = AloneDispatcher(self.geometry, self.dispatcher, observer, layer)
            self.dispatcher = alone
            by_kernels = alone.why_not_dtype(dtype) is None
            self.transport_reason += "; kernels order and sum its rows" if by_kernels else ""

    def _agree(self, layer: int, problem: ValueError | None) -> None:
        """Compare settings with all ranks. The first rank's key of its dispatcher becomes this exchange's
        number."""
        own = launched_on(), 0 if problem else self.dispatcher.key // autograd.MAX_SIGNATURES
        words_W = agree(self.transport, self._settings(layer), "Exchange", problem, own=own)
        self.dispatcher.take_agreement(words_W[0][1], [node for node, _ in words_W])

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
    def observer(self) -> Observer:
        return self.dispatcher.observer  # pyright: ignore[reportReturnType]

    @observer.setter
    def observer(self, observer: Observer) -> None:
        for dispatcher in self.dispatcher.family:
            dispatcher.observer = observer

    def relocate(self, placement: Placement | None = None, split: Split | None = None) -> None:
        """Move experts to `placement`, and choose replicas by `split`, from the next dispatch on. Earlier
        dispatches are combined and differentiated as planned. Every rank must call this between the same two
        dispatches, when the weights are already in their new places.

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
        for dispatcher in self.dispatcher.family:
            dispatcher.relocate(self.geometry)

    @property
    def counts_on_device(self) -> bool:
        """Whether choices between replicas are made on the device; `count_into` works then. Otherwise the
        split is a function that gets all counts."""
        return self.dispatcher.counts_on_device

    def count_into(self, tally_WS: Tensor | None) -> None:
        """Add, from the next dispatch on, the choices of every rank for every slot to int32 [W, S], in place
        on the device; `None` ends it. A captured call keeps adding to the tensor it was captured with. Raises
        ValueError unless `counts_on_device`.
        """
        self._missed_for_dtype = False  # another dispatcher would not know of it
        self.dispatcher.count_into(tally_WS)

    def check_in(
        self,
        x: Tensor,
        *,
        kept_TK: Tensor | None = None,
        herald: Callable[[Tensor, Routing], None] | None = None,
    ) -> None:
        """Tell the other ranks whether tokens [..., D] can be dispatched; raise ValueError on every rank if
        one rank's cannot. For callers that communicate between having tokens and dispatching them.

        kept_TK: a mask, which must be bool and have one entry for each choice. herald: a strategy's way to
            tell the others, whose ranks do not meet in the exchange of counts (`contracts.Heralding`).
        """
        tell = herald or self.dispatcher.check_in
        tell(*autograd.without_choices(x, self.geometry.top_k, kept_TK))

    def dispatch(
        self,
        x_TD: Tensor,
        routing: Routing,
        *,
        forms: Sequence[RowForm] = (RowForm.ROWS,),
        promise: bool = False,
    ) -> Dispatched:
        """Rows for the local experts. Differentiable in `x_TD` and `routing.weights_TK`.

        x_TD: [T, hidden_size], float32, bfloat16, float16 or float64; T may differ between ranks and be 0.
        forms: the forms in which rows may come, the best first. They come in the first one that this call
            allows, else as plain rows; `Dispatched.form` says which. fp8 needs bfloat16 tokens that cross in
            fp8; an index needs kernels that serve a rank alone; both need a call without gradients and
            tracing. Ranks may ask for different forms: the same bytes cross.
        promise: you will give `combine` rows that fit these, and no addend. If all ranks promise, they need
            not meet again in the combine. If a rank breaks its promise, the others learn it by their
            time-out. Raises ValueError on every rank, before any row moves, where one rank's input is wrong;
            RankLostError where a rank does not answer.
        """
        compiling, wants_rows = torch.compiler.is_compiling(), forms[0] is RowForm.ROWS
        if not compiling:
            self._check_devices(x_TD, routing)
        dispatcher = self.dispatcher.for_call(x_TD, routing)
        if not compiling:
            dispatcher.promise = promise
        form = RowForm.ROWS if wants_rows else dispatcher.form_of(forms, x_TD, routing.weights_TK)
        if form is RowForm.ROWS:
            inputs = x_TD, routing.weights_TK, routing.ids_TK
            arrived = autograd.dispatch(*inputs, dispatcher.key)
        else:
            (plan,) = dispatcher.agree([(x_TD, routing)], form)
            crossing = dispatcher.dispatch(plan, x_TD, routing.weights_TK, form)
            arrived = autograd.complete(crossing)
        rows_RD, weights_R, counts_e, state, beside = arrived
        form = form_of_arrival(form, beside)
        handle = Handle(
            weights_R=weights_R,
            state=tuple(state),
            num_tokens=x_TD.shape[0],
            maker=dispatcher.key,
            # A compiled graph would hold only for calls with the same promise.
            promised=not compiling and dispatcher.promised,
        )
        return Dispatched(
            rows_RD=rows_RD,
            counts_e=counts_e,
            handle=handle,
            form=form,
            scales_RB=beside if form is RowForm.FP8 else None,
            index_R=beside if form is RowForm.INDEXED else None,
            beside=beside if form is RowForm.ROWS else None,
        )

    def begin_dispatch(self, x_TD: Tensor, routing: Routing) -> BegunDispatch:
        """Start a dispatch; `finish()` returns what `dispatch` returns. Not inside a compiled graph."""
        self._check_devices(x_TD, routing)
        return BegunDispatch(self.dispatcher.for_call(x_TD, routing), x_TD, routing)

    def redispatching(self, x_TD: Tensor, dispatched: Dispatched) -> Redispatch:
        """A context in which the experts' computation keeps no rows for its backward. The backward dispatches
        them again: one more crossing saves the memory of R rows. Every rank must do it. x_TD: the tokens that
        were dispatched. Pass the context to the `combine` of these rows, as `redispatch`."""
        return Redispatch(x_TD, dispatched)

    def settle(self, x: Tensor) -> None:
        """Choose the transport again before the first call. If `auto` passed over `nvlink` only because of
        the dtype, and the tokens of all ranks turn out to be bfloat16, as under autocast, take it now.
        Collective over the group, whose ranks all have the same settings; does nothing afterwards. Raises
        ValueError on every rank where one's input is wrong, or a compiled call dispatches already."""
        if not self._missed_for_dtype or self.group is None or not _may_choose_again(self.group):
            return
        self.dispatcher.check_in(*autograd.without_choices(x, self.geometry.top_k), before=SETTLES)
        if x.dtype != torch.bfloat16:  # on no rank, then
            return
        self._missed_for_dtype = False
        transport, reason = self._make_transport()
        if not isinstance(transport, Nvlink):
            self.transport_reason = reason
            return
        self.transport, self.transport_reason = transport, f"{reason}, seen at the first call"
        observer, layer = self.observer, self.layer
        self.dispatcher = dispatcher_of(transport, self.geometry, self.wire, observer, layer)
        self._agree(layer, None)

    def _check_devices(self, x_TD: Tensor, routing: Routing) -> None:
        if not isinstance(x_TD, Tensor) or not isinstance(routing, Routing):
            raise TypeError(
                f"dispatch: x is a {type(x_TD).__name__}, its routing a {type(routing).__name__}; give "
                "tokens [T, D] and imbrex.Routing(ids_TK=..., weights_TK=...)"
            )
        if self._missed_for_dtype:
            self._tell_of_dtype(x_TD.dtype, x_TD.device.type)
        if not x_TD.device == routing.ids_TK.device == routing.weights_TK.device:
            # An operator would refuse tensors on several devices before its body can tell the other ranks.
            self.dispatcher.check_in(x_TD, routing)

    def _tell_of_dtype(self, dtype: torch.dtype, device_type: str) -> None:
        """Warn if `auto` chose by a dtype that autocast or `.to(torch.bfloat16)` has changed since."""
        if dtype == torch.bfloat16 and device_type == "cuda":
            self._missed_for_dtype = False
            warnings.warn(
                f"transport 'auto' took {self.transport.name} for tokens that are not bfloat16, and these "
                "are: give dtype=torch.bfloat16 or transport='nvlink', and kernels over NVLink can move them",
                stacklevel=4,
            )

    def combine(
        self,
        rows_RD: Tensor,
        handle: Handle,
        addend: Tensor | None = None,
        *,
        weighted: bool = False,
        redispatch: Redispatch | None = None,
    ) -> Tensor:
        """Outputs [T, D] in the rows' dtype: the rows of every token times their weights, summed, plus
        `addend` [T, D] in the same float32 reduction. Differentiable in the rows, the weights and the addend.

        weighted: the rows are already times `handle.weights_R`, and are only summed.
        redispatch: the context of `redispatching`, if the rows were computed in it.
        Raises ValueError if the rows do not belong to this dispatch: another number, width, dtype or device,
        or the handle of another exchange. Every rank raises; over NCCL only at the first combine.
        """
        if not torch.compiler.is_compiling():
            self.check_rows(rows_RD, handle, addend)
        return autograd.combine(rows_RD, handle, addend, weighted, redispatch=redispatch)

    def begin_combine(self, rows_RD: Tensor, handle: Handle, *, weighted: bool = False) -> BegunCombine:
        """Start a combine; `finish(addend)` returns what `combine` returns. Not inside a compiled graph."""
        self.check_rows(rows_RD, handle)
        return BegunCombine(rows_RD, handle, weighted)

    def __deepcopy__(self, memo: dict[int, object]) -> Exchange:
        """Return itself: copies of a model move their rows through the exchange of the original."""
        return self

    def __reduce_ex__(self, protocol: object) -> str:
        """Refuse pickle, which calls this."""
        raise TypeError(NOT_PICKLED)

    def check(self, *, synchronize: bool = False) -> None:
        """Raise if a call has failed on the device, so that its results are wrong. Over `nvlink` the error is
        `imbrex.kernels.exchange.failures.ExchangeError`, over NCCL `RankLostError`. The next call,
        `sync_gradients` and an optimizer's step check by themselves. A loop that replays a CUDA graph must
        call this, or it goes on with NaN.

        synchronize: wait for the device first; otherwise a call still running is not known to have failed.
        """
        self.dispatcher.check(synchronize=synchronize)
        refuse_lost(self.group)

    def check_rows(
        self, rows_RD: Tensor, handle: Handle, addend: Tensor | None = None, *, together: bool = True
    ) -> None:
        """Raise ValueError if `combine` cannot sum these rows; on every rank if `together`. Over NCCL ranks
        tell each other only at the first combine."""
        if not isinstance(rows_RD, Tensor) or not isinstance(handle, Handle):
            raise TypeError(
                f"combine: rows are a {type(rows_RD).__name__}, their handle a {type(handle).__name__}; "
                "give one tensor, a row for every row of the dispatch, and the handle that came with them"
            )
        problem = self._why_not_rows(rows_RD, handle, addend)
        together = together and not handle.promised
        if together and not (rows_RD.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.dispatcher.agree_on_rows(problem, rows_RD.dtype)
        if problem is not None:
            raise ValueError(f"combine: on rank {self.geometry.rank}, {problem}")

    def _why_not_rows(self, rows_RD: Tensor, handle: Handle, addend: Tensor | None) -> str | None:
        maker = self.dispatcher
        if maker.key != handle.maker:
            maker = next((member for member in maker.family if member.key == handle.maker), None)
        if maker is None:
            return "the handle is of another exchange; give the one that came with the rows"
        shape, weights_R = (handle.weights_R.shape[0], self.geometry.hidden_size), handle.weights_R
        if rows_RD.shape != shape:
            return f"rows are {list(rows_RD.shape)}; give a row for every row of the dispatch, {list(shape)}"
        if rows_RD.dtype not in maker.dtypes:
            return f"rows are {rows_RD.dtype}; give {' or '.join(map(str, maker.dtypes))}"
        if rows_RD.device != weights_R.device:
            return f"rows are on {rows_RD.device}; give them on {weights_R.device}, as dispatched"
        return None if addend is None else _why_not_addend(addend, rows_RD, handle.num_tokens, maker)

    def close(self) -> None:
        """Drop unfinished calls. The last exchange that shares a transport also frees what the transport
        holds. The exchange cannot be used afterwards. Asks no other rank."""
        for dispatcher in self.dispatcher.family:
            dispatcher.close()


class BegunDispatch:
    """A dispatch under way."""

    def __init__(self, dispatcher: Dispatcher, x_TD: Tensor, routing: Routing) -> None:
        self._inputs = x_TD, routing.weights_TK, routing.ids_TK, dispatcher.key
        with torch.no_grad():
            (plan,) = dispatcher.agree([(x_TD, routing)])
            self._started = StartedCrossing(dispatcher.dispatch(plan, x_TD, routing.weights_TK))

    def finish(self) -> Dispatched:
        """Wait for the rows. Call it once."""
        x_TD, *_, key = self._inputs
        rows_RD, weights_R, counts_e, state, _ = autograd.dispatch(*self._inputs, self._started)
        handle = Handle(weights_R=weights_R, state=tuple(state), num_tokens=x_TD.shape[0], maker=key)
        return Dispatched(rows_RD=rows_RD, counts_e=counts_e, handle=handle)


class BegunCombine:
    """A combine under way."""

    def __init__(self, rows_RD: Tensor, handle: Handle, weighted: bool) -> None:
        self._rows_RD, self._handle, self._weighted = rows_RD, handle, weighted
        self._addend_TD: Tensor | None = None
        self._dispatcher: Dispatcher = autograd.dispatcher_by(handle.maker)
        inputs = rows_RD, None if weighted else handle.weights_R, handle.state, handle.num_tokens
        with torch.no_grad():
            self._started = StartedCrossing(self._dispatcher.combine(*inputs, lambda: self._addend_TD))

    def finish(self, addend: Tensor | None = None) -> Tensor:
        """Wait for the partial sums, and add them and `addend`. Call it once. Raises ValueError, on this rank
        alone, if the addend does not fit; you may then call it with another."""
        if addend is not None:
            problem = _why_not_addend(addend, self._rows_RD, self._handle.num_tokens, self._dispatcher)
            if problem is not None:
                raise ValueError(f"combine: {problem}")
        self._addend_TD = addend
        return autograd.combine(self._rows_RD, self._handle, addend, self._weighted, started=self._started)


def _why_not_addend(addend: Tensor, rows_RD: Tensor, tokens: int, maker: Dispatcher) -> str | None:
    """Why a combine of these rows cannot add this addend, or `None`."""
    expected = [tokens, rows_RD.shape[1]]
    if list(addend.shape) != expected:
        return f"the addend is {list(addend.shape)}; give a row for every token, {expected}"
    if addend.device != rows_RD.device:
        return f"the addend is on {addend.device}, the rows on {rows_RD.device}; give both on one device"
    if addend.dtype not in maker.dtypes:
        return f"the addend is {addend.dtype}; give {' or '.join(map(str, maker.dtypes))}"
    return None


def _agree_on_transport(group: Collective, transport: str | Backend | Auto, not_nvlink: str | None) -> None:
    """Raise ValueError on every rank where transports are not made alike: each of them meets the other ranks
    in its own way, and where messages are of unequal sizes gloo ends the process."""
    kind = transport if isinstance(transport, str) else "auto" if isinstance(transport, Auto) else "an object"
    fits = "yes" if kind == "auto" and not_nvlink is None else "no"
    settings = {"the transport": kind, "whether nvlink would do (dtype, codec, sizes)": fits}
    agree(group, settings, "Exchange")


def _may_choose_again(group: dist.ProcessGroup) -> bool:
    return device_of(group).type == "cuda"


def dispatcher_of(
    backend: Backend, geometry: Geometry, wire: Wire, observer: Observer, layer: int
) -> Dispatcher:
    """The dispatcher for a backend: kernels for `Nvlink`, bytes for a `Transport`, both for `Tiers`. This is
    the one place that asks which it is. Raises ValueError if the backend cannot serve the exchange."""
    if isinstance(backend, Nvlink):
        reason = why_not_nvlink(geometry, wire)
        if reason is not None:
            raise ValueError(f"Exchange: transport 'nvlink' cannot serve it: {reason}; use 'alltoall'")
        return NvlinkDispatcher(geometry, backend, wire, observer, layer)
    if isinstance(backend, Tiers):
        return TieredDispatcher(geometry, backend, wire, observer, layer)
    transport = piece("transport of bytes", cast("Transport", backend))
    encoded = {wire.combine.name, wire.dispatch_backward.name} - {"identity"}
    if transport.replicated and encoded and not transport.sums_encoded:
        raise ValueError(
            f"Exchange: the {transport.name} transport has no sum_encoded and cannot carry rows "
            f"written as {encoded.pop()}; use codec='identity', or transport 'allreduce' or 'alltoall'"
        )
    return BytesDispatcher(geometry, transport, wire, observer, layer)
