"""Aristos' Eq. 1 and 2: groups by link costs, exact, by a heuristic, and by two rules of thumb."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from operator import add
from statistics import mean
from typing import Any

from imbrex.cost.network import Link, Network
from imbrex.placement.sharding import (
    Topology,
    Work,
    best_shards,
    good_shards,
    reduce_seconds,
    total_seconds,
)
from imbrex.reproduce import chart
from imbrex.reproduce.frame import Finding, Options

SIZES = {False: (4, 6, 8, 10), True: (4, 6, 8, 10, 12)}
"""Devices whose links are all drawn."""
TIERS: dict[bool, tuple[tuple[int, int], ...]] = {False: ((2, 8),), True: ((2, 8), (3, 4), (2, 16))}
"""Nodes and devices on each."""
ROW_S = 1e-7
INSTANCES = {False: 20, True: 100}
FEWER = {False: 10, True: 20}
"""Instances of more than 8 devices."""
LARGE = Network(
    nodes=2, size=8, inside=Link(start=1e-5, per_byte=4e-12), across=Link(start=3e-5, per_byte=1.6e-10)
)


def random_instance(drawn: random.Random, devices: int) -> tuple[Topology, Work]:
    """Devices on nodes of two, links of random speeds, slower between nodes; room for all experts in all of
    them together."""
    number = range(devices)

    def link(i: int, j: int, least: float, factor: float) -> float:
        return 0.0 if i == j else least * (factor if i // 2 != j // 2 else 1.0) * (0.5 + drawn.random())

    factor = drawn.choice([1.0, 4.0, 20.0])
    start = [[link(i, j, 1e-5, factor) for j in number] for i in number]
    byte = [[link(i, j, 1e-10, factor) for j in number] for i in number]
    experts = drawn.choice([4, 8, 16])
    least_room = -(-experts // devices)
    topology = Topology(
        start_DD=tuple(tuple(max(start[i][j], start[j][i]) for j in number) for i in number),
        byte_DD=tuple(tuple(max(byte[i][j], byte[j][i]) for j in number) for i in number),
        room_D=tuple(drawn.randint(least_room, experts) for _ in number),
        row_s_D=tuple(1e-7 * drawn.choice([1, 1, 2]) for _ in number),
    )
    work = Work(
        num_experts=experts,
        tokens=2048,
        top_k=2,
        row_bytes=4096,
        expert_bytes=drawn.choice([1 << 20, 1 << 24]),
        calls=drawn.choice([8, 64]),
    )
    return topology, work


def best_of_tiers(network: Network, room: int, work: Work) -> float:
    """The seconds of the best grouping of equal devices on a network of two tiers: a group is how many it has
    of every node, so that many more devices than 10 can be gone through."""
    topology = Topology.of(network, room=room, row_s=ROW_S)
    every = list(product(range(network.size + 1), repeat=network.nodes))
    alone = {
        counts: total_seconds([_devices(counts, network.size)], topology, work)
        for counts in every
        if sum(counts)
    }
    whole, none = every[-1], every[0]
    slowest, best = {none: 0.0}, float("inf")
    for groups in range(1, sum(whole) + 1):
        following: dict[tuple[int, ...], float] = {}
        for before, so_far in slowest.items():
            for counts, seconds in alone.items():
                after = tuple(map(add, before, counts))
                if after in alone and max(so_far, seconds) < following.get(after, float("inf")):
                    following[after] = max(so_far, seconds)
        slowest = following
        best = min(best, slowest.get(whole, float("inf")) + reduce_seconds(groups, topology, work))
    return best


def _devices(counts: Sequence[int], size: int) -> tuple[int, ...]:
    return tuple(node * size + i for node, count in enumerate(counts) for i in range(count))


def random_tiers(drawn: random.Random, nodes: int, size: int) -> tuple[Network, int, Work]:
    """A network of two tiers, the room for experts of every device, and work."""
    inside = Link(start=1e-5, per_byte=4e-12 * 10 ** (2 * drawn.random()))
    across = Link(start=3e-5, per_byte=inside.per_byte * 10 ** (2 * drawn.random()))
    experts = drawn.choice([16, 64, 256])
    room = drawn.randint(-(-experts // (nodes * size)), experts)
    work = Work(
        num_experts=experts,
        tokens=4096,
        top_k=drawn.choice([2, 4, 8]),
        row_bytes=8192,
        expert_bytes=drawn.choice([1 << 20, 1 << 24]),
        calls=drawn.choice([8, 96]),
    )
    return Network(nodes=nodes, size=size, inside=inside, across=across), room, work


def find(options: Options) -> Finding:
    full = options.full
    rows = [_drawn(size, (INSTANCES if size <= 8 else FEWER)[full]) for size in SIZES[full]]
    rows += [_tiers(nodes, size, FEWER[full]) for nodes, size in TIERS[full]]
    topology = Topology.of(LARGE, room=16, row_s=ROW_S)
    work = Work(num_experts=64, tokens=4096, top_k=4, row_bytes=8192, expert_bytes=1 << 24, calls=96)
    began = time.process_time()
    large = good_shards(topology, work)
    spent = time.process_time() - began
    whole = total_seconds([tuple(topology.devices)], topology, work)
    return Finding(
        title="Aristos, Eq. 1 and 2: topology-aware sharding",
        question="Which groups of devices should hold all experts, and how near is a heuristic to the best?",
        head=("devices", "instances", "heuristic above best", "worst", "one group over best", "by node"),
        table=tuple(map(_line, rows)),
        differs=(
            "The paper gives no cost functions and no figures. Ours: rows over the sum of rates, three "
            "passes of a product; four moves, a token once to a peer; a ring over groups, slowest link.",
            "Links of these instances are drawn, in the last rows those of two tiers, as `Topology.of` takes "
            "measured ones: a group is how many devices of every node it has, and all are gone through.",
        ),
        verdict=(
            f"2 nodes of 8, the heuristic alone: {len(large.groups)} groups, "
            f"{whole / large.seconds:.2f} times faster than one group, found in {spent:.1f} s.",
            "All groupings are gone through up to 10 devices; tests compare with brute force up to 6.",
        ),
        rows=rows,
        chart=chart.bars(
            {f"{_name(row['case'])} devices": {"gap": 100 * row["mean_gap"]} for row in rows},
            "heuristic over best, %",
        ),
    )


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    gaps = f"{row['mean_gap']:.2%}", f"{row['worst_gap']:.2%}"
    return _name(row["case"]), f"{row['n']}", *gaps, f"{row['one_group']:.2f}x", row["node_groups"]


def _name(case: Mapping[str, int]) -> str:
    nodes = case.get("nodes")
    return f"{case['devices']}" + (f" on {nodes} nodes" if nodes else "")


def _drawn(size: int, instances: int) -> dict[str, Any]:
    """Gaps where every link is drawn, beside all groupings."""
    cases = (random_instance(random.Random(seed), size) for seed in range(instances))
    return _gaps({"devices": size}, 2, ((*case, best_shards(*case).seconds) for case in cases))


def _tiers(nodes: int, size: int, instances: int) -> dict[str, Any]:
    """Gaps of equal devices on two tiers, beside all groupings of these."""
    drawn = (random_tiers(random.Random(seed), nodes, size) for seed in range(instances))
    cases = (
        (Topology.of(network, room=room, row_s=ROW_S), work, best_of_tiers(network, room, work))
        for network, room, work in drawn
    )
    return _gaps({"devices": nodes * size, "nodes": nodes}, size, cases)


def _gaps(case: dict[str, int], node: int, cases: Iterable[tuple[Topology, Work, float]]) -> dict[str, Any]:
    gaps, one_group, by_node = [], [], []
    for topology, work, best in cases:
        size = len(topology.devices)
        gaps.append(good_shards(topology, work).seconds / best - 1)
        one_group.append(total_seconds([tuple(topology.devices)], topology, work) / best)
        nodes = [tuple(range(i, min(i + node, size))) for i in range(0, size, node)]
        by_node.append(total_seconds(nodes, topology, work) / best)
    fitting = [ratio for ratio in by_node if ratio < float("inf")]
    return {
        "op": "sharding",
        "impl": "heuristic",
        "case": case,
        "mean_gap": mean(gaps),
        "worst_gap": max(gaps),
        "one_group": mean(one_group),
        "node_groups": f"{mean(fitting):.2f}x, fit in {len(fitting)}" if fitting else "never fit",
        "n": len(gaps),
    }
