"""Aristos' Eq. 1 and 2: groups by link costs, exact, by a heuristic, and by two rules of thumb."""

from __future__ import annotations

import random
import time
from statistics import mean
from typing import Any

from imbrex.cost.network import Link, Network
from imbrex.placement.sharding import Topology, Work, best_shards, good_shards, total_seconds
from imbrex.reproduce import chart
from imbrex.reproduce.frame import Asked, Finding

SIZES = (4, 6, 8)
INSTANCES = {False: 20, True: 100}
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


def find(asked: Asked) -> Finding:
    rows = [_gaps(size, INSTANCES[asked.full]) for size in SIZES]
    topology = Topology.of(LARGE, room=16, row_s=1e-7)
    work = Work(num_experts=64, tokens=4096, top_k=4, row_bytes=8192, expert_bytes=1 << 24, calls=96)
    began = time.process_time()
    large = good_shards(topology, work)
    spent = time.process_time() - began
    whole = total_seconds([tuple(topology.devices)], topology, work)
    return Finding(
        title="Aristos, Eq. 1 and 2: topology-aware sharding",
        question="Which groups of devices should hold all experts, and how near is a heuristic to the best?",
        head=("devices", "instances", "heuristic above best", "worst", "one group over best", "by node"),
        table=tuple(
            (
                f"{row['case']['devices']}",
                f"{row['n']}",
                f"{row['mean_gap']:.2%}",
                f"{row['worst_gap']:.2%}",
                f"{row['one_group']:.2f}x",
                row["node_groups"],
            )
            for row in rows
        ),
        differs=(
            "The paper gives no cost functions and no figures. Ours: rows over the sum of rates, three "
            "passes of a product; four moves, a token once to a peer; a ring over groups, slowest link.",
            "Links of these instances are drawn; `Topology.of` takes measured ones of two tiers.",
        ),
        verdict=(
            f"2 nodes of 8, the heuristic alone: {len(large.groups)} groups, "
            f"{whole / large.seconds:.2f} times faster than one group, found in {spent:.1f} s.",
            "All groupings are gone through up to 10 devices; tests compare with brute force up to 6.",
        ),
        rows=rows,
        chart=chart.bars(
            {f"{row['case']['devices']} devices": {"gap": 100 * row["mean_gap"]} for row in rows},
            "heuristic over best, %",
        ),
    )


def _gaps(size: int, instances: int) -> dict[str, Any]:
    gaps, one_group, by_node = [], [], []
    for seed in range(instances):
        topology, work = random_instance(random.Random(seed), size)
        best = best_shards(topology, work).seconds
        gaps.append(good_shards(topology, work).seconds / best - 1)
        one_group.append(total_seconds([tuple(topology.devices)], topology, work) / best)
        nodes = [tuple(range(i, min(i + 2, size))) for i in range(0, size, 2)]
        by_node.append(total_seconds(nodes, topology, work) / best)
    fitting = [ratio for ratio in by_node if ratio < float("inf")]
    return {
        "op": "sharding",
        "impl": "heuristic",
        "case": {"devices": size},
        "mean_gap": mean(gaps),
        "worst_gap": max(gaps),
        "one_group": mean(one_group),
        "node_groups": f"{mean(fitting):.2f}x, fit in {len(fitting)}" if fitting else "never fit",
        "n": instances,
    }
