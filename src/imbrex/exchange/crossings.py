"""The four crossings of an exchange: dispatch, combine and their backward. The bodies of its operators.

    x_TD ──encode, move──▶ pool_PD ──expand──▶ rows_RD
    y_TD ◀──sum in rank order◀──move back, encode── partial_PD ◀──reduce── rows_RD

The gradient of combine runs the upper line with dy, that of dispatch the lower one, over the same traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from imbrex.codec.cast import from_bytes
from imbrex.codec.columns import add_encoded, write
from imbrex.contracts import Codec, Pending, Plan, Routing, Traffic, Transport, Wire
from imbrex.exchange import ops, plan, rows
from imbrex.exchange.agreement import HEADER, TOKENS, check_headers, find_problem, write_header
from imbrex.exchange.geometry import Geometry
from imbrex.exchange.plan import read_state
from imbrex.observe import Observer
from imbrex.placement.flow import split_near
from imbrex.runtime.words import words
from imbrex.transport.nodes import Nodes

Sizes = tuple[Tensor, dict[str, Tensor]]
"""Rows of every rank to every other, and what else `Traffic` has."""


class Crossings(ops.Owner):
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
        self.num_local_slots = len(geometry.local_slots)
        super().__init__(self.num_local_slots, world_size, hasattr(transport, "plan_relays"))
        self.geometry, self.transport, self.wire = geometry, transport, wire
        self.world_size, self.observer, self.layer = world_size, observer, layer
        self.nodes: Nodes | None = None  # as the ranks' launchers say, if they make regular ones
        self.calls = 0

    def device_type(self, x: Tensor) -> str:
        """Where rows must lie; a rank alone takes them anywhere."""
        return x.device.type if self.world_size == 1 else self.transport.device.type

    def handshake(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Tell every rank the state of the input, the choices per expert and, where they are known ahead, the
        rows to every rank: int64 [W, HEADER + E (+ W)]."""
        return self.handshakes([(x_TD, routing)])[0]

    def handshakes(self, parts: Sequence[tuple[Tensor, Routing]]) -> list[Tensor]:
        """Those of several dispatches in one message."""
        gathered = self.transport.exchange_counts(torch.cat([self._message(*part) for part in parts]))
        self.observer.count("host_syncs", 1, layer=self.layer)
        by_part = list(gathered.chunk(len(parts), 1))
        for message in by_part:
            check_headers(message[:, :HEADER], self.transport.replicated)
        return by_part

    def _message(self, x_TD: Tensor, routing: Routing) -> Tensor:
        replicated, geometry = self.transport.replicated, self.geometry
        num_experts, ids_TK = geometry.placement.num_experts, routing.ids_TK
        problem = find_problem(
            x_TD, routing, geometry.hidden_size, geometry.top_k, num_experts, self.device_type(x_TD)
        )
        self.calls += 1
        header = write_header(problem, x_TD, ids_TK, self.calls, replicated)
        fine = not problem[0]
        counts_E = plan.count_choices(ids_TK, num_experts) if fine else words(*[0] * num_experts)
        if not self._sizes_ahead:
            return torch.cat([header, counts_E])
        slot_TK = plan.only_slots(ids_TK, geometry.placement) if fine else words()[:, None]
        return torch.cat([header, counts_E, self._wanted(slot_TK).sum(0)])

    @property
    def _sizes_ahead(self) -> bool:
        """Whether a rank knows what it sends to whom before it knows what others choose: nobody relays, and
        no choice is between replicas."""
        kept = self.transport.replicated or hasattr(self.transport, "plan_relays")
        return not (kept or self.world_size == 1 or self.geometry.placement.has_replicas)

    def make_plans(self, parts: Sequence[tuple[Tensor, Routing]]) -> list[Plan]:
        """Exchange counts, choose replicas, place every row, for one dispatch or for several at once. One
        host synchronisation on a GPU; two where rows are relayed, or go where replicas are chosen first."""
        ours, plans = [], []
        gathered = self.handshakes(parts)
        placement, rank = self.geometry.placement, self.geometry.rank
        for (_, routing), counts in zip(parts, gathered, strict=True):
            split_WS = self._split(counts)
            slot_TK = plan.choose_slots(routing.ids_TK, split_WS[rank], placement)
            ours.append((slot_TK, self._wanted(slot_TK), split_WS))
        sizes = self._exchange_sizes([wanted_TW for _, wanted_TW, _ in ours], gathered)
        for (slot_TK, wanted_TW, split_WS), (rows_WW, more), told in zip(ours, sizes, gathered, strict=True):
            made = plan.make_plan(
                slot_TK,
                wanted_TW,
                split_WS,
                rows_WW,
                placement,
                rank,
                tensor_size=self.geometry.tensor_parallel,
                alignment=self.geometry.alignment,
                rows_per_slot=self._rows_per_slot(told),
            )
            plans.append(replace(made, traffic=replace(made.traffic, **more)))
        return plans

    def _split(self, gathered: Tensor) -> Tensor:
        """Choices of every rank for every slot, from the messages of all ranks."""
        geometry, replicated = self.geometry, self.transport.replicated
        placement, world = geometry.placement, self.world_size
        counts_WE = gathered[:, HEADER : HEADER + placement.num_experts]
        self.observer.count("expert_load", counts_WE[geometry.rank], layer=self.layer)
        if not replicated:
            return split_near(geometry.split, counts_WE, placement, self.transport.device)
        split_WS = torch.zeros(world, placement.num_slots, dtype=torch.int64, device="cpu")
        split_WS[geometry.rank] = geometry.split(counts_WE[:1], placement)[0]
        return split_WS

    def _rows_per_slot(self, gathered: Tensor) -> int | None:
        if self.geometry.rows_per_slot is None:
            return None
        tokens_W = gathered[:, TOKENS]
        return self.geometry.rows_per_slot(int(tokens_W[0] if self.transport.replicated else tokens_W.sum()))

    def _wanted(self, slot_TK: Tensor) -> Tensor:
        geometry = self.geometry
        if self.transport.replicated or self.transport.broadcasts:
            fill = self.transport.broadcasts
            return slot_TK.new_full((slot_TK.shape[0], self.world_size), fill, dtype=torch.bool)
        return plan.ranks_wanted(slot_TK, geometry.placement, geometry.tensor_parallel)

    def _exchange_sizes(self, wanted: list[Tensor], gathered: list[Tensor]) -> list[Sizes]:
        """Of every dispatch, rows that every rank sends to every other, int64 [W, W] on the host, and what
        `Traffic` has for transports that relay."""
        world = self.world_size
        if self.transport.replicated or world == 1:
            return [(torch.zeros(world, world, dtype=torch.int64, device="cpu"), {}) for _ in wanted]
        if self._sizes_ahead:
            return [(told[:, -world:].clone().fill_diagonal_(0), {}) for told in gathered]
        self.observer.count("host_syncs", 1, layer=self.layer)
        plan_relays = getattr(self.transport, "plan_relays", None)
        if plan_relays is not None:
            return plan_relays(wanted)
        told = self.transport.exchange_counts(torch.cat([wanted_TW.sum(0) for wanted_TW in wanted]))
        return [(sizes.clone().fill_diagonal_(0), {}) for sizes in told.chunk(len(wanted), 1)]

    def begin_out(self, encoded_TB: Tensor, traffic: Traffic) -> Pending:
        """Send rows, one a token, to who wants them."""
        return self._observed(self.transport.begin_move, encoded_TB, traffic, 0)

    def begin_back(self, encoded_MB: Tensor, traffic: Traffic, codec: Codec, dtype: torch.dtype) -> Pending:
        """Send rows, one a row received, to where their tokens live. Some transports add rows on the way."""
        begin: Any = self.transport.begin_move_back
        if getattr(self.transport, "adds_on_the_way", False):
            begin = partial(begin, add=partial(add_encoded, codec, self.geometry.hidden_size, dtype))
        return self._observed(begin, encoded_MB, traffic, 1)

    def _observed(self, begin, encoded: Tensor, traffic: Traffic, way: int) -> Pending:
        if self.observer.enabled:
            self._count_bytes(traffic, way, encoded.shape[1])
        return begin(encoded, traffic)

    def _count_bytes(self, traffic: Traffic, way: int, row_bytes: int) -> None:
        """By rank that they are sent to and, on several nodes, inside this node and to others: as they travel
        where rows are passed on, so that all ranks' together are what the networks carry."""
        relayed = getattr(self.transport, "rows_sent", None)
        rows_W = traffic.splits_2W[way] if relayed is None else relayed(traffic, back=bool(way))
        self.observer.count("bytes_sent", rows_W * row_bytes, layer=self.layer)
        nodes = getattr(self.transport, "nodes", None) or self.nodes
        if nodes is not None and nodes.num_nodes > 1:
            rows_2 = nodes.by_tier(rows_W, self.geometry.rank)
            self.observer.count("bytes_by_tier", rows_2 * row_bytes, layer=self.layer)

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> tuple[Plan, Pending]:
        with self.observer.span("plan", layer=self.layer):
            routing = Routing(ids_TK=ids_TK, weights_TK=weights_TK)
            made = self.make_plans([(x_TD, routing)])[0]
        with self.observer.span("dispatch", layer=self.layer):
            return made, self.begin_out(self.write_dispatch(made, x_TD, weights_TK), made.traffic)

    def write_dispatch(self, made: Plan, x_TD: Tensor, weights_TK: Tensor) -> Tensor:
        """Tokens as they cross, with slots, positions and weights of their choices behind them."""
        labels = [made.slot_TK.int(), made.position_TK.int(), weights_TK]
        return write([x_TD, *labels], self.wire.dispatch, x_TD.dtype)

    def fake_state(self, ids_TK: Tensor, rows: Any, size: Callable[[], Any]) -> list[Tensor]:
        """The shapes of `State`, for the compiler. `size` makes sizes that only the run knows."""
        source_R = ids_TK.new_empty(rows)
        position_PK = ids_TK.new_empty(size(), ids_TK.shape[1])
        splits = torch.empty(2, self.world_size, dtype=torch.int64, device="cpu")
        state = [source_R, position_PK, ids_TK.new_empty(size()), splits]
        if hasattr(self.transport, "plan_relays") and self.world_size > 1:
            state[3] = torch.empty(size(), self.world_size, dtype=torch.int64, device="cpu")
            state.append(ids_TK.new_empty(size(), size(), dtype=torch.uint8))
        return state

    def run_dispatch(
        self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, ticket: int
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        made, pending = self.begun.pop(ticket, None) or self.start_dispatch(x_TD, weights_TK, ids_TK)
        with self.observer.span("dispatch", layer=self.layer):
            return self.read_dispatch(made, pending.finish(), x_TD, weights_TK)

    def read_dispatch(
        self, made: Plan, received: Tensor, x_TD: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """From what arrived to rows, weights, counts and state."""
        codec, width = self.wire.dispatch, x_TD.shape[1]
        foreign = codec.decode(received[:, : codec.nbytes(width, x_TD.dtype)], width, x_TD.dtype)
        weights_R, state = self.place(made, received, weights_TK)
        return rows.expand([x_TD, foreign], state[0]), weights_R, made.counts_e, state

    def place(self, made: Plan, received: Tensor, weights_TK: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Weights of the rows and the state, from the labels behind what arrived."""
        top_k, traffic = weights_TK.shape[1], made.traffic
        labels = received[:, -12 * top_k :].unflatten(1, (3, 4 * top_k))
        slot = torch.cat([made.slot_TK, from_bytes(labels[:, 0], top_k, torch.int32).long()])
        position = torch.cat([made.position_TK, from_bytes(labels[:, 1], top_k, torch.int32).long()])
        weights = torch.cat([weights_TK, from_bytes(labels[:, 2], top_k, torch.float32)])
        source_R, position_PK, weights_R = rows.index_rows(
            slot, position, weights, self.geometry.local_slots, made.num_rows
        )
        self.observer.count("rows", made.num_rows, layer=self.layer)
        state = [source_R, position_PK, traffic.sent_tokens_N, traffic.splits_2W]
        if traffic.relay_XM is not None:
            state.append(traffic.relay_XM)
        return weights_R, state

    def run_dispatch_backward(
        self, d_rows_RD: Tensor, d_weights_R: Tensor, state: Sequence[Tensor], num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        traffic = read_state(state)[2]
        with self.observer.span("dispatch_backward", layer=self.layer):
            own, encoded = self.write_dispatch_backward(d_rows_RD, d_weights_R, state, num_tokens)
            codec, dtype = self.wire.dispatch_backward, d_rows_RD.dtype
            received = None if encoded is None else self.begin_back(encoded, traffic, codec, dtype).finish()
            return self.read_dispatch_backward(own, received, state, dtype)

    def write_dispatch_backward(
        self, d_rows_RD: Tensor, d_weights_R: Tensor, state: Sequence[Tensor], num_tokens: int
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Summed gradients of the own tokens and of their weights, and those of others as they cross."""
        partial_PD = rows.reduce(d_rows_RD, read_state(state)[1], None, self.geometry.most_rows)
        d_weights_PK = rows.pick_scalars(d_weights_R, read_state(state)[1])
        if self.transport.replicated:
            return (partial_PD, d_weights_PK), None
        foreign = [partial_PD[num_tokens:], d_weights_PK[num_tokens:]]
        encoded = write(foreign, self.wire.dispatch_backward, d_rows_RD.dtype)
        return (partial_PD[:num_tokens], d_weights_PK[:num_tokens]), encoded

    def read_dispatch_backward(
        self,
        own: tuple[Tensor, Tensor],
        received: Tensor | None,
        state: Sequence[Tensor],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        if received is None:
            d_x_TD = self._sum_over_ranks(own[0], self.wire.dispatch_backward, dtype)
            return d_x_TD, self.transport.all_reduce(own[1])
        codec, width, traffic = self.wire.dispatch_backward, own[0].shape[1], read_state(state)[2]
        nbytes = codec.nbytes(width, dtype)
        d_x = codec.decode(received[:, :nbytes], width, dtype)
        d_weights = from_bytes(received[:, nbytes:], own[1].shape[1], torch.float32)
        return self._sum_home(own[0], d_x, traffic).to(dtype), self._sum_home(own[1], d_weights, traffic)

    def start_combine(
        self, rows_RD: Tensor, weights_R: Tensor | None, state: Sequence[Tensor], num_tokens: int
    ) -> tuple[Tensor, Pending | None]:
        """The partial sums, and the crossing of those of other ranks' tokens."""
        with self.observer.span("combine", layer=self.layer):
            own_TD, encoded = self.write_combine(rows_RD, weights_R, state, num_tokens)
            if encoded is None:
                return own_TD, None
            traffic = read_state(state)[2]
            return own_TD, self.begin_back(encoded, traffic, self.wire.combine, rows_RD.dtype)

    def write_combine(
        self, rows_RD: Tensor, weights_R: Tensor | None, state: Sequence[Tensor], num_tokens: int
    ) -> tuple[Tensor, Tensor | None]:
        """The partial sums of the own tokens, and those of others as they cross."""
        partial_PD = rows.reduce(rows_RD, read_state(state)[1], weights_R, self.geometry.most_rows)
        if self.transport.replicated:
            return partial_PD, None
        return partial_PD[:num_tokens], write([partial_PD[num_tokens:]], self.wire.combine, rows_RD.dtype)

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
            received = None if pending is None else pending.finish()
            return self.read_combine(own_TD, received, addend_TD, state, rows_RD.dtype)

    def read_combine(
        self,
        own_TD: Tensor,
        received: Tensor | None,
        addend_TD: Tensor | None,
        state: Sequence[Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        """Sums over ranks, and of the addend, as they leave the layer."""
        if received is None:
            y_TD = self._sum_over_ranks(own_TD, self.wire.combine, dtype).float()
        else:
            sent_back = self.wire.combine.decode(received, own_TD.shape[1], dtype)
            y_TD = self._sum_home(own_TD, sent_back, read_state(state)[2])
        if addend_TD is not None:
            y_TD = y_TD + addend_TD.float()
        return y_TD.to(dtype)

    def run_combine_backward(
        self, d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        with self.observer.span("combine_backward", layer=self.layer):
            encoded = self.write_combine_backward(d_y_TD)
            traffic = read_state(state)[2]
            received = None if encoded is None else self.begin_out(encoded, traffic).finish()
            return self.read_combine_backward(received, d_y_TD, rows_RD, weights_R, state)

    def write_combine_backward(self, d_y_TD: Tensor) -> Tensor | None:
        """The outputs' gradients as they cross."""
        if self.transport.replicated:
            return None
        return write([d_y_TD], self.wire.combine_backward, d_y_TD.dtype)

    def read_combine_backward(
        self,
        received: Tensor | None,
        d_y_TD: Tensor,
        rows_RD: Tensor | None,
        weights_R: Tensor,
        state: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the rows and of their weights. Without rows these were weighted before."""
        codec, source_R = self.wire.combine_backward, read_state(state)[0]
        d_y_RD = self._expand(d_y_TD, received, codec, source_R)
        if rows_RD is None:
            return d_y_RD, weights_R.new_empty(0)
        # Padding rows of an expert with a bias are not zero, and may be anything on a device.
        d_weights_R = torch.where(source_R < 0, 0.0, (rows_RD.float() * d_y_RD.float()).sum(1))
        return (d_y_RD.float() * weights_R[:, None]).to(d_y_RD.dtype), d_weights_R

    def _expand(self, own_TD: Tensor, received: Tensor | None, codec: Codec, source_R: Tensor) -> Tensor:
        foreign = [] if received is None else [codec.decode(received, own_TD.shape[1], own_TD.dtype)]
        return rows.expand([own_TD, *foreign], source_R)

    def dispatch_again(self, x_TD: Tensor, state: Sequence[Tensor], num_rows: int) -> Tensor:
        """The rows of an earlier dispatch, moved once more."""
        codec, (source_R, _, traffic) = self.wire.dispatch, read_state(state)
        with self.observer.span("dispatch_again", layer=self.layer):
            received = None
            if not self.transport.replicated:
                received = self.begin_out(write([x_TD], codec, x_TD.dtype), traffic).finish()
            return self._expand(x_TD, received, codec, source_R)

    def _sum_over_ranks(self, own_TD: Tensor, codec: Codec, dtype: torch.dtype) -> Tensor:
        """Where the tokens are the same on every rank."""
        if codec.name == "identity":
            return self.transport.all_reduce(own_TD.to(dtype))
        decode = partial(codec.decode, width=own_TD.shape[1], dtype=dtype)
        sum_encoded: Any = getattr(self.transport, "sum_encoded", None)
        assert sum_encoded is not None, "refused at construction"
        return sum_encoded(own_TD, partial(codec.encode, dtype=dtype), decode).to(dtype)

    def _sum_home(self, own: Tensor, sent_back: Tensor, traffic: Traffic) -> Tensor:
        home = getattr(self.transport, "home", None)
        if home is None or self.world_size == 1:
            tokens_N, sizes = traffic.sent_tokens_N, traffic.splits_2W[0].tolist()
        else:
            tokens_N, sizes = home(traffic)
        return rows.sum_home(own, sent_back, tokens_N, sizes, self.geometry.rank)
