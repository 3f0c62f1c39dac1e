"""The choice of groups of devices, each of which holds all experts: Aristos, Eq. 1 and 2.

    min over groupings of   max over groups g of  calls * (compute(g) + max over i in g of C_i)  +  reduce(n)
    subject to              the devices of every group have room for all experts

C_i is the time in which device i sends its rows. A larger group has room for more experts, but its rows cross
slower links. More groups have more copies of the experts, whose gradients must be summed. Example: 2 nodes of
2 devices with fast links inside. If each node has room for all experts, the groups {0, 1} and {2, 3} keep all
rows inside a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from imbrex.contracts import Placement
from imbrex.cost.network import Network
from imbrex.placement.layouts import from_slots

MOST_EXACT = 10
"""The most devices for which all groupings are compared; 10 take 0.5 s on one core."""

Group = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The devices and the links between them.

    start_DD, byte_DD: seconds of a message, and of every byte of it, from device to device. room_D: the
    experts that fit on a device. row_s_D: seconds of one row through an expert.
    """

    start_DD: tuple[tuple[float, ...], ...]
    byte_DD: tuple[tuple[float, ...], ...]
    room_D: tuple[int, ...]
    row_s_D: tuple[float, ...]

    @property
    def devices(self) -> range:
        return range(len(self.room_D))

    @staticmethod
    def of(network: Network, *, room: int, row_s: float) -> Topology:
        """The topology of equal devices on a measured network of two tiers."""
        size = network.nodes * network.size
        node_D = [device // network.size for device in range(size)]
        links = [[network.inside if a == b else network.across for b in node_D] for a in node_D]
        return Topology(
            start_DD=tuple(tuple(link.start + link.latency for link in row) for row in links),
            byte_DD=tuple(tuple(link.per_byte for link in row) for row in links),
            room_D=(room,) * size,
            row_s_D=(row_s,) * size,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The work of the layers whose experts are placed.

    tokens: of a device in a call. expert_bytes: the gradients of an expert. calls: of a layer between two
    sums of gradients over groups, all layers together (kappa of Eq. 1).
    """

    num_experts: int
    tokens: int
    top_k: int
    row_bytes: int
    expert_bytes: int
    calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """A grouping, and its seconds by Eq. 1. The groups are in the order of their first devices."""

    groups: tuple[Group, ...]
    seconds: float


def group_seconds(group: Group, topology: Topology, work: Work) -> float:
    """The part of Eq. 1 that belongs to one group; infinite if the experts do not fit.

    A device computes in proportion to its rate. It sends a token once to a peer that has one of its experts,
    four times in all: dispatch and combine, forward and backward.
    """
    if _lack(group, topology, work):
        return float("inf")
    return _seconds(group, topology, work)


def _lack(group: Group, topology: Topology, work: Work) -> int:
    """The number of experts that a group has no room for."""
    return max(0, work.num_experts - sum(topology.room_D[i] for i in group))


def _seconds(group: Group, topology: Topology, work: Work) -> float:
    rows = len(group) * work.tokens * work.top_k
    compute = 3 * rows / sum(1 / topology.row_s_D[i] for i in group)
    wanted_share = 1 - (1 - 1 / len(group)) ** work.top_k
    nbytes = work.tokens * work.row_bytes * wanted_share
    moves = max(
        sum(topology.start_DD[i][j] + topology.byte_DD[i][j] * nbytes for j in group if j != i) for i in group
    )
    return work.calls * (compute + 4 * moves)


def reduce_seconds(groups: int, topology: Topology, work: Work) -> float:
    """The time in which a ring over the groups sums the gradients of all experts, at the rate of the slowest
    link."""
    if groups == 1:
        return 0.0
    start, byte = (max(max(row) for row in links) for links in (topology.start_DD, topology.byte_DD))
    return 2 * (groups - 1) * (start + byte * work.num_experts * work.expert_bytes / groups)


def total_seconds(groups: Sequence[Group], topology: Topology, work: Work) -> float:
    """Eq. 1 for a grouping."""
    slowest = max(group_seconds(group, topology, work) for group in groups)
    return slowest + reduce_seconds(len(groups), topology, work)


def best_shards(topology: Topology, work: Work) -> Shards:
    """The best grouping. For each number of groups it is found by dynamic programming over subsets, in 3^D
    steps. Raises ValueError if no grouping holds the experts."""
    _check(topology, work)
    size = len(topology.devices)
    every = 1 << size
    members = [tuple(i for i in topology.devices if mask >> i & 1) for mask in range(every)]
    alone = [float("inf"), *(group_seconds(members[mask], topology, work) for mask in range(1, every))]
    slowest, chosen = [alone], [list(range(every))]
    totals = [alone[-1] + reduce_seconds(1, topology, work)]
    for number in range(2, size + 1):
        before, now, first = slowest[-1], [float("inf")] * every, [0] * every
        for mask in range(1, every):
            lowest, rest = mask & -mask, mask & (mask - 1)
            part = rest
            while part:
                part = (part - 1) & rest
                group = part | lowest
                value = max(alone[group], before[mask ^ group])
                if value < now[mask]:
                    now[mask], first[mask] = value, group
        slowest.append(now)
        chosen.append(first)
        totals.append(now[-1] + reduce_seconds(number, topology, work))
    best = min(range(size), key=totals.__getitem__)
    mask, groups = every - 1, []
    for level in range(best, -1, -1):
        groups.append(members[chosen[level][mask]])
        mask ^= chosen[level][mask]
    return Shards(groups=tuple(sorted(groups)), seconds=totals[best])


def good_shards(topology: Topology, work: Work) -> Shards:
    """A good grouping: the nearest devices are merged step by step, and from every number of groups on the
    way one or two groups are changed until no change helps."""
    _check(topology, work)
    nearness = sorted(
        (topology.start_DD[i][j] + topology.byte_DD[i][j] * work.row_bytes * work.tokens, i, j)
        for i, j in combinations(topology.devices, 2)
    )
    groups: list[Group] = [(i,) for i in topology.devices]
    stages = [list(groups)]
    for _, i, j in nearness:
        one_group, other = (next(g for g in groups if device in g) for device in (i, j))
        if one_group != other:
            groups = [g for g in groups if g not in (one_group, other)]
            groups.append(tuple(sorted(one_group + other)))
            stages.append(list(groups))
    improved = [_improve(start, topology, work) for start in stages]
    return min(improved, key=lambda shards: shards.seconds)


def _improve(groups: Sequence[Group], topology: Topology, work: Work) -> Shards:
    """Take the best neighbour until none is better: by the experts without room, then by Eq. 1, then by the
    sum over groups, since of two with the same maximum the one with less is nearer to the next gain."""
    seen: dict[Group, tuple[int, float]] = {}

    def score(grouping: Sequence[Group]) -> tuple[int, float, float]:
        for group in grouping:
            if group not in seen:
                seen[group] = _lack(group, topology, work), _seconds(group, topology, work)
        lacks, times = zip(*(seen[group] for group in grouping), strict=True)
        return sum(lacks), max(times) + reduce_seconds(len(grouping), topology, work), sum(times)

    at, groups = score(groups), list(groups)
    while True:
        better = min(((score(g), g) for g in _neighbours(groups)), default=(at, groups))
        if better[0] >= at:
            return Shards(groups=tuple(sorted(groups)), seconds=total_seconds(groups, topology, work))
        at, groups = better


def _neighbours(groups: list[Group]) -> Iterator[list[Group]]:
    """The neighbours of a grouping: two groups become one, a device goes to another group or is alone, or two
    devices change places."""
    for a, b in combinations(range(len(groups)), 2):
        others = [g for place, g in enumerate(groups) if place not in (a, b)]
        yield [*others, tuple(sorted(groups[a] + groups[b]))]
        for i in groups[a]:
            for j in groups[b]:
                swapped = (tuple(sorted({*groups[a], j} - {i})), tuple(sorted({*groups[b], i} - {j})))
                yield [*others, *swapped]
        for source, target in ((a, b), (b, a)):
            for i in groups[source] if len(groups[source]) > 1 else ():
                left = tuple(d for d in groups[source] if d != i)
                yield [*others, left, tuple(sorted((*groups[target], i)))]
    for a, group in enumerate(groups):
        others = [g for place, g in enumerate(groups) if place != a]
        for i in group if len(group) > 1 else ():
            yield [*others, tuple(d for d in group if d != i), (i,)]


def shard(topology: Topology, work: Work) -> Shards:
    """The best grouping of up to 10 devices, a good one of more."""
    few = len(topology.devices) <= MOST_EXACT
    return best_shards(topology, work) if few else good_shards(topology, work)


def placement_in(group: Group, topology: Topology, work: Work) -> Placement:
    """The placement of experts on a group's devices, in proportion to their rates as far as there is room.
    Rank r of the placement is device `group[r]`."""
    counts = [0] * len(group)
    for _ in range(work.num_experts):
        free = [place for place, i in enumerate(group) if counts[place] < topology.room_D[i]]
        if not free:
            raise ValueError(
                f"placement: the devices {group} have no room for {work.num_experts} experts; "
                "give more devices or room"
            )
        counts[min(free, key=lambda place: (counts[place] + 1) * topology.row_s_D[group[place]])] += 1
    ends = [sum(counts[: place + 1]) for place in range(len(group))]
    return from_slots([range(end - n, end) for end, n in zip(ends, counts, strict=True)], work.num_experts)


def _check(topology: Topology, work: Work) -> None:
    room = sum(topology.room_D)
    if room < work.num_experts:
        raise ValueError(
            f"placement: all devices together have room for {room} experts of {work.num_experts}; "
            "take more devices, or experts that need less"
        )


__all__ = ["Shards", "Topology", "Work", "best_shards", "good_shards", "placement_in", "shard"]
