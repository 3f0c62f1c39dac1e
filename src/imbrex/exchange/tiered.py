"""The dispatcher over two tiers: rows cross the network once to a node that wants them, and spread inside.

    x_TD ──across──▶ pool_PD ──the node's own dispatcher──▶ rows_RD
    y_TD ◀──sum in node order◀──across── pool_PD ◀──the node's own dispatcher── rows_RD

The pool of a rank is its own T tokens, then those that arrived from its counterparts, the ranks of equal
place on other nodes, by node, then token. To the dispatcher inside, bytes or kernels over NVLink, the pool is
a batch like any other: the slots of the node are its experts, and choices of other nodes are dropped. So its
planning, its spreading and its sums are used as they are, forward and backward.

Which replica takes a choice, and which choices go where, is settled before rows move: slots and weights of
the choices cross first, of all chunks together. See docs/tiers.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
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
    Placement,
    Routing,
    RowForm,
    Traffic,
    Transport,
    Wire,
)
from imbrex.exchange import plan, rows
from imbrex.exchange.bytes import BytesDispatcher
from imbrex.exchange.dispatcher import DispatcherBase
from imbrex.exchange.nvlink import NvlinkDispatcher
from imbrex.placement import split_evenly
from imbrex.runtime.streams import Begun
from imbrex.transport.base import straight
from imbrex.transport.tiers import ACROSS, Flight, Tiers

OURS = 2
"""Tensors of the state before those of the dispatcher inside: the traffic between nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TieredPlan:
    """The traffic between nodes, the inner dispatcher's plan of the pool, and the pool's weights.

    ahead: the rows between nodes, where these left with the plan; the first dispatch takes them.
    """

    traffic: Traffic
    inside: Any
    weights_PK: Tensor
    ahead: list[Flight]


