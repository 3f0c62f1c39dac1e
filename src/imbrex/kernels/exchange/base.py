"""An exchange's memory, kernels, epochs and failures: what every call of `NvlinkExchange` stands on."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import Placement
from imbrex.kernels import jit
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.debug import check_choices, poison
from imbrex.kernels.exchange.error import raise_failure
from imbrex.kernels.exchange.route import Choosing, check_shape, route_args
from imbrex.kernels.exchange.variants import ROUTE_MANY, shipped_variants
from imbrex.kernels.heap import Heap
from imbrex.kernels.routing.routed import Routed, Sizes, empty_routed, placement_tables
from imbrex.kernels.structs import Struct

_serials = itertools.count()


class ExchangeBase:
    """One exchange over the ranks of one host.

    make_heap: from a number of bytes to a `Heap` (collective). placement: where the experts live.
    compact, expert: which layouts of rows to keep room for; with neither, only `route` can be called, among
        up to 64 ranks. timeout: seconds.
    route_blocks: SMs that route; 8, or as many as `pull` has where there are expert-major rows only.
    load: `jit.load`, or what stands in for it.

    layer: of the calls that follow, for the message of one that fails; `None`: nobody said.
    """

    def __init__(
        self,
        make_heap: Callable[[int], Heap],
        placement: Placement,
        shape: lay.Shape,
        *,
        compact: bool = True,
        expert: bool = True,
        timeout: float = 60.0,
        route_blocks: int | None = None,
        load: Callable[..., Any] = jit.load,
    ) -> None:
        check_shape(placement, shape, moves=compact or expert)
        self.shape = shape
        self.placement = placement
        # where replicas may come to be, also those of placements that follow
        self._room = max(placement.num_slots - placement.num_experts, 0)
        self.layout = lay.layout(shape, compact=compact, expert=expert)
        self.heap = make_heap(self.layout.nbytes)
        self.device = self.heap.local.device
        self.local_ranks = self.heap.local.shape[0]
        self.timeout = timeout
        self._layer = 0
        self.debug = os.environ.get("IMBREX_DEBUG") == "1"
        self.last_sms: dict[str, int] = {}
        self._calls: dict[str, int] = dict.fromkeys(lay.KINDS, 0)
        self._captured = False
        self._groups: dict[Any, Struct] = {}
        self._places: dict[tuple[int, int], tuple[int, int] | None] = {}
        """`expert_shape` by bytes of a row and multiprocessors."""
        self.serial = next(_serials)
        variants = shipped_variants() if shape.ranks <= lay.MOST_RANKS else [ROUTE_MANY]
        self._load = load
        self._kernels = {variant: load(variant, self.device) for variant in variants}
        wanted = route_blocks or (8 if compact else 24)
        self.route_blocks, self._route_shared = lay.route_blocks(shape, wanted, self._room)
        pinned = self.device.type == "cuda"
        self._status = torch.zeros(self.local_ranks, 8, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._codes = [ctypes.c_int32.from_address(row.data_ptr()) for row in self._status]
        """The first word of every status, in pinned memory that the kernels write: 0 while all is well."""
        self._tables = placement_tables(placement, self.device)
        self._made_for = shape, placement, self._room

    def _route_args(
        self,
        ids: Tensor,
        weights: Tensor,
        tokens: Tensor | None,
        routed: Routed,
        choosing: Choosing,
        *,
        small: bool = False,
    ) -> ctypes.Structure:
        if self.debug:
            check_choices(self.shape, ids, tokens)
        where = self.layout
        at = (where.small_ids, 0, where.small_tokens) if small else (where.ids, where.counts, where.tokens)
        tables = choosing.get("tables") or self._tables
        return route_args(self._made_for, ids, weights, tokens, routed, at, tables, choosing)

    @property
    def layer(self) -> int | None:
        return self._layer - 1 if self._layer else None

    @layer.setter
    def layer(self, layer: int | None) -> None:
        self._layer = 0 if layer is None else 1 + layer
        for group in self._groups.values():
            group.layer = self._layer

    def check(self, *, synchronize: bool = False) -> None:
        """Raise `ExchangeError` if a call has failed; without `synchronize`, of those known to have ended."""
        if synchronize and self.device.type == "cuda":
            # host sync: asked for
            torch.cuda.synchronize(self.device)
        for word in self._codes:
            if word.value:
                # on the host: pinned memory that the kernels write
                raise_failure(self._status.tolist(), self.timeout)

    @property
    def usable(self) -> bool:
        """Whether calls can go on. One that has failed stays so on every rank: `close()` it, and make
        another, if all ranks are there."""
        return not any(word.value for word in self._codes)

    def overflows(self) -> list[int]:
        """How many routings of each local rank did not fit `row_capacity` or `token_capacity`; the flag of
        one of them is in its `totals_L4`."""
        at = lay.OVERFLOWS_AT
        # host sync: asked for
        return self.heap.local[:, at : at + 4].clone().view(torch.int32)[:, 0].tolist()

    def close(self, *, together: bool = True) -> None:
        """Free the heap; collective if `together`, unless the exchange has failed: then its peers may be
        gone."""
        self.heap.close(together=together and self.usable)

    def _launch(
        self,
        variant: jit.Variant,
        kind: str,
        blocks: int,
        threads: int,
        shared: int,
        args: ctypes.Structure,
        besides: Sequence[Any] = (),
        cluster: int = 1,
    ) -> None:
        """`besides`: what a kernel that does more takes behind the ranks and `args`."""
        self.check()
        if not 1 <= blocks <= lay.MAX_BLOCKS:
            raise ValueError(f"exchange: num_sms is {blocks}; it must be 1 to {lay.MAX_BLOCKS}")
        self._calls[kind] += 1
        self.last_sms[kind] = blocks
        self._kernels[variant].launch(
            grid=blocks * self.local_ranks,
            block=threads,
            args=[self._group(blocks), args, *besides],
            smem=shared,
            cluster=cluster,
        )

    def _group(self, blocks: int) -> Struct:
        """The ranks as every kernel is told of them; made once a number of blocks."""
        made = self._groups.get(blocks)
        if made is None:
            made = self._groups[blocks] = lay.Group(
                heap=(ctypes.c_uint64 * lay.MAX_RANKS)(*self.heap.bases),
                timeout_ns=int(self.timeout * 1e9),
                host_status=self._status,
                staged_flags=self.layout.staged_flags,
                reduced_flags=self.layout.reduced_flags,
                flags=self.layout.flags,
                ranks=self.shape.ranks,
                first=self.heap.first,
                blocks=blocks,
                layer=self._layer,
            )
        return made

    def group_of(self, local: int, blocks: int) -> Struct:
        """Makes, once, what a launch of one rank of this process, number `local`, is told of the ranks."""
        group = self._groups.get((local, blocks))
        if group is None:
            whole = self._group(blocks)
            group = self._groups[local, blocks] = type(whole).from_buffer_copy(whole)
            group.first = self.heap.first + local
            group.host_status = self._status[local].data_ptr()
        return group

    def _next_buffer(self, kind: str, *, peek: bool = False) -> tuple[int, int]:
        """The buffer of the next call and how many calls ago it was last used; a captured call keeps its
        buffer, so from the first capture on that may have been the call before."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing() and not peek:
            self._captured = True
        buffers = self.shape.buffers
        return self._calls[kind] % buffers, 1 if self._captured else buffers

    def _count_routing(self, blocks: int) -> None:
        """A kernel that is launched for rows routes too."""
        self._calls["route"] += 1
        self.last_sms["route"] = blocks

    def _empty_routed(self, max_tokens: int) -> Routed:
        shape = self.shape
        sizes = Sizes(self.local_ranks, shape.ranks, shape.choices, shape.most_slots)
        routed = empty_routed(sizes, max_tokens, self.device)
        if self.debug and routed.words_TC is not None:
            poison(routed.words_TC)
        return routed

    def _unwritten(self, tensor: Tensor) -> Tensor:
        return poison(tensor) if self.debug else tensor

    def _poison_expired(self) -> None:
        """The rows whose lease the next push ends; no peer writes there before that has begun."""
        s = self.shape
        call = self._calls["push"] - max(1, s.buffers - 1) + 1
        if self.debug and call > 0:
            start = self.layout.received + (call - 1) % s.buffers * self._buffer_bytes(s.token_capacity)
            poison(self.heap.local[:, start : start + self._buffer_bytes(s.token_capacity)])

    def _buffer_bytes(self, rows: int) -> int:
        return rows * self.shape.row_bytes

    def _row_bytes(self, x: Tensor) -> int:
        if not x.is_contiguous():
            raise ValueError("exchange: the tokens must be contiguous")
        nbytes = x.shape[-1] * x.element_size()
        if nbytes % 16 or nbytes > self.shape.row_bytes:
            raise ValueError(
                f"exchange: rows of {nbytes} bytes; they must be a multiple of 16, at most "
                f"{self.shape.row_bytes}: pad them"
            )
        return nbytes

    def _rows(self, offset: int, buffer: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        rows = self.shape.token_capacity
        start = offset + buffer * self._buffer_bytes(rows)
        part = self.heap.local[:, start : start + rows * width * dtype.itemsize]
        return part.view(dtype).view(self.local_ranks, rows, width)
