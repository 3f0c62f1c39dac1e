"""The dispatcher over two tiers: rows cross the network once to a node that wants them, and spread inside.

    x_TD ──across──▶ pool_PD ──the node's own dispatcher──▶ rows_RD
    y_TD ◀──sum in node order◀──across── pool_PD ◀──the node's own dispatcher── rows_RD

The pool of a rank is its own T tokens, then those that arrived from its counterparts, the ranks of equal
place on other nodes, by node, then token. To the dispatcher inside, bytes or kernels over NVLink, the pool is
a batch like any other: the slots of the node are its experts, and choices of other nodes are dropped. So its
planning, its spreading and its sums are used as they are, forward and backward.

Which replica takes a choice, and which choices go where, is settled before rows move:

    message of all ranks: [header, choices E, rows of parts x nodes]  ──▶ who sends how many to whom
    labels (slots, weights) to counterparts, then the rows of all parts ──▶ pools, planned inside the node

The first row waits for one message, and of many parts hardly longer than of one: they are gone through as one
batch. Replicas are chosen by what all ranks say, and take a second message. The first is as long as that of a
check whatever is planned, if that fits: so a rank whose input is wrong says it there, and need not know what
the others do. Who only counts choices, and the node's plan, come behind the rows. See docs/tiers.md.
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
    Leaving,
    Overheard,
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
from imbrex.runtime.streams import Begun
from imbrex.transport.tiers import ACROSS, Flight, Tiers

OURS = 2
"""Tensors of the state before those of the dispatcher inside: the traffic between nodes."""
PARTS_TOLD = 16
"""Parts whose rows to every node fit into the message of a check. Ranks check before they plan more."""


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
        self.tiers, self.listening = transport, Overheard()
        inside = inside_of(geometry, transport)
        arguments = Wire(**dict.fromkeys(Wire.__dataclass_fields__, Identity())), self.listening, layer
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

    def _checks_itself(self, num_parts: int) -> bool:
        return num_parts > 0 and self._length(num_parts) <= self._room

    @property
    def _room(self) -> int:
        """Choices of every expert, and rows of the parts to every node: whatever the placement, so that ranks
        which disagree about it still understand each other."""
        return self.geometry.placement.num_experts + self.tiers.nodes.num_nodes * PARTS_TOLD

    def _length(self, num_parts: int) -> int:
        """Numbers behind the header that planning so many parts takes, of the first message."""
        num_experts = self.geometry.placement.num_experts
        if self.geometry.placement.has_replicas:
            return num_experts * num_parts
        return num_experts + self.tiers.nodes.num_nodes * num_parts

    def _make_plans(self, parts: Sequence[tuple[Tensor, Routing]]) -> list[Any]:
        leaving = self._meet(parts)
        flight, traffics = self._tell(leaving), leaving.traffics
        ahead = self._start(parts, traffics)
        if leaving.unread is not None:
            # Who only counts choices hears of them here, behind the rows.
            self._split(leaving.unread)
        slots = leaving.slot_TK.split(leaving.sizes)
        labels = labels_by_part(flight.finish(), traffics)
        pools = [pool_of(*of_part, self.slots) for of_part in zip(parts, slots, labels, strict=True)]
        inside = self.inside.agree(pools)
        return [
            TieredPlan(traffic=traffic, inside=inner, weights_PK=routing.weights_TK, ahead=flights)
            for traffic, inner, (_, routing), flights in zip(traffics, inside, pools, ahead, strict=True)
        ]

    def _meet(self, parts: Sequence[tuple[Tensor, Routing]]) -> Leaving:
        """Ranks tell each other what leaves: in one message, two where replicas are chosen by what all ranks
        say. All that can be made before an answer is waited for is."""
        header, unread = self._checked(parts), None
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
            unread = self._tell_counts(header, [plan.count_choices(ids_TK, placement.num_experts), rows_X])
            rows_WX = unread[:, HEADER + placement.num_experts :][:, : len(rows_X)]
        traffics, tokens_N = traffics_of(self.tiers, others_TN, sizes, rows_WX)
        label_NB = pick_rows(label_TB, tokens_N)
        return Leaving(slot_TK=slot_TK, label_NB=label_NB, sizes=sizes, traffics=traffics, unread=unread)

    def _checked(self, parts: Sequence[tuple[Tensor, Routing]]) -> Tensor:
        """The header of this rank's message. ValueError on every rank where this one's input is wrong."""
        problems = [find_problem(*part, self.geometry, self.place) for part in parts]
        problem = next((problem for problem in problems if problem[0]), problems[0])
        header = self._header(problem, parts[0][0], parts[0][1].ids_TK, len(parts))
        if problem[0]:
            self._tell_counts(header, [header.new_zeros(self._length(len(parts)))])
        return header

    def _tell_counts(self, header: Tensor, counts: Sequence[Tensor]) -> Tensor:
        """One message of all ranks, as long as that of a check if it is not longer."""
        so_far = sum(len(of) for of in counts)
        rest = header.new_zeros(max(self._room - so_far, 0))
        return self._gather([torch.cat([header, *counts, rest])])[0]

    def _choose(self, ids: Sequence[Tensor], header: Tensor) -> list[Tensor]:
        """The slots of every part's choices, from the counts of all ranks."""
        placement, rank = self.geometry.placement, self.geometry.rank
        counts = [plan.count_choices(ids_TK, placement.num_experts) for ids_TK in ids]
        gathered = self._tell_counts(header, counts)
        blocks = gathered[:, HEADER:].split(placement.num_experts, 1)
        splits = [self._split(torch.cat([gathered[:, :HEADER], block], 1)) for block in blocks[: len(ids)]]
        return [
            plan.choose_slots(ids_TK, split_WS[rank], placement)
            for ids_TK, split_WS in zip(ids, splits, strict=True)
        ]

    def _tell(self, leaving: Leaving) -> Flight:
        """Labels of the tokens that leave: one message to a node for all parts."""
        # host sync: none, sizes are on the host
        send, receive = torch.stack([traffic.splits_2W for traffic in leaving.traffics]).sum(0).tolist()
        return self.tiers.rail.begin(ACROSS, "plan", leaving.label_NB, receive).send(leaving.label_NB, send)

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

    def _leave(self, leaving: Tensor | None, traffic: Traffic) -> Flight:
        """Rows, by node, on their way to the nodes that want them."""
        assert leaving is not None
        send, receive = traffic.splits_2W.tolist()
        self._count(traffic, 0, leaving)
        return self.tiers.rail.begin(ACROSS, "dispatch", leaving, receive).send(leaving, send)

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

        def read(sums: list[Tensor]) -> Tensor:
            added_TD = None if addend is None else addend()
            y_TD = (sums[0] if added_TD is None else sums[0] + added_TD.float()).to(rows_RD.dtype)
            return y_TD if out_TD is None else out_TD.copy_(y_TD)

        form = _Sums(codec=self.wire.combine, width=self.geometry.hidden_size, dtype=rows_RD.dtype)
        return self._coming("combine", summing, form, traffic, num_tokens, read)

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

        def read(sums: list[Tensor]) -> tuple[Tensor, Tensor]:
            d_x_TD, d_weights_TK = sums[0].to(d_rows_RD.dtype), sums[1]
            if out is None:
                return d_x_TD, d_weights_TK
            return out[0].copy_(d_x_TD), out[1].copy_(d_weights_TK)

        geometry, dtype = self.geometry, d_rows_RD.dtype
        codec = self.wire.dispatch_backward
        form = _Sums(codec=codec, width=geometry.hidden_size, dtype=dtype, columns=geometry.top_k)
        return self._coming("dispatch_backward", summing, form, traffic, num_tokens, read)

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
        form: _Sums,
        traffic: Traffic,
        num_tokens: int,
        read: Callable[[list[Tensor]], Any],
    ) -> Crossing[Any]:
        """Sums made inside the node: those of other nodes' tokens go back to these, and those of the own
        tokens are added up over the nodes, float32, for `read`."""

        def move() -> Pending:
            # Places for what comes are told before anyone waits for sums.
            send, receive = traffic.splits_2W.tolist()
            like = traffic.sent_tokens_N.new_empty(0, form.nbytes, dtype=torch.uint8)
            flight = self.tiers.rail.begin(ACROSS, "combine", like, send)
            self._count(traffic, 1, like)

            def go_on() -> list[Tensor]:
                sums = _complete(summing)
                flight.send(form.write([of_pool[num_tokens:] for of_pool in sums]), receive)
                return [of_pool[:num_tokens] for of_pool in sums]

            beside = self._summing(go_on)

            def finish() -> tuple[list[Tensor], Tensor]:
                with self._span(phase):
                    return beside.finish(), self._end(flight)

            return _UnderWay(beside, finish)

        def add_up(arrived: tuple[list[Tensor], Tensor]) -> Any:
            with self._span(phase):
                both = zip(arrived[0], form.read(arrived[1]), strict=True)
                return read([self._add(own, came, traffic) for own, came in both])

        return Crossing(move, add_up)

    def _summing(self, work: Callable[[], list[Tensor]]) -> Begun:
        """Sums inside the node, beside the caller where ranks in it wait for each other.

        Alone on a node a rank waits for nobody in it; in a lane the sum's kernels would wait for the
        multiprocessors behind products that the caller queues next, and the network with them.
        """
        return Begun(result=torch.no_grad()(work)()) if self.tiers.nodes.size == 1 else self._beside(work)

    def _beside(self, work: Callable[[], Any]) -> Begun:
        return self.tiers.lane.start(torch.no_grad()(work))

    def _end(self, flight: Flight) -> Tensor:
        """Returns what came over the network. Counts the bytes that the dispatcher inside sent, here on the
        caller's thread."""
        inside, self.listening.bytes_M = self.listening.bytes_M, []
        for bytes_M in inside if self.observer.enabled else []:
            sent_W = torch.zeros(self.world_size, dtype=torch.int64, device="cpu")
            sent_W[list(self.tiers.bytes_inside.ranks)] = bytes_M
            self._count_sent(sent_W)
        return flight.finish()

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sums:
    """How sums of a token cross back: `width` values as the codec writes them, and behind them `columns` of
    float32, if any, as they are."""

    codec: Codec
    width: int
    dtype: torch.dtype
    columns: int = 0

    @property
    def nbytes(self) -> int:
        return self.codec.nbytes(self.width, self.dtype) + 4 * self.columns

    def write(self, values: list[Tensor]) -> Tensor:
        return write(values, self.codec, self.dtype)

    def read(self, came_NB: Tensor) -> list[Tensor]:
        coded = came_NB.shape[1] - 4 * self.columns
        values = [self.codec.decode(came_NB[:, :coded], self.width, self.dtype)]
        if self.columns:
            values.append(from_bytes(came_NB[:, coded:], self.columns, torch.float32))
        return values


def _complete(summing: Crossing[Any]) -> list[Tensor]:
    """Sums over the ranks of the node, of its pool."""
    pending = summing.move()
    sums = summing.read(None if pending is None else pending.finish())
    return [*sums] if isinstance(sums, tuple) else [sums]


class _UnderWay:
    """A move of two tiers, the second of which begins without anyone waiting."""

    def __init__(self, beside: Begun, finish: Callable[[], Any]) -> None:
        self.beside, self.finish = beside, finish


def arriving(traffic: Traffic) -> int:
    """Tokens in the pool that are other ranks'."""
    return int(traffic.splits_2W[1].sum())
