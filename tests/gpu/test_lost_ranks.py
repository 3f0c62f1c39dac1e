"""A rank that dies or falls silent, seen by a layer on the others: NaN over NVLink, an exception within the
time-out over NCCL, and nothing that hangs."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import imbrex
from imbrex.contracts import Roles
from imbrex.exchange import fused_call, nvlink
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.kernels.ffn import products
from imbrex.kernels.gemm.gemm import Layout, Tiling
from imbrex.kernels.gemm.tiling import SHARED, choose_tiling
from imbrex.overlap import Fused
from imbrex.router.collectives import sum_over_ranks
from imbrex.runtime.waits import RankLostError, refuse_lost
from tests.gpu.gpus import RANKS, share

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(RANKS < 2, reason="a lost rank needs another"),
]
TIMEOUT_S, SILENT_S, D = 3.0, 9.0, 256


def make_layer(transport: str, *, width: int = D, **options: Any) -> imbrex.MoELayer:
    config = imbrex.MoEConfig(hidden_size=width, intermediate_size=128, num_experts=8, top_k=2)
    return imbrex.MoELayer(
        config,
        dist.group.WORLD,
        transport=transport,
        timeout=TIMEOUT_S,
        dtype=torch.bfloat16,
        device=torch.device("cuda", torch.cuda.current_device()),
        **options,
    )


def draw(tokens: int, width: int = D) -> torch.Tensor:
    return torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")


def leave_if_second() -> None:
    dist.barrier()
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        os._exit(0)


def replay_without_a_peer() -> list[str]:
    layer, x = make_layer("nvlink"), draw(16)
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = layer(x)
    graph.replay()
    layer.check(synchronize=True)
    assert not y.isnan().any()
    leave_if_second()
    said = []
    for _ in range(2):
        y.zero_()
        graph.replay()
        try:
            layer.check(synchronize=True)
        except ExchangeError as error:
            said.append(str(error))
        assert y.isnan().all()
    return said


def go_back_without_a_peer(schedule: str) -> list[str]:
    """The second rank dies before the backward of a step that hosts make from a record."""
    layer, x = make_layer("nvlink", schedule=schedule), draw(512).requires_grad_()
    launches, launch = [0], NvlinkExchange.launch_again

    def count(kernels: NvlinkExchange, *what: Any) -> None:
        launches[0] += 1
        launch(kernels, *what)

    for _ in range(3):  # leaves numbers in the memory that the next one finds, too
        layer(x).float().square().sum().backward()
        layer.zero_grad()
        x.grad = None
    pytest.MonkeyPatch().setattr(NvlinkExchange, "launch_again", count)
    y = layer(x)
    leave_if_second()
    y.float().square().sum().backward()
    torch.cuda.synchronize()
    assert launches[0] > 0
    for name, leaf in [*layer.named_parameters(), ("x", x)]:
        assert leaf.grad is not None, name
        assert leaf.grad.isnan().all(), name
    try:
        layer.check()
    except ExchangeError as error:
        return [str(error)]
    return []


FUSED = {
    "stage": (NvlinkExchange, "expert ids"),
    "stage_again": (NvlinkExchange, "staged rows"),
    "down_and_sums": (nvlink, "reduced rows"),
    "others_first": (nvlink, "reduced rows"),
    "home_beside_gradients": (fused_call, "reduced rows"),
}
"""What queues a fused kernel, or the tokens of one, where that is, and what a peer waits for then."""


def choose_shared(layout: Layout, *given: Any, **reading: Any) -> Tiling:
    """The only tiles of a forward that the kernel with others' rows first has."""
    return SHARED if layout is Layout.FORWARD else choose_tiling(layout, *given, **reading)


def multiply_without_a_peer(launch: str, dies: bool) -> list[str]:
    """The second rank dies, or sleeps, before its part of a fused kernel; the first one's has begun."""
    schedule: Any = "fused"
    if launch == "others_first":
        schedule, products.choose_tiling = Fused(Roles(first=8)), choose_shared
    else:
        nvlink.why_not_sums = lambda *_: None  # so few tokens' sums go home beside down, too
    layer, x = make_layer("nvlink", width=1024, schedule=schedule), draw(600, 1024).requires_grad_()
    layer(x).float().square().sum().backward()  # leaves numbers in the memory that the next one finds
    x.grad = None
    torch.cuda.synchronize()
    dist.barrier()
    place = FUSED[launch][0]
    queue = getattr(place, launch)

    def lose(*args: Any, **options: Any) -> Any:
        torch.cuda.synchronize()
        if dist.get_rank() == 1 and dies:
            os._exit(0)
        if dist.get_rank() == 1:
            time.sleep(SILENT_S)
        return queue(*args, **options)

    setattr(place, launch, lose)
    try:
        y = layer(x)
        if launch in ("stage_again", "home_beside_gradients"):
            y.float().square().sum().backward()
        torch.cuda.synchronize()
        result = y if x.grad is None else x.grad
        assert result.isnan().all()
        layer.check()
    except ExchangeError as error:
        return [str(error)]
    return []


