"""Groups of devices by link costs: exact beside brute force, and how far the heuristic is off."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from imbrex.cost.network import Link, Network
from imbrex.placement.sharding import (
    Topology,
    Work,
    best_shards,
    good_shards,
    placement_in,
    shard,
    total_seconds,
)
from imbrex.reproduce.sharding import ROW_S, best_of_tiers, random_instance, random_tiers

WORK = Work(num_experts=8, tokens=1024, top_k=2, row_bytes=4096, expert_bytes=1 << 20, calls=24)


def groupings(devices: list[int]) -> Iterator[list[tuple[int, ...]]]:
    if not devices:
        yield []
        return
    first, *rest = devices
    for before in groupings(rest):
        yield [(first,), *before]
        for place, group in enumerate(before):
            yield [*before[:place], (first, *group), *before[place + 1 :]]


def test_seconds_by_hand() -> None:
    """Of two devices as one group, whose tokens cross, and as two, whose gradients do."""
    link = Link(start=1.0, per_byte=0.01)
    both = Topology.of(Network(nodes=2, size=1, inside=link, across=link), room=4, row_s=0.5)
    work = Work(num_experts=4, tokens=10, top_k=1, row_bytes=100, expert_bytes=1000, calls=2)
    assert total_seconds([(0, 1)], both, work) == pytest.approx(2 * (3 * 20 / 4 + 4 * (1 + 5)))
    assert total_seconds([(0,), (1,)], both, work) == pytest.approx(2 * 3 * 10 / 2 + 2 * (1 + 20))


@pytest.mark.parametrize("seed", range(12))
def test_the_best_of_all_groupings(seed: int) -> None:
    topology, work = random_instance(random.Random(seed), 3 + seed % 4)
    every = min(total_seconds(g, topology, work) for g in groupings(list(topology.devices)))
    best = best_shards(topology, work)
    assert best.seconds == pytest.approx(every, rel=1e-12)
    assert total_seconds(best.groups, topology, work) == pytest.approx(best.seconds, rel=1e-12)
    assert sorted(i for group in best.groups for i in group) == list(topology.devices)


def test_the_heuristic_is_near_the_best() -> None:
    gaps = []
    for seed in range(20):
        topology, work = random_instance(random.Random(seed), 6)
        gaps.append(good_shards(topology, work).seconds / best_shards(topology, work).seconds - 1)
    assert min(gaps) >= -1e-12
    assert sum(gaps) / len(gaps) < 0.02
    assert max(gaps) < 0.2


@pytest.mark.untraced
def test_the_heuristic_finds_the_best_of_sixteen_equal_devices() -> None:
    """On networks of two tiers, whose best grouping is that of all groupings where both can be had."""
    for seed in range(4):
        network, room, work = random_tiers(random.Random(seed), 2, 3)
        best = best_shards(Topology.of(network, room=room, row_s=ROW_S), work).seconds
        assert best_of_tiers(network, room, work) == pytest.approx(best, rel=1e-12)
        network, room, work = random_tiers(random.Random(seed), 2, 8)
        good = good_shards(Topology.of(network, room=room, row_s=ROW_S), work).seconds
        assert good == pytest.approx(best_of_tiers(network, room, work), rel=1e-12)


def test_slow_links_between_nodes_keep_groups_inside() -> None:
    fast, slow = Link(start=1e-5, per_byte=1e-9), Link(start=1e-4, per_byte=1e-6)
    roomy = Topology.of(Network(nodes=2, size=2, inside=fast, across=slow), room=8, row_s=1e-6)
    assert shard(roomy, WORK).groups in (((0, 1), (2, 3)), ((0,), (1,), (2,), (3,)))
    tight = Topology.of(Network(nodes=2, size=2, inside=fast, across=slow), room=4, row_s=1e-6)
    assert shard(tight, WORK).groups == ((0, 1), (2, 3))
    tighter = Topology.of(Network(nodes=2, size=2, inside=fast, across=slow), room=2, row_s=1e-6)
    assert shard(tighter, WORK).groups == ((0, 1, 2, 3),)
    with pytest.raises(ValueError, match="all devices together have room for 4 experts of 8"):
        shard(Topology.of(Network(nodes=2, size=2, inside=fast, across=slow), room=1, row_s=1e-6), WORK)


def test_a_placement_in_proportion_to_rates_and_room() -> None:
    topology = Topology(
        start_DD=((0.0,) * 3,) * 3, byte_DD=((0.0,) * 3,) * 3, room_D=(8, 8, 1), row_s_D=(1.0, 3.0, 0.5)
    )
    placement = placement_in((0, 1, 2), topology, WORK)
    assert placement.rank_offsets == (0, 6, 7, 8)
    assert placement.slots == tuple(range(8))
