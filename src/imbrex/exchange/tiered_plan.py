"""The pieces of a plan over two tiers: the rows that every node sends to every other, and each rank's pool.

    slot_TK ──nodes_wanted──▶ other nodes of each token ──traffics_of──▶ rows to counterparts
    labels that arrive ──labels_by_part, pool_of──▶ the batch that the dispatcher inside the node plans

A label is what a counterpart must know of a token before its row arrives: the slot of each of its K choices,
int32, and their weights, float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from imbrex.codec.cast import from_bytes, pick_rows
from imbrex.codec.columns import write
from imbrex.contracts import Codec, Geometry, Placement, Routing, Traffic
from imbrex.exchange import plan
from imbrex.placement import split_evenly
from imbrex.transport.tiers import Flight, Tiers


@dataclass(frozen=True, kw_only=True, slots=True)
class TieredPlan:
    """The plan of one part.

    traffic: the rows between nodes. inside: the inner dispatcher's plan of the pool. weights_PK: float32, the
        routing weights of the pool's tokens.
    flights: the rows on their way to other nodes, one flight, if they left with the plan. The dispatch takes
        it from the list.
    """

    traffic: Traffic
    inside: Any
    weights_PK: Tensor
    flights: list[Flight]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutgoingBatch:
    """The tokens of a batch that cross to other nodes.

    slot_TK: int64, the slot of every choice of the batch. label_NB: uint8, the labels of the tokens that
        cross, by destination node, then token. sizes: the number of tokens of each part. traffics: the
        traffic of each part.
    uncounted: the first message of all ranks, int64 [W, L] on the host, if its counts of choices have not
        been used to choose replicas.
    """

    slot_TK: Tensor
    label_NB: Tensor
    sizes: list[int]
    traffics: list[Traffic]
    uncounted: Tensor | None


def nodes_wanted(slot_TK: Tensor, geometry: Geometry, tiers: Tiers) -> Tensor:
    """The nodes other than this one that each token must reach, bool [T, number of nodes]."""
    wanted_TW = plan.ranks_wanted(slot_TK, geometry.placement, geometry.tensor_parallel)
    others_TN = wanted_TW.unflatten(1, (tiers.nodes.num_nodes, tiers.nodes.size)).any(2)
    others_TN[:, tiers.node] = False
    return others_TN


def traffics_of(
    tiers: Tiers, others_TN: Tensor, sizes: Sequence[int], rows_WX: Tensor
) -> tuple[list[Traffic], Tensor]:
    """The traffic of every part, and the tokens of all parts that cross, int64 [N] by node, then token.

    others_TN: bool, as `nodes_wanted` gives it. sizes: the number of tokens of each part. rows_WX: int64 on
    the host, [W, parts x nodes], the rows that every rank sends to every node.
    """
    node, nodes = tiers.node, tiers.nodes
    rows_NPN = rows_WX[tiers.place :: nodes.size].unflatten(1, (len(sizes), nodes.num_nodes))
    send_PN = rows_NPN[node]
    # host sync: none, the counts of all ranks are on the host
    by_node = send_PN.T.flatten().tolist()
    tokens_N = torch.nonzero_static(others_TN.T, size=sum(by_node))[:, 1].clone()
    blocks, begin, traffics = tokens_N.split(by_node), 0, []
    for part, size in enumerate(sizes):
        splits_2W = torch.stack([send_PN[part], rows_NPN[:, part, node]])
        tokens = tokens_N if len(sizes) == 1 else torch.cat(blocks[part :: len(sizes)]) - begin
        traffics.append(Traffic(sent_tokens_N=tokens, splits_2W=splits_2W))
        begin += size
    return traffics, tokens_N


def labels_by_part(label_MB: Tensor, traffics: Sequence[Traffic]) -> list[Tensor]:
    """Split the labels that arrived into parts. A message from a node holds the labels of all parts, part by
    part; the result has for each part uint8 [M, B], by source node, then token."""
    sizes = [traffic.splits_2W[1].tolist() for traffic in traffics]
    blocks = label_MB.split([n for by_part in zip(*sizes, strict=True) for n in by_part])
    return [torch.cat(blocks[part :: len(sizes)]) for part in range(len(sizes))]


def pool_of(
    part: tuple[Tensor, Routing], slot_TK: Tensor, label_MB: Tensor, slots: range
) -> tuple[Tensor, Routing]:
    """The pool's tokens and routing, for the plan of the dispatcher inside the node. The tokens are a tensor
    of the right shape without their values, which have not arrived and are not read.

    label_MB: uint8, the labels of the tokens that arrive. slots: the slots of this node.
    """
    (x_TD, routing), top_k = part, slot_TK.shape[1]
    slot_PK = torch.cat([slot_TK, from_bytes(label_MB[:, : 4 * top_k], top_k, torch.int32).long()])
    weights_MK = from_bytes(label_MB[:, 4 * top_k :], top_k, torch.float32)
    here = (slot_PK >= slots.start) & (slot_PK < slots.stop)
    ids_PK = torch.where(here, slot_PK - slots.start, -1)
    weights_PK = torch.cat([routing.weights_TK.detach(), weights_MK])
    x_PD = x_TD.detach().new_empty(1, x_TD.shape[1]).expand(len(slot_PK), -1)
    x_PD.requires_grad_(x_TD.requires_grad)
    return x_PD, Routing(ids_TK=ids_PK, weights_TK=weights_PK)


class SentBytes:
    """The observer of the dispatcher inside the node. It only keeps the bytes sent, because that dispatcher
    runs on another thread; the outer dispatcher counts them on the caller's.

    bytes_M: int64 [ranks of the node] for each move since the list was last emptied.
    """

    enabled = True

    def __init__(self) -> None:
        self.bytes_M: list[Tensor] = []

    def span(self, name: str, **where: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def count(self, name: str, value: Any, **where: int) -> None:
        if name == "bytes_sent":
            self.bytes_M.append(value)


def join_parts(parts: Sequence[Tensor]) -> Tensor:
    """The parts' tensors as one, along the tokens."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def rows_across(rows_TD: Tensor, codec: Codec, traffic: Traffic) -> Tensor:
    """The encoded rows of the tokens that cross, uint8 [N, B], by destination node, then token."""
    return pick_rows(write([rows_TD], codec, rows_TD.dtype), traffic.sent_tokens_N)


def why_not_tiers(geometry: Geometry, tiers: Tiers) -> str | None:
    """Why two tiers cannot serve this exchange, or `None`."""
    if geometry.rows_per_slot is not None:
        return "slots are padded to a number of rows; use another transport, or no capacity"
    if tiers.nodes.size % geometry.tensor_parallel:
        return (
            f"{geometry.tensor_parallel} tensor ranks are not all on one of nodes of {tiers.nodes.size}; "
            "make ranks_per_node a multiple of tensor_parallel"
        )
    return None


def inside_of(geometry: Geometry, tiers: Tiers) -> Geometry:
    """The geometry of the dispatcher inside this node. Each slot of the node counts as an expert of its own,
    because replicas have been chosen already."""
    size = tiers.nodes.size // geometry.tensor_parallel
    offsets = geometry.placement.rank_offsets[tiers.node * size : (tiers.node + 1) * size + 1]
    local = tuple(offset - offsets[0] for offset in offsets)
    placement = Placement(slots=tuple(range(local[-1])), rank_offsets=local, num_experts=local[-1])
    return replace(geometry, placement=placement, rank=tiers.place, split=split_evenly)
