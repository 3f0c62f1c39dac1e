"""The four crossings of an exchange: dispatch, combine and their backward. The bodies of its operators.

    x_TD ──encode, move──▶ pool_PD ──expand──▶ rows_RD
    y_TD ◀──sum in rank order◀──move back, encode── partial_PD ◀──reduce── rows_RD

The gradient of combine runs the upper line with dy, that of dispatch the lower one, over the same traffic.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imbrex import ops, plan, rows
from imbrex.codec.cast import as_bytes, from_bytes
from imbrex.contracts import Codec, Pending, Placement, Plan, Routing, Split, Traffic, Transport, Wire
from imbrex.handshake import HEADER, TOKENS, check_headers, find_problem, write_header
from imbrex.observe import Observer


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Who is where, and how rows are laid out: what the plans of an exchange have in common.

    rows_per_slot: from the tokens of the group to the rows that every slot is padded to; `None`: as needed.
    """

    placement: Placement
    rank: int
    tensor_parallel: int
    hidden_size: int
    top_k: int
    split: Split
    alignment: int
    rows_per_slot: Callable[[int], int] | None = None

    @property
    def local_slots(self) -> range:
        expert_rank = self.rank // self.tensor_parallel
        return range(*self.placement.rank_offsets[expert_rank : expert_rank + 2])

    @property
    def most_rows(self) -> int:
        """Most rows that one token can have on this rank."""
        return min(self.top_k, len(self.local_slots))


def read_state(state: Sequence[Tensor]) -> tuple[Tensor, Tensor, Traffic]:
    """source_R, position_PK and traffic from the state of a `Handle`.

    The pool of a rank is its own T tokens followed by the M rows received, by source rank, then token.
    source_R: int64; pool row that a row was copied from, `-1` for padding.
    position_PK: int64; row of every choice of a pool row on this rank, `-1` where it is another rank's.
    """
    source_R, position_PK, sent_tokens_N, splits_2W = state
    return source_R, position_PK, Traffic(sent_tokens_N=sent_tokens_N, splits_2W=splits_2W)


