"""The bytes and messages that a rank sends in each tier, and their seconds, for every transport.

Tokens are assumed to choose experts without regard to where they are. So a rank that holds a share s of the
experts is reached by a token with probability 1 - (1 - s)^K, exactly 1 - C(E - sE, K) / C(E, K), and so is a
node.
Example: 4 ranks, K = 8 of 256 experts: 0.90 of the tokens go to a given rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from imbrex.simulate.fabric import Fabric


@dataclass(frozen=True, kw_only=True, slots=True)
class Crowd:
    """A group of neighbouring ranks that exchange rows. tensor: the number of ranks that share every expert,
    each of which gets its rows. tokens: of a rank. row_bytes: on the wire."""

    ranks: int
    tensor: int
    experts: int
    top_k: int
    tokens: float
    row_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """The bytes that a rank sends to experts, by tier, and how the tiers take turns. serial: one after the
    other. pieces: the number of parts in which rows pass both tiers; of the faster tier one part is not
    hidden."""

    nbytes: tuple[float, ...]
    messages: tuple[float, ...]
    serial: bool = False
    pieces: int = 1


def share_reached(crowd: Crowd, ranks: int) -> float:
    """The share of tokens that have an expert on at least one of `ranks` neighbouring ranks."""
    experts = min(crowd.experts, max(1, round(crowd.experts * ranks / crowd.ranks)))
    if ranks < crowd.tensor:
        experts = max(1, round(crowd.experts * crowd.tensor / crowd.ranks))
    left = crowd.experts - experts
    nobody = 1.0
    for choice in range(crowd.top_k):
        nobody *= max(0, left - choice) / (crowd.experts - choice)
    return 1 - nobody


def choices(crowd: Crowd, fabric: Fabric) -> Flow:
    """A row for every choice: no token is sent once for several."""
    per_rank = crowd.tokens * crowd.row_bytes * crowd.top_k * crowd.tensor / crowd.ranks
    return _direct(fabric.peers(crowd.ranks), per_rank)


def alltoall(crowd: Crowd, fabric: Fabric) -> Flow:
    """A token once to every rank that it wants."""
    return _direct(fabric.peers(crowd.ranks), crowd.tokens * crowd.row_bytes * share_reached(crowd, 1))


def allgather(crowd: Crowd, fabric: Fabric) -> Flow:
    """Every token to every rank."""
    return _direct(fabric.peers(crowd.ranks), crowd.tokens * crowd.row_bytes)


def sequential(crowd: Crowd, fabric: Fabric) -> Flow:
    """One tier after the other."""
    flow = alltoall(crowd, fabric)
    return Flow(nbytes=flow.nbytes, messages=flow.messages, serial=True)


def two_level(crowd: Crowd, fabric: Fabric) -> Flow:
    """All rows inside the node first, then to the ranks of equal place: few large messages."""
    per_rank = crowd.tokens * crowd.row_bytes * share_reached(crowd, 1)
    near, *far = fabric.peers(crowd.ranks)
    size = near + 1
    nodes = crowd.ranks / size
    return Flow(
        nbytes=(near * nodes * per_rank, *(number * per_rank for number in far)),
        messages=(near, *(number / size for number in far)),
        serial=True,
    )


def hierarchical(crowd: Crowd, fabric: Fabric, pieces: int = 4) -> Flow:
    """A token once to every node that it wants, and on to its ranks, piece by piece."""
    near, *far = fabric.peers(crowd.ranks)
    size = near + 1
    nodes = crowd.ranks / size
    per_rank = crowd.tokens * crowd.row_bytes * share_reached(crowd, 1)
    per_node = crowd.tokens * crowd.row_bytes * share_reached(crowd, size)
    return Flow(
        nbytes=(near * nodes * per_rank, *(number / size * per_node for number in far)),
        messages=(near * (1 + pieces * (nodes - 1)), *(pieces * number / size for number in far)),
        pieces=pieces,
    )


def tiered(crowd: Crowd, fabric: Fabric) -> Flow:
    """A token once to every node that it wants, in one message, and then on to its ranks."""
    near, *far = fabric.peers(crowd.ranks)
    messages = (float(near), *(number / (near + 1) for number in far))
    return Flow(nbytes=hierarchical(crowd, fabric).nbytes, messages=messages, serial=True)


def part(flow: Flow, parts: int) -> Flow:
    """One of equal parts of a flow; each has as many messages as the whole."""
    return replace(flow, nbytes=tuple(nbytes / parts for nbytes in flow.nbytes))


def across(flow: Flow) -> Flow:
    """The share of a flow that leaves the node."""
    return replace(flow, nbytes=(0.0, *flow.nbytes[1:]), messages=(0.0, *flow.messages[1:]))


def inside(flow: Flow) -> Flow:
    """The share of a flow that stays in the node."""
    rest = (0.0,) * (len(flow.nbytes) - 1)
    return replace(flow, nbytes=(flow.nbytes[0], *rest), messages=(flow.messages[0], *rest))


FLOWS: Mapping[str, Callable[[Crowd, Fabric], Flow]] = {
    "copy-per-choice": choices,
    "alltoall": alltoall,
    "allgather": allgather,
    "pipe": alltoall,
    "sequential": sequential,
    "2dh": two_level,
    "hierarchical": hierarchical,
    "tiered": tiered,
    "nvlink": alltoall,
}
"""The bytes that a rank sends, by the name of the transport."""


def seconds(flow: Flow, fabric: Fabric, *, sharing: int = 1) -> float:
    """Seconds until a rank has sent. Bytes for a far tier cross the ports of all tiers between but the
    node's own. sharing: ranks of a node that send at the same time."""
    inside = fabric.tiers[0].seconds(flow.nbytes[0], flow.messages[0], sharing)
    across = 0.0
    for place in range(1, len(fabric.tiers)):
        nbytes, messages = sum(flow.nbytes[place:]), sum(flow.messages[place:])
        across = max(across, fabric.tiers[place].seconds(nbytes, messages, sharing))
    if flow.serial:
        return inside + across
    if flow.pieces > 1 and across:
        return max(inside, across) + min(inside, across) / flow.pieces
    return max(inside, across)


def _direct(peers: Sequence[int], per_rank: float) -> Flow:
    return Flow(nbytes=tuple(number * per_rank for number in peers), messages=tuple(map(float, peers)))


__all__ = ["FLOWS", "Crowd", "Flow", "across", "inside", "part", "seconds", "share_reached"]
