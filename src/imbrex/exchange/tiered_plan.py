"""The pieces of planning over two tiers: who sends what to which node, and the pool that comes of it.

slots of choices ─nodes_wanted▶ other nodes of a token ─traffics_of▶ rows to counterparts
labels that arrive ─labels_by_part, pool_of▶ the batch that the node's own dispatcher plans
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
    """The traffic between nodes, the inner dispatcher's plan of the pool, and the pool's weights.

    ahead: the rows between nodes, where these left with the plan; the first dispatch takes them.
    """

    traffic: Traffic
    inside: Any
    weights_PK: Tensor
    ahead: list[Flight]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaving:
    """The share of a batch in parts that crosses.

    slot_TK: of every choice. label_NB: of the tokens that leave, by node and token. sizes: tokens of every
    part. unread: the message of all ranks, where no choice of replicas has read it.
    """

    slot_TK: Tensor
    label_NB: Tensor
    sizes: list[int]
    traffics: list[Traffic]
    unread: Tensor | None


def nodes_wanted(slot_TK: Tensor, geometry: Geometry, tiers: Tiers) -> Tensor:
    """Which other nodes a token must reach, bool [T, nodes]."""
    wanted_TW = plan.ranks_wanted(slot_TK, geometry.placement, geometry.tensor_parallel)
    others_TN = wanted_TW.unflatten(1, (tiers.nodes.num_nodes, tiers.nodes.size)).any(2)
    others_TN[:, tiers.node] = False
    return others_TN


def traffics_of(
    tiers: Tiers, others_TN: Tensor, sizes: Sequence[int], rows_WX: Tensor
) -> tuple[list[Traffic], Tensor]:
    """The traffic of every part of so many tokens, and the tokens of all that leave, by node and token.

    others_TN: bool; the other nodes that a token must reach. rows_WX: of every part that every rank sends to
    every node, on the host.
    """
    node, nodes = tiers.node, tiers.nodes
    rows_NPN = rows_WX[tiers.place :: nodes.size].unflatten(1, (len(sizes), nodes.num_nodes))
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


def labels_by_part(label_MB: Tensor, traffics: Sequence[Traffic]) -> list[Tensor]:
    """Labels of the tokens that arrive in every part, by node and token, of one message a node for all."""
    sizes = [traffic.splits_2W[1].tolist() for traffic in traffics]
    blocks = label_MB.split([n for by_part in zip(*sizes, strict=True) for n in by_part])
    return [torch.cat(blocks[part :: len(sizes)]) for part in range(len(sizes))]


def pool_of(
    part: tuple[Tensor, Routing], slot_TK: Tensor, label_MB: Tensor, slots: range
) -> tuple[Tensor, Routing]:
    """The pool as the dispatcher inside is asked about it: its tokens have not come, and are not read.

    label_MB: of the tokens that arrive. slots: of the node.
    """
    (x_TD, routing), top_k = part, slot_TK.shape[1]
    slot_PK = torch.cat([slot_TK, from_bytes(label_MB[:, : 4 * top_k], top_k, torch.int32).long()])
    theirs = from_bytes(label_MB[:, 4 * top_k :], top_k, torch.float32)
    here = (slot_PK >= slots.start) & (slot_PK < slots.stop)
    ids_PK = torch.where(here, slot_PK - slots.start, -1)
    weights_PK = torch.cat([routing.weights_TK.detach(), theirs])
    x_PD = x_TD.detach().new_empty(1, x_TD.shape[1]).expand(len(slot_PK), -1)
    x_PD.requires_grad_(x_TD.requires_grad)
    return x_PD, Routing(ids_TK=ids_PK, weights_TK=weights_PK)


class Overheard:
    """Hears for the dispatcher inside, whose moves begin on another thread; remembers the bytes it sent."""

    enabled = True

    def __init__(self) -> None:
        self.bytes_M: list[Tensor] = []

    def span(self, name: str, **where: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def count(self, name: str, value: Any, **where: int) -> None:
        if name == "bytes_sent":
            self.bytes_M.append(value)


def join_parts(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of several parts as of one batch."""
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