class Crossings:
    """What the operators of an exchange do, over a transport that moves rows. They find it by `key`; a
    ticket names a crossing begun earlier."""

    def __init__(
        self,
        geometry: Geometry,
        transport: Transport,
        wire: Wire,
        world_size: int,
        observer: Observer,
        layer: int,
    ) -> None:
        self.geometry, self.transport, self.wire = geometry, transport, wire
        self.world_size, self.observer, self.layer = world_size, observer, layer
        self.num_local_slots = len(geometry.local_slots)
        self.calls = 0
        self.begun: dict[int, tuple] = {}
        self.tickets = itertools.count()
        self.key = ops.register(self)

    def device_type(self, x: Tensor) -> str:
        """Where rows must lie; a rank alone takes them anywhere."""
        return x.device.type if self.world_size == 1 else self.transport.device.type

    def begin(self, *started) -> int:
        ticket = next(self.tickets)
        self.begun[ticket] = started
        return ticket

    def handshake(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Tell every rank the state of the input and the choices per expert: int64 [W, HEADER + E]."""
        replicated, geometry = self.transport.replicated, self.geometry
        num_experts, ids_TK = geometry.placement.num_experts, routing.ids_TK
        problem = find_problem(
            x_TD, routing, geometry.hidden_size, geometry.top_k, num_experts, self.device_type(x_TD)
        )
        self.calls += 1
        header = write_header(problem, x_TD, ids_TK, self.calls, replicated)
        fine = not problem[0]
        counts_E = plan.count_choices(ids_TK, num_experts) if fine else torch.zeros(num_experts).long()
        gathered = self.transport.exchange_counts(torch.cat([header, counts_E]))
        self.observer.count("host_syncs", 1, layer=self.layer)
        check_headers(gathered[:, :HEADER], replicated)
        return gathered

    def make_plan(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Plan:
        """Exchange counts, choose replicas, place every row. One host synchronisation on a GPU, two with
        replicas: which token goes to which rank is known only when the replicas are."""
        geometry, replicated = self.geometry, self.transport.replicated
        placement, world = geometry.placement, self.world_size
        gathered = self.handshake(x_TD, Routing(ids_TK=ids_TK, weights_TK=weights_TK))
        counts_WE = gathered[:, HEADER:]
        self.observer.count("expert_load", counts_WE[geometry.rank], layer=self.layer)
        if replicated:
            split_WS = torch.zeros(world, placement.num_slots, dtype=torch.int64)
            split_WS[geometry.rank] = geometry.split(counts_WE[:1], placement)[0]
        else:
            split_WS = geometry.split(counts_WE, placement)
        slot_TK = plan.choose_slots(ids_TK, split_WS[geometry.rank], placement)
        wanted_TW = self._wanted(slot_TK)
        rows_WW = self._exchange_sizes(wanted_TW)
        return plan.make_plan(
            slot_TK,
            wanted_TW,
            split_WS,
            rows_WW,
            placement,
            geometry.rank,
            tensor_size=geometry.tensor_parallel,
            alignment=geometry.alignment,
            rows_per_slot=self._rows_per_slot(gathered),
        )

    def _rows_per_slot(self, gathered: Tensor) -> int | None:
        if self.geometry.rows_per_slot is None:
            return None
        tokens_W = gathered[:, TOKENS]
        return self.geometry.rows_per_slot(int(tokens_W[0] if self.transport.replicated else tokens_W.sum()))

    def _wanted(self, slot_TK: Tensor) -> Tensor:
        geometry = self.geometry
        if self.transport.replicated or self.transport.broadcasts:
            fill = self.transport.broadcasts
            return torch.full((slot_TK.shape[0], self.world_size), fill, device=slot_TK.device)
        return plan.ranks_wanted(slot_TK, geometry.placement, geometry.tensor_parallel)

    def _exchange_sizes(self, wanted_TW: Tensor) -> Tensor:
        """Rows that every rank sends to every other, int64 [W, W] on the host."""
        if self.transport.replicated or self.world_size == 1:
            return torch.zeros(self.world_size, self.world_size, dtype=torch.int64)
        self.observer.count("host_syncs", 1, layer=self.layer)
        return self.transport.exchange_counts(wanted_TW.sum(0)).fill_diagonal_(0)

    def start_out(self, values: list[Tensor], codec: Codec, dtype: torch.dtype, traffic: Traffic) -> Pending:
        """Send rows, float32 or `dtype`, with the bytes of further columns behind each, to who wants them."""
        encoded = [codec.encode(values[0], dtype), *map(as_bytes, values[1:])]
        return self._observed(self.transport.begin_move, torch.cat(encoded, 1), traffic, 0)

    def start_back(self, values: list[Tensor], codec: Codec, dtype: torch.dtype, traffic: Traffic) -> Pending:
        encoded = [codec.encode(values[0], dtype), *map(as_bytes, values[1:])]
        return self._observed(self.transport.begin_move_back, torch.cat(encoded, 1), traffic, 1)

    def _observed(self, begin, encoded: Tensor, traffic: Traffic, way: int) -> Pending:
        if self.observer.enabled:
            nbytes = traffic.splits_2W[way] * encoded.shape[1]
            self.observer.count("bytes_sent", nbytes, layer=self.layer)
        return begin(encoded, traffic)

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> tuple[Plan, Pending]:
        with self.observer.span("plan", layer=self.layer):
            made = self.make_plan(x_TD, weights_TK, ids_TK)
        with self.observer.span("dispatch", layer=self.layer):
            labels = [made.slot_TK.int(), made.position_TK.int(), weights_TK]
            return made, self.start_out([x_TD, *labels], self.wire.dispatch, x_TD.dtype, made.traffic)

    def fake_state(self, ids_TK: Tensor, rows: Any, size: Callable[[], Any]) -> list[Tensor]:
        """The shapes of `State`, for the compiler. `size` makes sizes that only the run knows."""
        source_R = ids_TK.new_empty(rows)
        position_PK = ids_TK.new_empty(size(), ids_TK.shape[1])
        return [source_R, position_PK, ids_TK.new_empty(size()), torch.empty(2, self.world_size).long()]

    def run_dispatch(
        self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, ticket: int
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        made, pending = self.begun.pop(ticket, None) or self.start_dispatch(x_TD, weights_TK, ids_TK)
        with self.observer.span("dispatch", layer=self.layer):
            received = pending.finish()
            width, top_k = x_TD.shape[1], ids_TK.shape[1]
            nbytes = self.wire.dispatch.nbytes(width, x_TD.dtype)
            foreign = self.wire.dispatch.decode(received[:, :nbytes], width, x_TD.dtype)
            labels = received[:, nbytes:].unflatten(1, (3, 4 * top_k))
            slot = torch.cat([made.slot_TK, from_bytes(labels[:, 0], top_k, torch.int32).long()])
            position = torch.cat([made.position_TK, from_bytes(labels[:, 1], top_k, torch.int32).long()])
            weights = torch.cat([weights_TK, from_bytes(labels[:, 2], top_k, torch.float32)])
            source_R, position_PK, weights_R = rows.index_rows(
                slot, position, weights, self.geometry.local_slots, made.num_rows
            )
            rows_RD = rows.expand([x_TD, foreign], source_R)
        self.observer.count("rows", made.num_rows, layer=self.layer)
        state = [source_R, position_PK, made.traffic.sent_tokens_N, made.traffic.splits_2W]
        return rows_RD, weights_R, made.counts_e, state

    def run_dispatch_backward(
        self, d_rows_RD: Tensor, d_weights_R: Tensor, state: Sequence[Tensor], num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        _, position_PK, traffic = read_state(state)
        with self.observer.span("dispatch_backward", layer=self.layer):
            partial_PD = rows.reduce(d_rows_RD, position_PK, None, self.geometry.most_rows)
            d_weights_PK = rows.pick_scalars(d_weights_R, position_PK)
            codec, dtype = self.wire.dispatch_backward, d_rows_RD.dtype
            if self.transport.replicated:
                d_x_TD = self.transport.all_reduce(partial_PD.to(dtype))
                return d_x_TD, self.transport.all_reduce(d_weights_PK)
            foreign = [partial_PD[num_tokens:], d_weights_PK[num_tokens:]]
            received = self.start_back(foreign, codec, dtype, traffic).finish()
            nbytes = codec.nbytes(partial_PD.shape[1], dtype)
            d_x = codec.decode(received[:, :nbytes], partial_PD.shape[1], dtype)
            d_weights = from_bytes(received[:, nbytes:], d_weights_PK.shape[1], torch.float32)
            d_x_TD = self._sum_home(partial_PD[:num_tokens], d_x, traffic)
            return d_x_TD.to(dtype), self._sum_home(d_weights_PK[:num_tokens], d_weights, traffic)

    def start_combine(
        self, rows_RD: Tensor, weights_R: Tensor | None, state: Sequence[Tensor], num_tokens: int
    ) -> tuple[Tensor, Pending | None]:
        """The partial sums, and the crossing of those of other ranks' tokens."""
        _, position_PK, traffic = read_state(state)
        with self.observer.span("combine", layer=self.layer):
            partial_PD = rows.reduce(rows_RD, position_PK, weights_R, self.geometry.most_rows)
            if self.transport.replicated:
                return partial_PD, None
            foreign = [partial_PD[num_tokens:]]
            crossing = self.start_back(foreign, self.wire.combine, rows_RD.dtype, traffic)
            return partial_PD[:num_tokens], crossing

    def run_combine(
        self,
        rows_RD: Tensor,
        weights_R: Tensor | None,
        addend_TD: Tensor | None,
        state: Sequence[Tensor],
        num_tokens: int,
        ticket: int,
    ) -> Tensor:
        started = self.begun.pop(ticket, None)
        own_TD, pending = started or self.start_combine(rows_RD, weights_R, state, num_tokens)
        with self.observer.span("combine", layer=self.layer):
            dtype = rows_RD.dtype
            if pending is None:
                y_TD = self.transport.all_reduce(own_TD.to(dtype)).float()
            else:
                sent_back = self.wire.combine.decode(pending.finish(), own_TD.shape[1], dtype)
                y_TD = self._sum_home(own_TD, sent_back, read_state(state)[2])
            if addend_TD is not None:
                y_TD = y_TD + addend_TD.float()
            return y_TD.to(dtype)

    def run_combine_backward(
        self, d_y_TD: Tensor, rows_RD: Tensor, weights_R: Tensor | None, state: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        source_R, _, traffic = read_state(state)
        with self.observer.span("combine_backward", layer=self.layer):
            pool = [d_y_TD]
            if not self.transport.replicated:
                codec = self.wire.combine_backward
                received = self.start_out([d_y_TD], codec, d_y_TD.dtype, traffic).finish()
                pool.append(codec.decode(received, d_y_TD.shape[1], d_y_TD.dtype))
            d_y_RD = rows.expand(pool, source_R)
            if weights_R is None:
                return d_y_RD, torch.zeros(len(source_R), device=d_y_RD.device)
            # Padding rows of an expert with a bias are not zero, and may be anything on a device.
            products = torch.where(source_R[:, None] < 0, 0.0, rows_RD.float() * d_y_RD.float())
            return (d_y_RD.float() * weights_R[:, None]).to(d_y_RD.dtype), products.sum(1)

    def _sum_home(self, own: Tensor, sent_back: Tensor, traffic: Traffic) -> Tensor:
        sizes = traffic.splits_2W[0].tolist()
        return rows.sum_home(own, sent_back, traffic.sent_tokens_N, sizes, self.geometry.rank)
