"""The meeting of ranks before a dispatch over NVLink: on their board, hosts tell of their tokens and compare
what they call, and then all find the kernels that serve the rank with the most tokens. `nvlink.py` moves the
rows.

The kernels choose replicas in equal parts or by the loads of the batch. Any other split is computed on the
host, after one synchronisation, and the kernels get slots as experts (`nvlink_fit.kernel_placement`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import Geometry, Listener, Routing, RowForm, Wire
from imbrex.exchange import plan
from imbrex.exchange.agreement import explain, find_problem, raise_together
from imbrex.exchange.dispatcher import WiredDispatcher
from imbrex.exchange.nvlink_fit import (
    DTYPE,
    NOTES,
    Part,
    Spared,
    is_coded,
    kernel_placement,
    part_of,
)
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.exchange.launches import Choosing
from imbrex.kernels.routing.routed import Routed, Sizes, Tables, placement_tables, write_tables
from imbrex.runtime.checks import debug_is_on
from imbrex.transport.nvlink import Nvlink, Size


class NvlinkMeeting(WiredDispatcher):
    """The meeting of ranks before a dispatch, for one placement. Tokens are bfloat16.

    fuses: whether rows move beside products, which ranks compare. tally_WS: where choices are counted.
    """

    dtypes: Sequence[torch.dtype] = (DTYPE,)
    fuses = False

    def __init__(
        self, geometry: Geometry, transport: Nvlink, wire: Wire, observer: Listener, layer: int
    ) -> None:
        self.transport, self.wire, self.world_size = transport, wire, transport.world_size
        self.place, self._debug = transport.device, debug_is_on()
        self.calls, self._counted = 0, itertools.count(1)  # those of copies, too
        self._tables: Tables | None = None
        self.tally_WS: Tensor | None = None
        super().__init__(geometry, observer, layer)
        transport.join(self)

    def close(self) -> None:
        super().close()
        self.transport.leave(self)

    def relocate(self, geometry: Geometry) -> None:
        super().relocate(geometry)
        self.placed = placed = kernel_placement(geometry)
        self._slots = len(geometry.local_slots)
        self.size = Size(
            rank_offsets=placed.placement.rank_offsets,
            tensor=geometry.tensor_parallel,
            experts=placed.placement.num_experts,
            choices=geometry.top_k,
            row_bytes=geometry.hidden_size * DTYPE.itemsize,
            compact=is_coded(self.wire.dispatch) or is_coded(self.wire.combine_backward),
        )
        self._sizes = Sizes(1, self.world_size, geometry.top_k, self.size.most_slots)
        self._spared = Spared.of(self.size, self.world_size)
        lengths = placed.placement.num_experts + 1, placed.placement.num_slots, placed.placement.num_ranks + 1
        if self._tables and tuple(len(table) for table in self._tables) == lengths:
            write_tables(self._tables, placed.placement)
        else:
            self._tables = placement_tables(placed.placement, self.transport.device)

    @property
    def counts_on_device(self) -> bool:
        return not self.placed.by_slot and self.geometry.tensor_parallel == 1

    def count_into(self, tally_WS: Tensor | None) -> None:
        if not self.counts_on_device:
            super().count_into(tally_WS)
        self.tally_WS = tally_WS

    def check(self, *, synchronize: bool = False) -> None:
        self.transport.check(synchronize=synchronize)

    def check_in(self, x_TD: Tensor, routing: Routing, *, before: int = 0) -> None:
        self.meet(x_TD, routing, checks=True)

    def agree(self, parts: Sequence[tuple[Tensor, Routing]], form: RowForm = RowForm.ROWS) -> list[Part]:
        return [self.meet(x_TD, routing, form) for x_TD, routing in parts]

    def meet(
        self, x_TD: Tensor, routing: Routing, form: RowForm = RowForm.ROWS, *, checks: bool = False
    ) -> Part:
        """Tell all ranks of this part and hear of theirs. ValueError on all where one's input is wrong.
        checks: a check of the input alone, behind which ranks meet again: no other may dispatch by then."""
        problem = self._why_not_input(x_TD, routing)
        self.calls = next(self._counted)
        how = checks << 2 | self.fuses << 1 | self.uncompiled
        kind = self.calls, self.number, self.layer, self.where, how
        note = hash(kind) % NOTES  # of whole numbers: the same in every process
        tokens, back = x_TD.shape[0], x_TD.requires_grad
        many = back and tokens >= self._spared.many_tokens(self.transport.num_owners)
        in_fp8 = form is RowForm.FP8
        value = tokens << 4 | back << 3 | many << 2 | in_fp8 << 1 | self.promise  # as `part_of` reads it
        self.promise = self.uncompiled = False
        values_W, wrong = self.transport.agree_on_call(value, fine=problem is None, note=note)
        if problem:
            raise ValueError(f"dispatch: on rank {self.geometry.rank}, {problem}")
        if wrong is not None:
            raise ValueError(f"dispatch: rank {wrong} was given tokens that cannot be dispatched")
        if not self.transport.agreed:
            raise ValueError(
                f"dispatch: ranks disagree about what is called: here call {self.calls} of exchange "
                f"{self.number} (numbered as they were made), layer {self.layer}, placement "
                f"{self.where:08x}; every rank must call the same layers in the same order, with the same "
                "placement; where only some are compiled, use schedule='serial', or 'fused' or 'auto' after "
                "a first call that is compiled on none"
            )
        part, self.promised = part_of(routing.ids_TK, values_W)
        return part

    @property
    def about_rows(self) -> str:
        return self._spared.about(self.transport.exact_rows, self.transport.num_owners)

    def agree_on_rows(self, problem: str | None, dtype: torch.dtype) -> None:
        """Compare a word on the hosts' board; no GPU is asked. Rows have one dtype here."""
        _, wrong = self.transport.agree_on_call(0, fine=problem is None, note=self.calls % NOTES)
        if wrong is not None:
            raise_together(self.transport, "combine", problem)

    def _why_not_input(self, x_TD: Tensor, routing: Routing) -> str | None:
        limit = self.transport.max_tokens
        problem = find_problem(x_TD, routing, self.geometry, self.place, self._debug)
        if problem[0]:
            return explain(problem)
        if x_TD.dtype != DTYPE:
            return (
                f"x is {x_TD.dtype}; NVLink's kernels move bfloat16: convert it, or use transport='alltoall'"
            )
        if limit is not None and x_TD.shape[0] > limit:
            return (
                f"x has {x_TD.shape[0]} tokens; this exchange was made for {limit}: use Nvlink(max_tokens=)"
            )
        return None

    @property
    def choosing(self) -> Choosing:
        assert self._tables is not None
        return {"tally": self.tally_WS, "tables": self._tables, "balanced": self.placed.balanced}

    def counts_first(self, part: Part, worst: int) -> bool:
        """Whether the host waits to hear how many rows there are; else there is room for `worst`."""
        exact = self.transport.exact_rows
        if exact is None:
            exact = part.spares(worst * (self.world_size - 1) // self.world_size * self.size.row_bytes)
        return exact and not self.transport.capturing

    def _count_rows(self, routed: Routed) -> int:
        """The number of rows, as the GPU counted them."""
        self.observer.count("host_syncs", 1, layer=self.layer)
        # host sync: asked for by `exact_rows`, or for the sake of memory
        return int(routed.totals_L4[0, 0])

    def _choices(self, ids_TK: Tensor) -> Tensor:
        """The choices as the kernels take them: experts, or slots in their place if the host splits."""
        if not self.placed.by_slot:
            return ids_TK.contiguous()
        geometry = self.geometry
        with self.observer.span("plan", layer=self.layer):
            counts_E = plan.count_choices(ids_TK, geometry.placement.num_experts)
            self.observer.count("host_syncs", 1, layer=self.layer)
            split_WS = geometry.split(self.transport.exchange_counts(counts_E), geometry.placement)
            return plan.choose_slots(ids_TK.contiguous(), split_WS[geometry.rank], geometry.placement)

    def fake_state(self, ids_TK: Tensor, rows: Any, size: Callable[[], Any]) -> list[Tensor]:
        return [ids_TK.new_empty(size(), self._sizes.columns, dtype=torch.int32)]

    def read_state(self, state: Sequence[Tensor]) -> Routed:
        """The state of a handle as kernels take it."""
        return Routed.of_words(state[0], self._sizes)

    def kernels_for(self, part: Part) -> NvlinkExchange:
        """The kernels for a dispatch. All ranks call this together: a larger part may want another heap."""
        kernels = self.transport.exchange_for(
            self.size, self.placed.placement, part.max_tokens, self.observer
        )
        kernels.layer = self.layer
        return kernels

    def kernels_of(self, max_tokens: int) -> NvlinkExchange:
        """The kernels that made a routing with room for `max_tokens` of a rank."""
        kernels = self.transport.exchange_of(self.size, max_tokens)
        kernels.layer = self.layer
        return kernels
