"""The dispatcher over two tiers: a slow network between nodes and a fast one inside each node.

    x_TD ──network──▶ pool_PD ──dispatcher inside the node──▶ rows_RD
    y_TD ◀──sum in node order◀──network── pool_PD ◀──dispatcher inside the node── rows_RD

A token crosses the network once to every node that holds one of its experts. It goes to this rank's
counterpart there, the rank at the same place in that node, which spreads it inside the node. The sums of the
experts' rows take the same way back.

The pool of a rank is its own T tokens, then those that counterparts sent, by node, then token. The dispatcher
inside the node (bytes, or kernels over NVLink) treats the pool as a batch like any other: the node's slots
are its experts, and choices of slots on other nodes are dropped. So its plans, its dispatch and its combine
are used unchanged, forward and backward.

Planning takes two messages before the node plans its pool:

    1. all ranks:     [header, choices of every expert, rows to every node for each part]
    2. counterparts:  labels (slots and weights) of the tokens that cross, and behind them the rows themselves

A part is the share of the batch that is planned on its own, such as a chunk of a schedule. All parts share
these messages, so many parts take hardly longer than one. If experts have replicas, slots are chosen from
the counts of all ranks, so message 1 is two messages: counts, then rows. Message 1 is padded to the length of
the one that `check_in` sends, if it fits. So a rank with a wrong input can report it without knowing what the
others plan. See docs/tiers.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from imbrex.codec.cast import Identity, as_bytes, from_bytes, pick_rows
from imbrex.codec.columns import write
from imbrex.contracts import (
    Addend,
    Arrived,
    Codec,
    Crossing,
    Dispatcher,
    Geometry,
    Listener,
    Pending,
    Routing,
    RowForm,
    Traffic,
    Transport,
    Wire,
)
from imbrex.exchange import plan, rows
from imbrex.exchange.agreement import HEADER, find_problem
from imbrex.exchange.bytes import BytesDispatcher
from imbrex.exchange.dispatcher import DispatcherBase
from imbrex.exchange.nvlink import NvlinkDispatcher
from imbrex.exchange.tiered_plan import (
    OutgoingBatch,
    SentBytes,
    TieredPlan,
    inside_of,
    join_parts,
    labels_by_part,
    nodes_wanted,
    pool_of,
    rows_across,
    traffics_of,
    why_not_tiers,
)
from imbrex.runtime.streams import StartedWork
from imbrex.transport.tiers import ACROSS, Flight, Tiers

TRAFFIC_TENSORS = 2
"""The number of tensors in a handle's state that describe the traffic between nodes. Those of the dispatcher
inside follow."""
PARTS_PER_MESSAGE = 16
"""The most parts whose rows to every node fit into the message of `check_in`. Before ranks plan more parts,
they check their inputs in a message of its own."""


class TieredDispatcher(BytesDispatcher):
    """Sends rows over the network to counterparts, then by another dispatcher inside the node. Rows that
    cross the network are encoded by the wire's codecs; inside a node they move in their own dtype."""

    sends_with_plan = True
    """Whether `agree` sends the rows of all parts. If not, each part's dispatch sends its own."""

    def __init__(
        self, geometry: Geometry, transport: Tiers, wire: Wire, observer: Listener, layer: int
    ) -> None:
        problem = why_not_tiers(geometry, transport)
        if problem is not None:
            raise ValueError(f"Exchange: transport 'tiered' cannot serve it: {problem}")
        kernels = transport.kernels
        inner = type(transport.bytes_inside if kernels is None else kernels), transport.nodes.size
        super().__init__(geometry, cast("Transport", transport), wire, observer, layer, *inner)
        self.tiers, self.sent_inside = transport, SentBytes()
        inside = inside_of(geometry, transport)
        arguments = Wire(**dict.fromkeys(Wire.__dataclass_fields__, Identity())), self.sent_inside, layer
        self.inside: Dispatcher = (
            BytesDispatcher(inside, transport.bytes_inside, *arguments)
            if kernels is None
            else NvlinkDispatcher(inside, kernels, *arguments)
        )
        self.dtypes = self.inside.dtypes
        local = inside.placement.num_slots
        first = geometry.placement.rank_offsets[transport.node * inside.placement.num_ranks]
        self.slots = range(first, first + local)

    def take_agreement(self, number: int, node_of_W: Sequence[int]) -> None:
        super().take_agreement(number, node_of_W)
        self.inside.take_agreement(number, [0] * self.tiers.nodes.size)

    def beside(self, chunks: int, *, in_turn: bool = False) -> TieredDispatcher:
        inside = self.inside.beside(chunks)
        if inside is self.inside and not in_turn:
            return self
        other = copy.copy(self)
        other.inside, other.sends_with_plan = inside, not in_turn
        return other

    def why_not_form(self, form: RowForm) -> str | None:
        return DispatcherBase.why_not_form(self, form)

    def form_of(self, forms: Sequence[RowForm], x_TD: Tensor, weights_TK: Tensor) -> RowForm:
        return RowForm.ROWS

    def check(self, *, synchronize: bool = False) -> None:
        self.inside.check(synchronize=synchronize)
        super().check(synchronize=synchronize)

    def close(self) -> None:
        super().close()
        self.inside.close()

    def _checks_itself(self, num_parts: int) -> bool:
        return num_parts > 0 and self._length(num_parts) <= self._room

    @property
    def _room(self) -> int:
        """The number of values behind the header in the message of `check_in`: choices of every expert, and
        rows of `PARTS_PER_MESSAGE` parts to every node. It does not depend on the placement, so that ranks
        whose placements differ can still read each other's headers."""
        return self.geometry.placement.num_experts + self.tiers.nodes.num_nodes * PARTS_PER_MESSAGE

    def _length(self, num_parts: int) -> int:
        """The number of values behind the header in the first message of a plan of `num_parts` parts."""
        num_experts = self.geometry.placement.num_experts
        if self.geometry.placement.has_replicas:
            return num_experts * num_parts
        return num_experts + self.tiers.nodes.num_nodes * num_parts

    def _make_plans(self, parts: Sequence[tuple[Tensor, Routing]]) -> list[Any]:
        batch = self._exchange_counts(parts)
        flight, traffics = self._send_labels(batch), batch.traffics
        row_flights = self._send_rows_of_parts(parts, traffics)
        if batch.uncounted is not None:
            # The counts are needed by observers and by splits of a user alone, so they are read after the
            # rows have left.
            self._split(batch.uncounted)
        slots = batch.slot_TK.split(batch.sizes)
        labels = labels_by_part(flight.finish(), traffics)
        pools = [pool_of(*of_part, self.slots) for of_part in zip(parts, slots, labels, strict=True)]
        inside = self.inside.agree(pools)
        return [
            TieredPlan(traffic=traffic, inside=inner, weights_PK=routing.weights_TK, flights=flights)
            for traffic, inner, (_, routing), flights in zip(
                traffics, inside, pools, row_flights, strict=True
            )
        ]

    def _exchange_counts(self, parts: Sequence[tuple[Tensor, Routing]]) -> OutgoingBatch:
        """Exchange the counts of rows between nodes: in one message, or two if experts have replicas. Work
        that needs no answer is done before the answer is waited for."""
        header, uncounted = self._header_of(parts), None
        placement, sizes = self.geometry.placement, [len(x_TD) for x_TD, _ in parts]
        ids = [routing.ids_TK for _, routing in parts]
        ids_TK = join_parts(ids)
        if placement.has_replicas:
            slot_TK = join_parts(self._choose(ids, header))
        else:
            slot_TK = plan.only_slots(ids_TK, placement)
        others_TN = nodes_wanted(slot_TK, self.geometry, self.tiers)
        rows_X = torch.cat([part_TN.sum(0) for part_TN in others_TN.split(sizes)])
        weights_TK = join_parts([routing.weights_TK.detach() for _, routing in parts])
        label_TB = torch.cat([as_bytes(slot_TK.int()), as_bytes(weights_TK)], 1)
        if placement.has_replicas:
            self.observer.count("host_syncs", 1, layer=self.layer)
            rows_WX = self.transport.exchange_counts(rows_X)
        else:
            counts_E = plan.count_choices(ids_TK, placement.num_experts)
            uncounted = self._gather_padded(header, [counts_E, rows_X])
            rows_WX = uncounted[:, HEADER + placement.num_experts :][:, : len(rows_X)]
        traffics, tokens_N = traffics_of(self.tiers, others_TN, sizes, rows_WX)
        label_NB = pick_rows(label_TB, tokens_N)
        return OutgoingBatch(
            slot_TK=slot_TK, label_NB=label_NB, sizes=sizes, traffics=traffics, uncounted=uncounted
        )

    def _header_of(self, parts: Sequence[tuple[Tensor, Routing]]) -> Tensor:
        """The header of this rank's message, int64 [HEADER]. Raises ValueError, on every rank, if this rank's
        input is wrong."""
        problems = [find_problem(*part, self.geometry, self.place) for part in parts]
        problem = next((problem for problem in problems if problem[0]), problems[0])
        header = self._header(problem, parts[0][0], parts[0][1].ids_TK, len(parts))
        if problem[0]:
            self._gather_padded(header, [header.new_zeros(self._length(len(parts)))])
        return header

    def _gather_padded(self, header: Tensor, counts: Sequence[Tensor]) -> Tensor:
        """Gather a message of every rank, int64 [W, L] on the host. It is padded with zeros to the length of
        `check_in`'s, unless it is longer."""
        length = sum(len(part) for part in counts)
        padding = header.new_zeros(max(self._room - length, 0))
        return self._gather([torch.cat([header, *counts, padding])])[0]

    def _choose(self, ids: Sequence[Tensor], header: Tensor) -> list[Tensor]:
        """The slot of every choice, int64 [T, K] for each part, from the counts of all ranks."""
        placement, rank = self.geometry.placement, self.geometry.rank
        counts = [plan.count_choices(ids_TK, placement.num_experts) for ids_TK in ids]
        gathered = self._gather_padded(header, counts)
        blocks = gathered[:, HEADER:].split(placement.num_experts, 1)
        splits = [self._split(torch.cat([gathered[:, :HEADER], block], 1)) for block in blocks[: len(ids)]]
        return [
            plan.choose_slots(ids_TK, split_WS[rank], placement)
            for ids_TK, split_WS in zip(ids, splits, strict=True)
        ]

    def _send_labels(self, batch: OutgoingBatch) -> Flight:
        """Start sending the labels of all parts to counterparts, in one message to each node."""
        # host sync: none, sizes are on the host
        send, receive = torch.stack([traffic.splits_2W for traffic in batch.traffics]).sum(0).tolist()
        return self.tiers.rail.begin(ACROSS, "plan", batch.label_NB, receive).send(batch.label_NB, send)

    def _send_rows_of_parts(
        self, parts: Sequence[tuple[Tensor, Routing]], traffics: Sequence[Traffic]
    ) -> list[list[Flight]]:
        """Start sending the rows of every part, while the node still plans its pool. Each part has a list of
        one flight, or none if its dispatch sends its rows."""
        if not self.sends_with_plan:
            return [[] for _ in parts]
        return [
            [self._send_rows(rows_across(x_TD.detach(), self.wire.dispatch, traffic), traffic)]
            for (x_TD, _), traffic in zip(parts, traffics, strict=True)
        ]

    def _send_rows(self, encoded_NB: Tensor | None, traffic: Traffic) -> Flight:
        """Start sending encoded rows, which lie by destination node, to counterparts."""
        assert encoded_NB is not None
        send, receive = traffic.splits_2W.tolist()
        self._count_rail(traffic, 0, encoded_NB)
        return self.tiers.rail.begin(ACROSS, "dispatch", encoded_NB, receive).send(encoded_NB, send)

    def dispatch(
        self, plan: Any, x_TD: Tensor, weights_TK: Tensor, form: RowForm = RowForm.ROWS
    ) -> Crossing[Arrived]:
        traffic = plan.traffic

        def read(arrived: Arrived) -> Arrived:
            if self.observer.enabled:
                self.observer.count("rows", arrived.counts_e.sum(), layer=self.layer)
            state = [traffic.sent_tokens_N, traffic.splits_2W, *arrived.state]
            return arrived._replace(state=state)

        def spread(pool_PD: Tensor) -> Crossing[Arrived]:
            return self.inside.dispatch(plan.inside, pool_PD, plan.weights_PK)

        return self._crossing_out("dispatch", x_TD, self.wire.dispatch, traffic, spread, read, plan.flights)

    def combine(
        self,
        rows_RD: Tensor,
        weights_R: Tensor | None,
        state: Sequence[Tensor],
        num_tokens: int,
        addend: Addend | None = None,
        out_TD: Tensor | None = None,
    ) -> Crossing[Tensor]:
        traffic, inner = self._read(state)
        with self._span("combine"):
            summing = self.inside.combine(rows_RD, weights_R, inner, num_tokens + num_received(traffic))

        def read(sums: list[Tensor]) -> Tensor:
            added_TD = None if addend is None else addend()
            y_TD = (sums[0] if added_TD is None else sums[0] + added_TD.float()).to(rows_RD.dtype)
            return y_TD if out_TD is None else out_TD.copy_(y_TD)

        layout = _SumLayout(codec=self.wire.combine, width=self.geometry.hidden_size, dtype=rows_RD.dtype)
        return self._crossing_back("combine", summing, layout, traffic, num_tokens, read)

    def combine_backward(
        self, d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> Crossing[tuple[Tensor, Tensor]]:
        traffic, inner = self._read(state)

        def spread(pool_PD: Tensor) -> Crossing[tuple[Tensor, Tensor]]:
            return self.inside.combine_backward(pool_PD, rows_RD, weights_R, inner)

        codec = self.wire.combine_backward
        return self._crossing_out("combine_backward", d_y_TD, codec, traffic, spread, lambda value: value)

    def dispatch_backward(
        self,
        d_rows_RD: Tensor,
        d_weights_R: Tensor,
        state: Sequence[Tensor],
        num_tokens: int,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> Crossing[tuple[Tensor, Tensor]]:
        traffic, inner = self._read(state)
        with self._span("dispatch_backward"):
            pool = num_tokens + num_received(traffic)
            summing = self.inside.dispatch_backward(d_rows_RD, d_weights_R, inner, pool)

        def read(sums: list[Tensor]) -> tuple[Tensor, Tensor]:
            d_x_TD, d_weights_TK = sums[0].to(d_rows_RD.dtype), sums[1]
            if out is None:
                return d_x_TD, d_weights_TK
            return out[0].copy_(d_x_TD), out[1].copy_(d_weights_TK)

        geometry, dtype = self.geometry, d_rows_RD.dtype
        codec = self.wire.dispatch_backward
        layout = _SumLayout(codec=codec, width=geometry.hidden_size, dtype=dtype, columns=geometry.top_k)
        return self._crossing_back("dispatch_backward", summing, layout, traffic, num_tokens, read)

    def redispatch(self, x_TD: Tensor, state: Sequence[Tensor], num_rows: int) -> Tensor:
        traffic, inner = self._read(state)

        def spread(pool_PD: Tensor) -> Crossing[Tensor]:
            again = self.inside.redispatch(pool_PD, inner, num_rows)
            return Crossing(lambda: None, lambda _: again)

        crossing = self._crossing_out(
            "dispatch_again", x_TD, self.wire.dispatch, traffic, spread, lambda value: value
        )
        pending = crossing.move()
        assert pending is not None
        return crossing.read(pending.finish())

    def fake_state(self, ids_TK: Tensor, rows: Any, size: Callable[[], Any]) -> list[Tensor]:
        splits_2N = torch.empty(2, self.tiers.nodes.num_nodes, dtype=torch.int64, device="cpu")
        return [ids_TK.new_empty(size()), splits_2N, *self.inside.fake_state(ids_TK, rows, size)]

    def _read(self, state: Sequence[Tensor]) -> tuple[Traffic, Sequence[Tensor]]:
        """The traffic between nodes, and the state of the dispatcher inside, from a handle's state."""
        return Traffic(sent_tokens_N=state[0], splits_2W=state[1]), state[TRAFFIC_TENSORS:]

    def _sum_nodes(self, own: Tensor, received: Tensor, traffic: Traffic) -> Tensor:
        """Add the sums that other nodes sent to this node's, in node order, in float32."""
        sizes = traffic.splits_2W[0].tolist()
        return rows.sum_home(own, received, traffic.sent_tokens_N, sizes, self.tiers.node)

    def _crossing_out(
        self,
        phase: str,
        rows_TD: Tensor,
        codec: Codec,
        traffic: Traffic,
        spread: Callable[[Tensor], Crossing[Any]],
        read: Callable[[Any], Any],
        flights: list[Flight] | None = None,
    ) -> Crossing[Any]:
        """The crossing that sends rows to other nodes and then spreads the pool inside this one.

        spread: makes the crossing inside the node from pool_PD. read: takes the result of that crossing, and
        returns this one's. flights: one flight, taken from the list, if the rows have left already.
        """
        with self._span(phase):
            started = flights.pop() if flights else None
            encoded_NB = None if started else rows_across(rows_TD, codec, traffic)

        def move() -> Pending:
            flight = started or self._send_rows(encoded_NB, traffic)

            def spread_pool() -> tuple[Crossing[Any], Pending | None]:
                received_MD = codec.decode(flight.wait(), rows_TD.shape[1], rows_TD.dtype)
                inner = spread(torch.cat([rows_TD, received_MD]))
                return inner, inner.move()

            begun = self._start_on_lane(spread_pool)

            def finish() -> tuple[Crossing[Any], Any]:
                with self._span(phase):
                    inner, pending = begun.finish()
                    received = None if pending is None else pending.finish()
                    self._finish(flight)
                    return inner, received

            return _TwoTierMove(begun, finish)

        def read_inside(received: tuple[Crossing[Any], Any]) -> Any:
            with self._span(phase):
                return read(received[0].read(received[1]))

        return Crossing(move, read_inside)

    def _crossing_back(
        self,
        phase: str,
        summing: Crossing[Any],
        layout: _SumLayout,
        traffic: Traffic,
        num_tokens: int,
        read: Callable[[list[Tensor]], Any],
    ) -> Crossing[Any]:
        """The crossing that sums rows inside the node, sends the sums of received tokens back to their nodes,
        and adds up the sums of this rank's own tokens over nodes, in float32.

        summing: the crossing inside the node, whose result is one tensor over the pool, or a tuple of two.
        read: takes the summed tensors of this rank's tokens, and returns this crossing's result.
        """

        def move() -> Pending:
            # Receives are posted before anyone waits for sums, so that no sender waits for its receiver.
            send, receive = traffic.splits_2W.tolist()
            like = traffic.sent_tokens_N.new_empty(0, layout.nbytes, dtype=torch.uint8)
            flight = self.tiers.rail.begin(ACROSS, "combine", like, send)
            self._count_rail(traffic, 1, like)

            def sum_inside() -> list[Tensor]:
                sums = _sums_over_node(summing)
                flight.send(layout.write([of_pool[num_tokens:] for of_pool in sums]), receive)
                return [of_pool[:num_tokens] for of_pool in sums]

            begun = self._start_sums(sum_inside)

            def finish() -> tuple[list[Tensor], Tensor]:
                with self._span(phase):
                    return begun.finish(), self._finish(flight)

            return _TwoTierMove(begun, finish)

        def add_up(received: tuple[list[Tensor], Tensor]) -> Any:
            with self._span(phase):
                pairs = zip(received[0], layout.read(received[1]), strict=True)
                return read([self._sum_nodes(own, of_others, traffic) for own, of_others in pairs])

        return Crossing(move, add_up)

    def _start_sums(self, work: Callable[[], list[Tensor]]) -> StartedWork:
        """Start the sums inside the node: on the lane, or on the caller's own stream if a node has one rank.

        A rank alone on its node waits for no other rank in it. On a lane its kernels would queue for
        multiprocessors behind the products that the caller launches next, and delay the network.
        """
        if self.tiers.nodes.size == 1:
            return StartedWork(result=torch.no_grad()(work)())
        return self._start_on_lane(work)

    def _start_on_lane(self, work: Callable[[], Any]) -> StartedWork:
        return self.tiers.lane.start(torch.no_grad()(work))

    def _finish(self, flight: Flight) -> Tensor:
        """Wait for a flight, and return the rows that it received. Also count, on the caller's thread, the
        bytes that the dispatcher inside has sent."""
        inside, self.sent_inside.bytes_M = self.sent_inside.bytes_M, []
        for bytes_M in inside if self.observer.enabled else []:
            sent_W = torch.zeros(self.world_size, dtype=torch.int64, device="cpu")
            sent_W[list(self.tiers.bytes_inside.ranks)] = bytes_M
            self._count_sent(sent_W)
        return flight.finish()

    def _count_rail(self, traffic: Traffic, way: int, like: Tensor) -> None:
        """Count the bytes sent to counterparts. way: 0 out, 1 back. like: rows as wide as those sent."""
        if not self.observer.enabled:
            return
        sent_W = torch.zeros(self.world_size, dtype=torch.int64, device="cpu")
        sent_W[list(self.tiers.rail.ranks)] = traffic.splits_2W[way] * like.shape[1]
        self._count_sent(sent_W)

    def _count_sent(self, sent_W: Tensor) -> None:
        self.observer.count("bytes_sent", sent_W, layer=self.layer)
        nodes = self.tiers.nodes
        if nodes.num_nodes > 1:
            self.observer.count("bytes_by_tier", nodes.by_tier(sent_W, self.geometry.rank), layer=self.layer)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SumLayout:
    """The layout of one token's sums on the wire: `width` values as the codec writes them, then `columns`
    float32 values as they are (gradients of routing weights), if any."""

    codec: Codec
    width: int
    dtype: torch.dtype
    columns: int = 0

    @property
    def nbytes(self) -> int:
        return self.codec.nbytes(self.width, self.dtype) + 4 * self.columns

    def write(self, values: list[Tensor]) -> Tensor:
        return write(values, self.codec, self.dtype)

    def read(self, received_NB: Tensor) -> list[Tensor]:
        """The sums, and the further columns if there are any."""
        encoded = received_NB.shape[1] - 4 * self.columns
        values = [self.codec.decode(received_NB[:, :encoded], self.width, self.dtype)]
        if self.columns:
            values.append(from_bytes(received_NB[:, encoded:], self.columns, torch.float32))
        return values


def _sums_over_node(summing: Crossing[Any]) -> list[Tensor]:
    """Run a crossing inside the node to its end: the sums over the node's ranks, of every token of the
    pool."""
    pending = summing.move()
    sums = summing.read(None if pending is None else pending.finish())
    return [*sums] if isinstance(sums, tuple) else [sums]


class _TwoTierMove:
    """A `Pending` of both tiers. The second begins by itself when the first has arrived.

    begun: the work on the lane; kept alive until the move is finished.
    """

    def __init__(self, begun: StartedWork, finish: Callable[[], Any]) -> None:
        self.begun, self.finish = begun, finish


def num_received(traffic: Traffic) -> int:
    """The number of tokens in the pool that came from other nodes."""
    return int(traffic.splits_2W[1].sum())