def call_without_a_peer(leave: Callable[[], None]) -> list[str]:
    layer, x = make_layer("alltoall"), draw(64).requires_grad_()
    layer(x).float().sum().backward()
    dist.barrier()
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        leave()
    said, began = [], time.monotonic()
    for _ in range(2):
        try:
            layer(x).float().sum().backward()
            layer.check(synchronize=True)
        except RankLostError as error:
            said.append(f"{time.monotonic() - began:.1f} {error}")
    return said


def call_a_sleeper() -> list[str]:
    return call_without_a_peer(lambda: time.sleep(SILENT_S))


def call_the_dead() -> list[str]:
    return call_without_a_peer(lambda: os._exit(0))


def replay_without_an_answer() -> list[str]:
    """A sum over NCCL, captured; a rank that goes to sleep between two replays."""
    group, x = dist.group.WORLD, torch.ones(8, device="cuda")
    assert group is not None
    sum_over_ranks(x, group.group_name, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total = sum_over_ranks(x, group.group_name, 2)
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    refuse_lost(group)
    assert total.tolist() == [2.0] * 8
    if dist.get_rank() == 1:
        time.sleep(SILENT_S)
        return []
    said, began = [], time.monotonic()
    for _ in range(2):
        try:
            graph.replay()
            torch.cuda.synchronize()
            refuse_lost(group)
        except RankLostError as error:
            said.append(f"{time.monotonic() - began:.1f} {error}")
    return said


def run(rank: int, job: Callable[[], list[str]], folder: str) -> None:
    device = torch.device("cuda", share(rank))
    torch.cuda.set_device(device)
    os.environ["IMBREX_TIMEOUT_S"] = f"{TIMEOUT_S:g}"  # of what is of no layer
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        device_id=device,
    )
    Path(folder, f"rank{rank}").write_text("\n".join(job()))
    os._exit(0)


def told(job: Callable[[], list[str]]) -> list[list[str]]:
    """What the ranks that are left heard."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, args=(job, folder), nprocs=2, join=True)
        files = [Path(folder, f"rank{rank}") for rank in range(2)]
        return [file.read_text().splitlines() for file in files if file.exists()]


def test_replays_after_a_death_are_no_numbers_and_say_so() -> None:
    (said,) = told(replay_without_a_peer)
    assert len(said) == 2
    assert "timed out, waiting for" in said[0]


@pytest.mark.parametrize("schedule", ["serial", "fused"])
def test_every_gradient_of_a_backward_that_lost_a_peer_is_no_number(schedule: str) -> None:
    (said,) = told(partial(go_back_without_a_peer, schedule))
    assert len(said) == 1
    assert "timed out, waiting for" in said[0]


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "sleeps"])
@pytest.mark.parametrize("launch", FUSED)
def test_a_rank_that_is_lost_before_a_fused_kernel_leaves_no_numbers(launch: str, dies: bool) -> None:
    first, *others = told(partial(multiply_without_a_peer, launch, dies))
    assert len(others) == (0 if dies else 1)
    (said,) = first
    assert f"timed out, waiting for {FUSED[launch][1]} of rank 1" in said
    for words in others:  # the sleeper: its peer gave up
        assert len(words) == 1


def test_a_silent_rank_ends_a_wait_over_nccl_within_the_time_out() -> None:
    for said in told(call_a_sleeper):
        assert len(said) == 2, said
        assert float(said[0].split()[0]) < TIMEOUT_S + 3.0
        assert "lost its peers in" in said[0]
        assert float(said[1].split()[0]) < TIMEOUT_S + 4.0


def test_a_dead_rank_ends_a_wait_over_nccl_within_the_time_out() -> None:
    (said,) = told(call_the_dead)
    assert len(said) == 2, said
    assert float(said[0].split()[0]) < TIMEOUT_S + 3.0


def test_a_captured_wait_over_nccl_ends_within_the_time_out_at_a_replay() -> None:
    (said,) = [words for words in told(replay_without_an_answer) if words]
    assert len(said) == 2, said
    assert float(said[0].split()[0]) < TIMEOUT_S + 3.0
    assert "rank 0 lost its peers in route" in said[0]
    assert float(said[1].split()[0]) < TIMEOUT_S + 4.0
