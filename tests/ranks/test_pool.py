"""Ranks that live through many tests keep nothing of one that is over."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from imbrex.balancer.channel import Channel
from imbrex.placement import contiguous
from tests import tracing
from tests.ranks.pool import Pool, RankError, Ranks, threads


def count_loops(ranks: Ranks) -> int:
    """Threads of gloo's that wake up a hundred times a second, one a group."""
    return list(threads().values()).count("gloo_tcp_loop")


def leave_groups(ranks: Ranks, fail: bool) -> int:
    dist.new_group([0, 1, 2, 3])
    channel: Any = Channel(f"left {fail}", ranks.rank, ranks.world_size, 20.0)
    channel.cycle = channel
    if fail:
        raise ValueError("on purpose")
    return count_loops(ranks)


def start_brief_threads(ranks: Ranks) -> int:
    loops = count_loops(ranks)
    for _ in range(4):
        threading.Thread(target=time.sleep, args=(0.5,)).start()
    return loops


def test_groups_that_a_function_leaves_end(pool: Pool) -> None:
    """Also where other threads end meanwhile: as many are there then, but not the same."""
    pool.run(8, count_loops)  # what tests before have left ends, too
    before = pool.run(8, start_brief_threads)
    if not any(before):
        pytest.skip("the threads of gloo have no names before torch 2.13")
    inside = pool.run(8, leave_groups, False)
    assert [now - then for now, then in zip(inside, before, strict=True)] == [2] * 4 + [1] * 4
    time.sleep(0.5)
    assert pool.run(8, count_loops) == before


def test_those_of_one_that_failed_are_left(pool: Pool) -> None:
    """A peer may still be in them."""
    with pytest.raises(RankError, match="on purpose"):
        pool.run(8, leave_groups, True)
    pool.run(8, count_loops)


def sum_over_a_mesh(ranks: Ranks) -> float:
    mesh = init_device_mesh("cpu", (ranks.world_size // 2, 2), mesh_dim_names=("dp", "ep"))
    one = torch.ones(1)
    for name in ("dp", "ep"):
        dist.all_reduce(one, group=mesh.get_group(name))
    return float(one)


def test_groups_that_some_ranks_have_made_do_not_hang_those_of_all() -> None:
    pool = Pool(4, timeout_s=20.0)
    try:
        for world in (2, 4):
            assert pool.run(world, sum_over_a_mesh) == [world] * world
    finally:
        pool.close()


def traced(ranks: Ranks) -> bool:
    return sys.gettrace() is not None


@pytest.mark.skipif(sys.gettrace() is None, reason="nothing counts lines")
def test_one_rank_is_traced_and_none_of_an_untraced_test(pool: Pool) -> None:
    assert pool.run(2, traced) == [True, False]
    with tracing.stopped():
        assert sys.gettrace() is None
        assert pool.run(2, traced) == [False, False]
    assert sys.gettrace() is not None
    assert pool.run(2, traced) == [True, False]


def make_placement(ranks: Ranks) -> int:
    return contiguous(4, ranks.world_size).num_slots


def counted_files(ranks: Ranks) -> list[str]:
    counting = sys.modules["coverage"].Coverage.current()
    lines = None if counting is None else counting.get_data()
    return [] if lines is None else [path for path in lines.measured_files() if lines.lines(path)]


@pytest.mark.skipif(sys.gettrace() is None, reason="nothing counts lines")
def test_what_was_counted_outlives_an_untraced_test(pool: Pool) -> None:
    pool.run(2, make_placement)
    with tracing.stopped():
        pool.run(2, traced)
    counted, others = pool.run(2, counted_files)
    assert any(path.endswith("placement/layouts.py") for path in counted)
    assert others == []


def test_a_process_ends_as_before_after_tests_that_count_nothing() -> None:
    """Only `make coverage`, which counts lines, can fail it."""
    leave = os._exit
    with tracing.stopped():
        pass
    assert os._exit is leave
