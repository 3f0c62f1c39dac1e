"""Planning over two tiers: all that ranks tell each other before rows move between nodes.

    message of all ranks: [header, choices E, rows of parts x nodes]  ──▶ who sends how many to whom
    labels (slots, weights) to counterparts, then the rows of all parts ──▶ pools, planned inside the node

The first row waits for one message, and of many parts hardly longer than of one: they are gone through as one
batch. Replicas are chosen by what all ranks say, and take a second message. The first is as long as that of a
check whatever is planned, if that fits: so a rank whose input is wrong says it there, and need not know what
the others do. Who only counts choices, and the node's plan, come behind the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from imbrex.codec.cast import Identity, as_bytes, from_bytes, pick_rows
from imbrex.codec.columns import write
from imbrex.contracts import (
    Codec,
    Dispatcher,
    Geometry,
    Listener,
    Placement,
    Routing,
    Traffic,
    Transport,
    Wire,
)
from imbrex.exchange import plan
from imbrex.exchange.agreement import HEADER, find_problem
from imbrex.exchange.bytes import BytesDispatcher
from imbrex.exchange.nvlink import NvlinkDispatcher
from imbrex.placement import split_evenly
from imbrex.transport.tiers import ACROSS, Flight, Tiers

PARTS_TOLD = 16
"""Parts whose rows to every node fit into the message of a check. Ranks check before they plan more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TieredPlan:
    """The traffic between nodes, the inner dispatcher's plan of the pool, and the pool's weights.

    ahead: the rows between nodes, where these left with the plan; the first dispatch takes them.
    """

    traffic: Traffic
    inside: Any
    weights_PK: Tensor
    ahead: list[Flight]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Leaving:
    """The share of a batch in parts that crosses.

    slot_TK: of every choice. label_NB: of the tokens that leave, by node and token. sizes: tokens of every
    part. unread: the message of all ranks, where no choice of replicas has read it.
    """

    slot_TK: Tensor
    label_NB: Tensor
    sizes: list[int]
    traffics: list[Traffic]
    unread: Tensor | None


class TieredPlanning(BytesDispatcher):
    """A dispatcher of two tiers up to where rows between nodes have left."""

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
        self.dtypes = self.inside.dtypes
        local = inside.placement.num_slots
        first = geometry.placement.rank_offsets[transport.node * inside.placement.num_ranks]
        self.slots = range(first, first + local)

    def met(self, number: int, node_of_W: Sequence[int]) -> None:
        super().met(number, node_of_W)
        self.inside.met(number, [0] * self.tiers.nodes.size)

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
        labels, traffics = self._tell(leaving), leaving.traffics
        ahead = self._start(parts, traffics)
        if leaving.unread is not None:
            # Who only counts choices hears of them here, behind the rows.
            self._split(leaving.unread)
        slots, came = leaving.slot_TK.split(leaving.sizes), self._heard(labels, traffics)
        pools = [self._pool(*of_part) for of_part in zip(parts, slots, traffics, came, strict=True)]
        inside = self.inside.agree(pools)
        return [
            TieredPlan(traffic=traffic, inside=inner, weights_PK=routing.weights_TK, ahead=flights)
            for traffic, inner, (_, routing), flights in zip(traffics, inside, pools, ahead, strict=True)
        ]

    def _meet(self, parts: Sequence[tuple[Tensor, Routing]]) -> _Leaving:
        """Ranks tell each other what leaves: in one message, two where replicas are chosen by what all ranks
        say. All that can be made before an answer is waited for is."""
        placement, sizes = self.geometry.placement, [len(x_TD) for x_TD, _ in parts]
        header, unread = self._checked(parts), None
        ids = [routing.ids_TK for _, routing in parts]
        ids_TK = _joined(ids)
        if placement.has_replicas:
            slot_TK = _joined(self._choose(ids, header))
        else:
            slot_TK = plan.only_slots(ids_TK, placement)
        others_TN = self._wanted(slot_TK)
        rows_X = torch.cat([part_TN.sum(0) for part_TN in others_TN.split(sizes)])
        weights_TK = _joined([routing.weights_TK.detach() for _, routing in parts])
        label_TB = torch.cat([as_bytes(slot_TK.int()), as_bytes(weights_TK)], 1)
        if placement.has_replicas:
            self.observer.count("host_syncs", 1, layer=self.layer)
            rows_WX = self.transport.exchange_counts(rows_X)
        else:
            unread = self._tell_counts(header, [plan.count_choices(ids_TK, placement.num_experts), rows_X])
            rows_WX = unread[:, HEADER + placement.num_experts :][:, : len(rows_X)]
        traffics, tokens_N = self._traffics(others_TN, sizes, rows_WX)
        label_NB = pick_rows(label_TB, tokens_N)
        return _Leaving(slot_TK=slot_TK, label_NB=label_NB, sizes=sizes, traffics=traffics, unread=unread)

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

    def _traffics(
        self, others_TN: Tensor, sizes: Sequence[int], rows_WX: Tensor
    ) -> tuple[list[Traffic], Tensor]:
        """The traffic of every part, and the tokens of all that leave, by node and token. rows_WX: of every
        part that every rank sends to every node, on the host."""
        node, nodes = self.tiers.node, self.tiers.nodes
        rows_NPN = rows_WX[self.tiers.place :: nodes.size].unflatten(1, (len(sizes), nodes.num_nodes))
        send_PN = rows_NPN[node]
        # host sync: none, numbers of all ranks come on the host
        by_node = send_PN.T.flatten().tolist()
        tokens_N = torch.nonzero_static(others_TN.T, size=sum(by_node))[:, 1].clone()
        blocks, begin, traffics = tokens_N.split(by_node), 0, []
        for part, size in enumerate(sizes):
            splits_2W = torch.stack([send_PN[part], rows_NPN[:, part, node]])
            tokens = tokens_N if len(sizes) == 1 else torch.cat(blocks[part :: len(sizes)]) - begin
            traffics.append(Traffic(sent_tokens_N=tokens, splits_2W=splits_2W))
            begin += size
        return traffics, tokens_N

    def _wanted(self, slot_TK: Tensor) -> Tensor:
        """Which other nodes a token must reach, bool [T, nodes]."""
        geometry, nodes = self.geometry, self.tiers.nodes
        wanted_TW = plan.ranks_wanted(slot_TK, geometry.placement, geometry.tensor_parallel)
        others_TN = wanted_TW.unflatten(1, (nodes.num_nodes, nodes.size)).any(2)
        others_TN[:, self.tiers.node] = False
        return others_TN

    def _tell(self, leaving: _Leaving) -> Flight:
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

    def _heard(self, labels: Flight, traffics: Sequence[Traffic]) -> list[Tensor]:
        """Labels of the tokens that arrive, of every part, by node and token."""
        sizes = [traffic.splits_2W[1].tolist() for traffic in traffics]
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


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def rows_across(rows_TD: Tensor, codec: Codec, traffic: Traffic) -> Tensor:
    """Rows of tokens as they cross, by node that wants them."""
    return pick_rows(write([rows_TD], codec, rows_TD.dtype), traffic.sent_tokens_N)


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


__all__ = ["PARTS_TOLD", "TieredPlan", "TieredPlanning", "rows_across", "why_not_tiers"]
