"""The dispatcher over a transport that moves bytes: plan, encode, move, decode.

    x_TD ──encode, move──▶ pool_PD ──expand──▶ rows_RD
    y_TD ◀──sum in rank order◀──move back, encode── partial_PD ◀──reduce── rows_RD

The gradient of combine runs the upper line with dy, and the gradient of dispatch runs the lower one, over the
same traffic.

If experts take rows in fp8 and rows cross in fp8, they are not decoded and quantised again; this rank's own
tokens are encoded like the others'. Forward only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from imbrex.codec.cast import from_bytes
from imbrex.codec.columns import add_encoded, write
from imbrex.contracts import (
    Addend,
    Arrived,
    Codec,
    Crossing,
    Geometry,
    Listener,
    Pending,
    Plan,
    Routing,
    RowForm,
    Traffic,
    Transport,
    Wire,
)
from imbrex.exchange import plan, rows
from imbrex.exchange.agreement import (
    HEADER,
    PROMISE,
    TOKENS,
    Backwards,
    backwards_of,
    check_headers,
    find_problem,
    raise_together,
    write_header,
)
from imbrex.exchange.dispatcher import WiredDispatcher, nothing_to_move
from imbrex.exchange.plan import read_state
from imbrex.placement.flow import split_near
from imbrex.runtime import waits
from imbrex.transport.base import BytesTransport
from imbrex.transport.nodes import Nodes


class BytesDispatcher(WiredDispatcher):
    """Encodes rows, has a transport move them and decodes them, on any device and in any dtype.

    nodes: how ranks are spread over hosts, if the transport or the launchers know.
    """

    def __init__(
        self,
        geometry: Geometry,
        transport: Transport,
        wire: Wire,
        observer: Listener,
        layer: int,
        *signature: Any,
    ) -> None:
        super().__init__(geometry, observer, layer, type(transport), *signature)
        self.transport, self.wire, self.world_size = transport, wire, geometry.world_size
        self.place = None if self.world_size == 1 else transport.device
        size = transport.ranks_per_node
        self.nodes = None if size is None else Nodes(num_nodes=self.world_size // size, size=size)
        self.calls, self.combined = itertools.count(1), False
        self.backwards = Backwards()
        if isinstance(transport, BytesTransport) and self.world_size > 1:
            self.backwards = backwards_of(transport.group)

    def take_agreement(self, number: int, node_of_W: Sequence[int]) -> None:
        super().take_agreement(number, node_of_W)
        self.nodes = self.nodes or Nodes.in_blocks(list(node_of_W))

    def check(self, *, synchronize: bool = False) -> None:
        if synchronize and self.transport.device.type == "cuda":
            # host sync: asked for
            torch.cuda.synchronize(self.transport.device)

    def check_in(self, x_TD: Tensor, routing: Routing, *, before: int = 0) -> None:
        problem = find_problem(x_TD, routing, self.geometry, self.place)
        if problem[0] or not self._checks_itself(before):
            header = self._header(problem, x_TD, routing.ids_TK, before)
            self._gather([torch.cat([header, header.new_zeros(self._room)])])

    def _checks_itself(self, num_parts: int) -> bool:
        """Whether the message of `agree` on this many parts is as long as that of a check. Then a rank whose
        input is fine sends only the first, and a rank whose input is not sends only the second."""
        return num_parts == 1

    def agree_on_rows(self, problem: str | None, dtype: torch.dtype) -> None:
        if self.world_size > 1 and not (self.combined and self.transport.device.type == "cuda"):
            self.combined = True
            raise_together(self.transport, "combine", problem, dtype)

    def exchange_choices(
        self, parts: Sequence[tuple[Tensor, Routing]]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Tell every rank the state of the input, the choices per expert and, if known already, the rows for
        every rank: int64 [W, HEADER + E (+ W)] for each part, all in one message. Also returns which ranks
        want the tokens of this rank's parts, if known already."""
        messages = [self._message(*part, len(parts)) for part in parts]
        return self._gather([message for message, _ in messages]), [wanted_TW for _, wanted_TW in messages]

    def _gather(self, messages: Sequence[Tensor]) -> list[Tensor]:
        gathered = self.transport.exchange_counts(torch.cat([*messages]))
        self.observer.count("host_syncs", 1, layer=self.layer)
        # Nobody promises anything for a call in parts.
        self.promised = bool(gathered[:, PROMISE].all())
        by_part = list(gathered.chunk(len(messages), 1))
        for message in by_part:
            check_headers(message[:, :HEADER], self.transport.replicated)
        return by_part

    def _message(self, x_TD: Tensor, routing: Routing, num_parts: int) -> tuple[Tensor, Tensor | None]:
        """This rank's message for a part, and which ranks want its tokens, if that is known already."""
        geometry, ids_TK = self.geometry, routing.ids_TK
        problem = find_problem(x_TD, routing, self.geometry, self.place)
        header = self._header(problem, x_TD, ids_TK, num_parts)
        if problem[0]:
            return torch.cat([header, header.new_zeros(self._room)]), None
        counts_E = plan.count_choices(ids_TK, geometry.placement.num_experts)
        if not self._sizes_ahead:
            return torch.cat([header, counts_E]), None
        wanted_TW = self._destinations(plan.only_slots(ids_TK, geometry.placement))
        return torch.cat([header, counts_E, wanted_TW.sum(0)]), wanted_TW

    def _header(self, problem: tuple[int, ...], x_TD: Tensor, ids_TK: Tensor, num_parts: int) -> Tensor:
        call, promise = (self.number, self.layer, next(self.calls), self.where), self.promise
        chunks = -1 if self.uncompiled and num_parts == 1 else num_parts
        self.promise = self.uncompiled = False
        chunks, backwards = (chunks, promise), self.backwards.take()
        return write_header(problem, x_TD, ids_TK, call, self.transport.replicated, *chunks, backwards)

    @property
    def _room(self) -> int:
        """How many numbers follow the header in the message of a part. A check sends as many zeros."""
        return self.geometry.placement.num_experts + self._sizes_ahead * self.world_size

    @property
    def _sizes_ahead(self) -> bool:
        """Whether a rank knows how many rows it sends to which rank before it hears the others' choices. It
        does if nobody relays rows and no expert has replicas."""
        still = self.transport.replicated or self.transport.relays or self.world_size == 1
        return not (still or self.geometry.placement.has_replicas)

    def agree(self, parts: Sequence[tuple[Tensor, Routing]], form: RowForm = RowForm.ROWS) -> list[Plan]:
        """Exchange counts, choose replicas and place every row, for one dispatch or several at once. That
        takes one host synchronisation on a GPU, and two if rows are relayed or experts have replicas."""
        with self._span("plan"):
            return self._make_plans(parts)

    def _make_plans(self, parts: Sequence[tuple[Tensor, Routing]]) -> list[Plan]:
        chosen = []
        gathered, wants = self.exchange_choices(parts)
        placement, rank = self.geometry.placement, self.geometry.rank
        for (_, routing), counts in zip(parts, gathered, strict=True):
            split_WS = self._split(counts)
            chosen.append((plan.choose_slots(routing.ids_TK, split_WS[rank], placement), split_WS))
        marks = [
            self._destinations(slot_TK) if wanted_TW is None else wanted_TW
            for wanted_TW, (slot_TK, _) in zip(wants, chosen, strict=True)
        ]
        traffics = self.transport.plan(marks, self._rows_ahead(gathered))
        return [
            plan.make_plan(
                slot_TK,
                split_WS,
                traffic,
                placement,
                rank,
                tensor_size=self.geometry.tensor_parallel,
                alignment=self.geometry.alignment,
                rows_per_slot=self._rows_per_slot(message),
            )
            for (slot_TK, split_WS), traffic, message in zip(chosen, traffics, gathered, strict=True)
        ]

    def _split(self, gathered: Tensor) -> Tensor:
        """The choices of every rank for every slot, from the messages of all ranks."""
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

    def _destinations(self, slot_TK: Tensor) -> Tensor:
        geometry = self.geometry
        if self.transport.replicated or self.transport.broadcasts:
            fill = self.transport.broadcasts
            return slot_TK.new_full((slot_TK.shape[0], self.world_size), fill, dtype=torch.bool)
        return plan.ranks_wanted(slot_TK, geometry.placement, geometry.tensor_parallel)

    def _rows_ahead(self, gathered: list[Tensor]) -> list[Tensor] | None:
        """The rows that every rank sends to every other, int64 [W, W] for each part, if the messages say so
        or there are none. `None` if ranks must still tell each other."""
        world = self.world_size
        if self.transport.replicated or world == 1:
            return [torch.zeros(world, world, dtype=torch.int64, device="cpu") for _ in gathered]
        if self._sizes_ahead:
            return [message[:, -world:].clone().fill_diagonal_(0) for message in gathered]
        self.observer.count("host_syncs", 1, layer=self.layer)
        return None

    def _out(self, phase: str, encoded_TB: Tensor, traffic: Traffic) -> Pending:
        """Send rows, one per token, to the ranks that want them."""
        pending = self.transport.begin_move(encoded_TB, traffic)
        return self._watched(pending, phase, traffic, 0, encoded_TB) if self.observer.enabled else pending

    def _back(
        self, phase: str, encoded_MB: Tensor, traffic: Traffic, codec: Codec, dtype: torch.dtype
    ) -> Pending:
        """Send rows, one per row received, to the ranks of their tokens. Some transports add rows on the
        way."""
        if self.transport.sums_on_the_way:
            add = partial(add_encoded, codec, self.geometry.hidden_size, dtype)
            pending = self.transport.begin_move_back(encoded_MB, traffic, add)
        else:
            pending = self.transport.begin_move_back(encoded_MB, traffic)
        return self._watched(pending, phase, traffic, 1, encoded_MB) if self.observer.enabled else pending

    def _watched(self, pending: Pending, phase: str, traffic: Traffic, way: int, encoded: Tensor) -> Pending:
        self._count_bytes(traffic, way, encoded.shape[1])
        return _Watched(pending, partial(self._span, phase))

    def _count_bytes(self, traffic: Traffic, way: int, row_bytes: int) -> None:
        """Count the bytes sent to each rank and, on several nodes, inside this node and to others. Relayed
        rows count at every step, so the sum over ranks is what the networks carry."""
        rows_W = self.transport.rows_sent(traffic, back=bool(way))
        self.observer.count("bytes_sent", rows_W * row_bytes, layer=self.layer)
        if self.nodes is not None and self.nodes.num_nodes > 1:
            rows_2 = self.nodes.by_tier(rows_W, self.geometry.rank)
            self.observer.count("bytes_by_tier", rows_2 * row_bytes, layer=self.layer)

    def _span(self, name: str) -> Any:
        waits.enter(self.layer)
        return self.observer.span(name, layer=self.layer)

    def dispatch(
        self, plan: Plan, x_TD: Tensor, weights_TK: Tensor, form: RowForm = RowForm.ROWS
    ) -> Crossing[Arrived]:
        """Send tokens, each followed by the slots, positions and weights of its choices."""
        with self._span("dispatch"):
            labels = plan.slot_TK.int(), plan.position_TK.int(), weights_TK.view(torch.int32)
            encoded = write([x_TD, torch.cat(labels, 1)], self.wire.dispatch, x_TD.dtype)

        def read(received: Tensor) -> Arrived:
            with self._span("dispatch"):
                weights_R, state = self._place(plan, received, weights_TK)
                if form is RowForm.FP8:
                    rows_RD, scales_RB = self._leave_fp8(encoded, received, state[0])
                    return Arrived(rows_RD, weights_R, plan.counts_e, state, scales_RB)
                nbytes = self.wire.dispatch.nbytes(x_TD.shape[1], x_TD.dtype)
                rows_RD = self._expand(x_TD, received[:, :nbytes], self.wire.dispatch, state[0])
                return Arrived(rows_RD, weights_R, plan.counts_e, state)

        return Crossing(partial(self._out, "dispatch", encoded, plan.traffic), read)

    def _place(self, plan: Plan, received: Tensor, weights_TK: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The weights of the rows, and the state, from the labels behind the rows that arrived."""
        top_k, traffic = weights_TK.shape[1], plan.traffic
        labels = from_bytes(received[:, -12 * top_k :], 3 * top_k, torch.int32)
        slots, positions, bits = labels.split(top_k, 1)
        slot = torch.cat([plan.slot_TK, slots.long()])
        position = torch.cat([plan.position_TK, positions.long()])
        weights = torch.cat([weights_TK, bits.view(torch.float32)])
        source_R, position_PK, weights_R = rows.index_rows(
            slot, position, weights, self.geometry.local_slots, plan.num_rows
        )
        self.observer.count("rows", plan.num_rows, layer=self.layer)
        return weights_R, [source_R, position_PK, traffic.sent_tokens_N, traffic.splits_2W, *traffic.hops]

    def _leave_fp8(self, encoded: Tensor, received: Tensor, source_R: Tensor) -> tuple[Tensor, Tensor]:
        """The values and scales of the rows. This rank's own rows are taken from `encoded`."""
        width = self.geometry.hidden_size
        nbytes = self.wire.dispatch.nbytes(width, torch.bfloat16)
        bytes_RB = rows.expand([encoded[:, :nbytes], received[:, :nbytes]], source_R)
        return bytes_RB[:, :width].view(torch.float8_e4m3fn), bytes_RB[:, width:].view(torch.float32)

    def fake_state(self, ids_TK: Tensor, rows: Any, size: Callable[[], Any]) -> list[Tensor]:
        source_R = ids_TK.new_empty(rows)
        position_PK = ids_TK.new_empty(size(), ids_TK.shape[1])
        splits_2W = torch.empty(2, self.world_size, dtype=torch.int64, device="cpu")
        hops = self.transport.fake_hops(ids_TK, size)
        return [source_R, position_PK, ids_TK.new_empty(size()), splits_2W, *hops]

    def combine(
        self,
        rows_RD: Tensor,
        weights_R: Tensor | None,
        state: Sequence[Tensor],
        num_tokens: int,
        addend: Addend | None = None,
        out_TD: Tensor | None = None,
    ) -> Crossing[Tensor]:
        """Keep the partial sums of this rank's tokens; send the others home."""
        (_, position_PK, traffic), dtype, codec = read_state(state), rows_RD.dtype, self.wire.combine
        encoded = None
        with self._span("combine"):
            own_TD = rows.reduce(rows_RD, position_PK, weights_R, self.geometry.max_rows_per_token)
            if not self.transport.replicated:
                own_TD, foreign = own_TD[:num_tokens], own_TD[num_tokens:]
                encoded = write([foreign], codec, dtype)

        def read(received: Tensor | None) -> Tensor:
            with self._span("combine"):
                y_TD = self._sum_home(own_TD, received, codec, dtype, traffic).float()
                added_TD = None if addend is None else addend()
                y_TD = (y_TD if added_TD is None else y_TD + added_TD.float()).to(dtype)
                return y_TD if out_TD is None else out_TD.copy_(y_TD)

        return Crossing(self._moving_back("combine", encoded, traffic, codec, dtype), read)

    def combine_backward(
        self, d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> Crossing[tuple[Tensor, Tensor]]:
        (source_R, _, traffic), codec = read_state(state), self.wire.combine_backward
        self.backwards.note(self.number)

        def read(received: Tensor | None) -> tuple[Tensor, Tensor]:
            with self._span("combine_backward"):
                d_y_RD = self._expand(d_y_TD, received, codec, source_R)
                if rows_RD is None:
                    return d_y_RD, weights_R.new_empty(0)
                # Padding rows are not zero after an expert with a bias, and may be anything on a device.
                d_weights_R = torch.where(source_R < 0, 0.0, (rows_RD.float() * d_y_RD.float()).sum(1))
                return (d_y_RD.float() * weights_R[:, None]).to(d_y_RD.dtype), d_weights_R

        return Crossing(self._moving_out("combine_backward", d_y_TD, codec, traffic), read)

    def dispatch_backward(
        self,
        d_rows_RD: Tensor,
        d_weights_R: Tensor,
        state: Sequence[Tensor],
        num_tokens: int,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> Crossing[tuple[Tensor, Tensor]]:
        """Keep the summed gradients of this rank's tokens and weights; send the others home."""
        (_, position_PK, traffic), dtype = read_state(state), d_rows_RD.dtype
        codec, encoded = self.wire.dispatch_backward, None
        with self._span("dispatch_backward"):
            own_TD = rows.reduce(d_rows_RD, position_PK, None, self.geometry.max_rows_per_token)
            own_TK = rows.pick_scalars(d_weights_R, position_PK)
            if not self.transport.replicated:
                encoded = write([own_TD[num_tokens:], own_TK[num_tokens:]], codec, dtype)
                own_TD, own_TK = own_TD[:num_tokens], own_TK[:num_tokens]

        def read(received: Tensor | None) -> tuple[Tensor, Tensor]:
            with self._span("dispatch_backward"):
                nbytes = codec.nbytes(own_TD.shape[1], dtype)
                sums_NB = None if received is None else received[:, :nbytes]
                d_x_TD = self._sum_home(own_TD, sums_NB, codec, dtype, traffic).to(dtype)
                if received is None:
                    d_weights_TK = self.transport.all_reduce(own_TK)
                else:
                    sent_back = from_bytes(received[:, nbytes:], own_TK.shape[1], torch.float32)
                    d_weights_TK = self._add_home(own_TK, sent_back, traffic)
                if out is None:
                    return d_x_TD, d_weights_TK
                return out[0].copy_(d_x_TD), out[1].copy_(d_weights_TK)

        return Crossing(self._moving_back("dispatch_backward", encoded, traffic, codec, dtype), read)

    def redispatch(self, x_TD: Tensor, state: Sequence[Tensor], num_rows: int) -> Tensor:
        codec, (source_R, _, traffic) = self.wire.dispatch, read_state(state)
        pending = self._moving_out("dispatch_again", x_TD, codec, traffic)()
        received = None if pending is None else pending.finish()
        with self._span("dispatch_again"):
            return self._expand(x_TD, received, codec, source_R)

    def _moving_out(
        self, phase: str, x_TD: Tensor, codec: Codec, traffic: Traffic
    ) -> Callable[[], Pending | None]:
        """Encode one row per token, and return the move; no rows move if all ranks have the same tokens."""
        if self.transport.replicated:
            return nothing_to_move
        with self._span(phase):
            return partial(self._out, phase, write([x_TD], codec, x_TD.dtype), traffic)

    def _moving_back(
        self, phase: str, encoded: Tensor | None, traffic: Traffic, codec: Codec, dtype: torch.dtype
    ) -> Callable[[], Pending | None]:
        if encoded is None:
            return nothing_to_move
        return partial(self._back, phase, encoded, traffic, codec, dtype)

    def _expand(self, own_TD: Tensor, received: Tensor | None, codec: Codec, source_R: Tensor) -> Tensor:
        foreign = [] if received is None else [codec.decode(received, own_TD.shape[1], own_TD.dtype)]
        return rows.expand([own_TD, *foreign], source_R)

    def _sum_home(
        self, own_TD: Tensor, received: Tensor | None, codec: Codec, dtype: torch.dtype, traffic: Traffic
    ) -> Tensor:
        """Add up the partial sums of all ranks: this rank's and `received`, as they crossed, or, if all ranks
        have the same tokens, by a sum over ranks."""
        if received is not None:
            return self._add_home(own_TD, codec.decode(received, own_TD.shape[1], dtype), traffic)
        if codec.name == "identity":
            return self.transport.all_reduce(own_TD.to(dtype))
        decode = partial(codec.decode, width=own_TD.shape[1], dtype=dtype)
        return self.transport.sum_encoded(own_TD, partial(codec.encode, dtype=dtype), decode).to(dtype)

    def _add_home(self, own: Tensor, sent_back: Tensor, traffic: Traffic) -> Tensor:
        tokens_N, sizes = self.transport.home(traffic)
        return rows.sum_home(own, sent_back, tokens_N, sizes, self.geometry.rank)


class _Watched:
    """A move whose wait is recorded as a span."""

    def __init__(self, pending: Pending, span: Callable[[], Any]) -> None:
        self.pending, self.span = pending, span

    def finish(self) -> Tensor:
        with self.span():
            return self.pending.finish()