class TieredDispatcher(BytesDispatcher):
    """Rows over the network to counterparts, and then by the dispatcher inside a node. Codecs are the
    network's; inside a node rows move as they are."""

    leaves_ahead = True
    """Whether rows leave as soon as it is known where to, with the plan."""

    def __init__(
        self, geometry: Geometry, transport: Tiers, wire: Wire, observer: Listener, layer: int
    ) -> None:
        problem = why_not_tiers(geometry, transport)
        if problem is not None:
            raise ValueError(f"Exchange: transport 'tiered' cannot serve it: {problem}")
        kernels = transport.kernels
        inner = type(transport.bytes_inside if kernels is None else kernels), transport.nodes.size
        super().__init__(geometry, cast("Transport", transport), wire, observer, layer, *inner)
        self.tiers, self.listening = transport, _Inside()
        inside = inside_of(geometry, transport)
        arguments = Wire(**dict.fromkeys(Wire.__dataclass_fields__, Identity())), self.listening, layer
        self.inside: Dispatcher = (
            BytesDispatcher(inside, transport.bytes_inside, *arguments)
            if kernels is None
            else NvlinkDispatcher(inside, kernels, *arguments)
        )
        local = inside.placement.num_slots
        first = geometry.placement.rank_offsets[transport.node * inside.placement.num_ranks]
        self.slots = range(first, first + local)

    def met(self, number: int, node_of_W: Sequence[int]) -> None:
        super().met(number, node_of_W)
        self.inside.met(number, [0] * self.tiers.nodes.size)

    @property
    def dtypes(self) -> Sequence[torch.dtype]:
        return self.inside.dtypes

    def beside(self, chunks: int, *, in_turn: bool = False) -> TieredDispatcher:
        inside = self.inside.beside(chunks)
        if inside is self.inside and not in_turn:
            return self
        other = copy.copy(self)
        other.inside, other.leaves_ahead = inside, not in_turn
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

    @property
    def _sizes_ahead(self) -> bool:
        """Whether a rank knows what it sends to which node before it knows what others choose."""
        return self.world_size > 1 and not self.geometry.placement.has_replicas

    @property
    def _num_places(self) -> int:
        return self.tiers.nodes.num_nodes

    def _wanted(self, slot_TK: Tensor) -> Tensor:
        """Which nodes a token must reach, bool [T, nodes]: what ranks tell each other beside their counts."""
        geometry, nodes = self.geometry, self.tiers.nodes
        wanted_TW = plan.ranks_wanted(slot_TK, geometry.placement, geometry.tensor_parallel)
        return wanted_TW.unflatten(1, (nodes.num_nodes, nodes.size)).any(2)

    def _make_plans(self, parts: Sequence[tuple[Tensor, Routing]]) -> list[Any]:
        placement, rank = self.geometry.placement, self.geometry.rank
        slots, (gathered, wants) = [], self.exchange_choices(parts)
        for (_, routing), counts in zip(parts, gathered, strict=True):
            split_WS = self._split(counts)
            slots.append(plan.choose_slots(routing.ids_TK, split_WS[rank], placement))
        per_part = [
            self._wanted(slot_TK) if wanted_TN is None else wanted_TN
            for wanted_TN, slot_TK in zip(wants, slots, strict=True)
        ]
        traffics = [
            straight(wanted_TN, rows_NN, self.tiers.node)
            for wanted_TN, rows_NN in zip(per_part, self._rows_between(gathered, per_part), strict=True)
        ]
        labels = [
            torch.cat([as_bytes(slot_TK.int()), as_bytes(routing.weights_TK)], 1)
            for slot_TK, (_, routing) in zip(slots, parts, strict=True)
        ]
        flight, sizes = self._tell(labels, traffics)
        ahead = self._start(parts, traffics)
        came = self._heard(flight, sizes)
        pools = [self._pool(*of_part) for of_part in zip(parts, slots, traffics, came, strict=True)]
        inside = self.inside.agree([(x_PD, routing) for x_PD, routing in pools])
        return [
            TieredPlan(traffic=traffic, inside=inner, weights_PK=routing.weights_TK, ahead=leaving)
            for traffic, inner, (_, routing), leaving in zip(traffics, inside, pools, ahead, strict=True)
        ]

    def _rows_between(self, gathered: Sequence[Tensor], per_part: Sequence[Tensor]) -> list[Tensor]:
        """Tokens that every counterpart, node by node, sends to every node, int64 [nodes, nodes] of every
        part, with a diagonal of zeros. per_part: which nodes this rank's tokens want."""
        nodes = self.tiers.nodes
        if self.world_size == 1:
            return [torch.zeros(1, 1, dtype=torch.int64, device="cpu")] * len(gathered)
        if self._sizes_ahead:
            rows_WN = [message[:, -nodes.num_nodes :] for message in gathered]
        else:
            self.observer.count("host_syncs", 1, layer=self.layer)
            message = torch.cat([wanted_TN.sum(0) for wanted_TN in per_part])
            rows_WN = list(self.transport.exchange_counts(message).chunk(len(per_part), 1))
        return [one_WN[self.tiers.place :: nodes.size].clone().fill_diagonal_(0) for one_WN in rows_WN]

    def _tell(self, labels: Sequence[Tensor], traffics: Sequence[Traffic]) -> tuple[Flight, list[list[int]]]:
        """Labels of the tokens that leave, by node, part and token: one message to a node. And how many come
        of every part from every node."""
        send, receive = ([traffic.splits_2W[way].tolist() for traffic in traffics] for way in (0, 1))
        leaving = [
            pick_rows(label, traffic.sent_tokens_N).split(sizes)
            for label, traffic, sizes in zip(labels, traffics, send, strict=True)
        ]
        both = [[sum(sizes) for sizes in zip(*side, strict=True)] for side in (send, receive)]
        flight = self.tiers.rail.begin(ACROSS, "plan", labels[0], both[1])
        by_node = [part[node] for node in range(self.tiers.nodes.num_nodes) for part in leaving]
        return flight.send(torch.cat(by_node), both[0]), receive

    def _start(
        self, parts: Sequence[tuple[Tensor, Routing]], traffics: Sequence[Traffic]
    ) -> list[list[Flight]]:
        """Rows of every part on their way, while the node is still planned."""
        if not self.leaves_ahead:
            return [[] for _ in parts]
        return [
            [self._leave(rows_across(x_TD.detach(), self.wire.dispatch, traffic), traffic)]
            for (x_TD, _), traffic in zip(parts, traffics, strict=True)
        ]

    def _heard(self, labels: Flight, sizes: list[list[int]]) -> list[Tensor]:
        """Labels of the tokens that arrive, of every part, by node and token."""
        blocks = labels.finish().split([n for by_part in zip(*sizes, strict=True) for n in by_part])
        return [torch.cat(blocks[part :: len(sizes)]) for part in range(len(sizes))]

    def _leave(self, leaving: Tensor | None, traffic: Traffic) -> Flight:
        """Rows, by node, on their way to the nodes that want them."""
        assert leaving is not None
        send, receive = traffic.splits_2W.tolist()
        self._count(traffic, 0, leaving)
        return self.tiers.rail.begin(ACROSS, "dispatch", leaving, receive).send(leaving, send)

    def _pool(
        self, part: tuple[Tensor, Routing], slot_TK: Tensor, traffic: Traffic, came: Tensor
    ) -> tuple[Tensor, Routing]:
        """The pool as the dispatcher inside is asked about it: its tokens have not come, and are not read."""
        (x_TD, routing), top_k = part, slot_TK.shape[1]
        slot_PK = torch.cat([slot_TK, from_bytes(came[:, : 4 * top_k], top_k, torch.int32).long()])
        theirs = from_bytes(came[:, 4 * top_k :], top_k, torch.float32)
        here = (slot_PK >= self.slots.start) & (slot_PK < self.slots.stop)
        ids_PK = torch.where(here, slot_PK - self.slots.start, -1)
        weights_PK = torch.cat([routing.weights_TK.detach(), theirs])
        x_PD = x_TD.detach().new_empty(1, x_TD.shape[1]).expand(len(slot_PK), -1)
        x_PD.requires_grad_(x_TD.requires_grad)
        return x_PD, Routing(ids_TK=ids_PK, weights_TK=weights_PK)

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

        return self._going("dispatch", x_TD, self.wire.dispatch, traffic, spread, read, plan.ahead)

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
            summing = self.inside.combine(rows_RD, weights_R, inner, num_tokens + arriving(traffic))

        def read(home: _Home) -> Tensor:
            (own_TD,), (came_ND, *_) = home.own, home.came
            y_TD = self._add(own_TD, came_ND, traffic)
            added_TD = None if addend is None else addend()
            y_TD = (y_TD if added_TD is None else y_TD + added_TD.float()).to(rows_RD.dtype)
            return y_TD if out_TD is None else out_TD.copy_(y_TD)

        codec, dtype = self.wire.combine, rows_RD.dtype
        return self._coming("combine", summing, codec, dtype, traffic, num_tokens, read)

    def combine_backward(
        self, d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> Crossing[tuple[Tensor, Tensor]]:
        traffic, inner = self._read(state)

        def spread(pool_PD: Tensor) -> Crossing[tuple[Tensor, Tensor]]:
            return self.inside.combine_backward(pool_PD, rows_RD, weights_R, inner)

        codec = self.wire.combine_backward
        return self._going("combine_backward", d_y_TD, codec, traffic, spread, lambda value: value)

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
            pool = num_tokens + arriving(traffic)
            summing = self.inside.dispatch_backward(d_rows_RD, d_weights_R, inner, pool)

        def read(home: _Home) -> tuple[Tensor, Tensor]:
            values = [self._add(own, came, traffic) for own, came in zip(home.own, home.came, strict=True)]
            d_x_TD, d_weights_TK = values[0].to(d_rows_RD.dtype), values[1]
            return (
                (d_x_TD, d_weights_TK) if out is None else (out[0].copy_(d_x_TD), out[1].copy_(d_weights_TK))
            )

        codec, dtype = self.wire.dispatch_backward, d_rows_RD.dtype
        return self._coming("dispatch_backward", summing, codec, dtype, traffic, num_tokens, read)

    def redispatch(self, x_TD: Tensor, state: Sequence[Tensor], num_rows: int) -> Tensor:
        traffic, inner = self._read(state)

        def spread(pool_PD: Tensor) -> Crossing[Tensor]:
            again = self.inside.redispatch(pool_PD, inner, num_rows)
            return Crossing(lambda: None, lambda _: again)

        crossing = self._going(
            "dispatch_again", x_TD, self.wire.dispatch, traffic, spread, lambda value: value
        )
        pending = crossing.move()
        assert pending is not None
        return crossing.read(pending.finish())

    def fake_state(self, ids_TK: Tensor, rows: Any, size: Callable[[], Any]) -> list[Tensor]:
        splits_2N = torch.empty(2, self.tiers.nodes.num_nodes, dtype=torch.int64, device="cpu")
        return [ids_TK.new_empty(size()), splits_2N, *self.inside.fake_state(ids_TK, rows, size)]

    def _read(self, state: Sequence[Tensor]) -> tuple[Traffic, Sequence[Tensor]]:
        return Traffic(sent_tokens_N=state[0], splits_2W=state[1]), state[OURS:]

    def _add(self, own: Tensor, came: Tensor, traffic: Traffic) -> Tensor:
        """Sums over nodes, in their order, float32."""
        sizes = traffic.splits_2W[0].tolist()
        return rows.sum_home(own, came, traffic.sent_tokens_N, sizes, self.tiers.node)

    def _going(
        self,
        phase: str,
        rows_TD: Tensor,
        codec: Codec,
        traffic: Traffic,
        spread: Callable[[Tensor], Crossing[Any]],
        read: Callable[[Any], Any],
        ahead: list[Flight] | None = None,
    ) -> Crossing[Any]:
        """Rows over the network into the pool, and what `spread` makes of that. read: of its result. ahead:
        the rows, where they are on their way."""
        with self._span(phase):
            under_way = ahead.pop() if ahead else None
            written = None if under_way else rows_across(rows_TD, codec, traffic)

        def move() -> Pending:
            flight = under_way or self._leave(written, traffic)

            def go_on() -> tuple[Crossing[Any], Pending | None]:
                came_ND = codec.decode(flight.wait(), rows_TD.shape[1], rows_TD.dtype)
                inner = spread(torch.cat([rows_TD, came_ND]))
                return inner, inner.move()

            beside = self._beside(go_on)

            def finish() -> tuple[Crossing[Any], Any]:
                with self._span(phase):
                    inner, pending = beside.finish()
                    arrived = None if pending is None else pending.finish()
                    self._end(flight)
                    return inner, arrived

            return _UnderWay(beside, finish)

        def read_both(arrived: tuple[Crossing[Any], Any]) -> Any:
            with self._span(phase):
                return read(arrived[0].read(arrived[1]))

        return Crossing(move, read_both)

    def _coming(
        self,
        phase: str,
        summing: Crossing[Any],
        codec: Codec,
        dtype: torch.dtype,
        traffic: Traffic,
        num_tokens: int,
        read: Callable[[_Home], Any],
    ) -> Crossing[Any]:
        """Sums made inside the node, and those of tokens that came from other nodes back to these. Float32
        values beside them, if any, cross as they are."""
        width, columns = self.geometry.hidden_size, self.geometry.top_k * (phase == "dispatch_backward")
        nbytes = codec.nbytes(width, dtype)

        def move() -> Pending:
            send, receive = traffic.splits_2W.tolist()
            like = traffic.sent_tokens_N.new_empty(0, nbytes + 4 * columns, dtype=torch.uint8)
            flight = self.tiers.rail.begin(ACROSS, "combine", like, send)
            self._count(traffic, 1, like)

            def go_on() -> tuple[Tensor, ...]:
                pending = summing.move()
                sums = summing.read(None if pending is None else pending.finish())
                values = sums if isinstance(sums, tuple) else (sums,)
                flight.send(write([value[num_tokens:] for value in values], codec, dtype), receive)
                return tuple(value[:num_tokens] for value in values)

            # Alone on a node a rank waits for nobody in it; in a lane the sum's kernels would wait for the
            # multiprocessors behind products that the caller queues next, and the network with them.
            beside = Begun(result=torch.no_grad()(go_on)()) if self._alone else self._beside(go_on)

            def finish() -> tuple[tuple[Tensor, ...], Tensor]:
                with self._span(phase):
                    return beside.finish(), self._end(flight)

            return _UnderWay(beside, finish)

        def read_both(arrived: tuple[tuple[Tensor, ...], Tensor]) -> Any:
            with self._span(phase):
                own, came = arrived
                values = [codec.decode(came[:, :nbytes], width, dtype)]
                if columns:
                    values.append(from_bytes(came[:, nbytes:], columns, torch.float32))
                return read(_Home(own=own, came=values))

        return Crossing(move, read_both)

    @property
    def _alone(self) -> bool:
        """Whether this rank is its whole node."""
        return self.tiers.nodes.size == 1

    def _beside(self, work: Callable[[], Any]) -> Begun:
        return self.tiers.lane.start(torch.no_grad()(work))

    def _count(self, traffic: Traffic, way: int, like: Tensor) -> None:
        """Bytes to counterparts, by their rank."""
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

    def _end(self, flight: Flight) -> Tensor:
        """Returns what came over the network. Counts the bytes that the dispatcher inside sent, here on the
        caller's thread."""
        inside, self.listening.bytes_M = self.listening.bytes_M, []
        for bytes_M in inside if self.observer.enabled else []:
            sent_W = torch.zeros(self.world_size, dtype=torch.int64, device="cpu")
            sent_W[list(self.tiers.bytes_inside.ranks)] = bytes_M
            self._count_sent(sent_W)
        return flight.finish()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Home:
    """Sums of the own tokens made on this node, and those that came from others; of gradients, also those of
    the weights."""

    own: tuple[Tensor, ...]
    came: list[Tensor]


class _UnderWay:
    """A move of two tiers, the second of which begins without anyone waiting."""

    def __init__(self, beside: Begun, finish: Callable[[], Any]) -> None:
        self.beside, self.finish = beside, finish


class _Inside:
    """Hears for the dispatcher inside, whose moves begin on another thread; remembers the bytes it sent."""

    enabled = True

    def __init__(self) -> None:
        self.bytes_M: list[Tensor] = []

    def span(self, name: str, **where: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def count(self, name: str, value: Any, **where: int) -> None:
        if name == "bytes_sent":
            self.bytes_M.append(value)


def rows_across(rows_TD: Tensor, codec: Codec, traffic: Traffic) -> Tensor:
    """Rows of tokens as they cross, by node that wants them."""
    return pick_rows(write([rows_TD], codec, rows_TD.dtype), traffic.sent_tokens_N)


def arriving(traffic: Traffic) -> int:
    """Tokens in the pool that are other ranks'."""
    return int(traffic.splits_2W[1].sum())


def why_not_tiers(geometry: Geometry, tiers: Tiers) -> str | None:
    """Why two tiers do not serve this exchange, or `None`."""
    if geometry.rows_per_slot is not None:
        return "slots are padded to a number of rows; use another transport, or no capacity"
    if tiers.nodes.size % geometry.tensor_parallel:
        return (
            f"{geometry.tensor_parallel} tensor ranks are not all on one of nodes of {tiers.nodes.size}; "
            "make ranks_per_node a multiple of tensor_parallel"
        )
    return None


def inside_of(geometry: Geometry, tiers: Tiers) -> Geometry:
    """The geometry of a node: its slots are experts of their own, each in one slot."""
    size = tiers.nodes.size // geometry.tensor_parallel
    offsets = geometry.placement.rank_offsets[tiers.node * size : (tiers.node + 1) * size + 1]
    local = tuple(offset - offsets[0] for offset in offsets)
    placement = Placement(slots=tuple(range(local[-1])), rank_offsets=local, num_experts=local[-1])
    return replace(geometry, placement=placement, rank=tiers.place, split=split_evenly)


__all__ = ["TieredDispatcher", "TieredPlan", "inside_of", "why_not_tiers"]
