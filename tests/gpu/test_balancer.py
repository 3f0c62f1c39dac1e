"""Weights move between GPUs while layers run over NVLink, and nothing that the layers compute changes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import imbrex
from imbrex.balancer import OnlineBalancer
from imbrex.kernels.routing.split import SplitKernel
from imbrex.placement import plan_layers, split_balanced
from imbrex.placement.flow import spread_choices
from tests.emulated.scenario import check_exchange, make_exchange
from tests.gpu.gpus import GPUS, RANKS
from tests.ranks.balancer_jobs import EAGER, Model, tokens
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_layer import relative
from tests.unit.test_exchange_balanced import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
two_gpus = pytest.mark.skipif(RANKS < 2, reason="ranks need a GPU each")
CONFIG = imbrex.MoEConfig(hidden_size=128, intermediate_size=128, num_experts=16, top_k=3)


@pytest.mark.parametrize("seed", range(12))
def test_split_is_that_of_the_cpu(seed: int) -> None:
    draw = np.random.default_rng(seed)
    ranks = int(draw.integers(2, 17))
    experts = int(draw.integers(ranks, 257))
    slots = int(min(experts * ranks, experts + draw.integers(0, 5 * ranks)))
    placement = plan_layers(draw.gamma(0.6, size=(1, experts)), ranks, slots)[0]
    counts = draw.poisson(draw.gamma(0.6, size=experts) * 300, size=(ranks, experts))
    found = split_balanced(torch.from_numpy(counts).cuda(), placement)
    assert found.is_cuda
    assert np.array_equal(found.cpu().numpy(), spread_choices(counts, placement))


def test_split_in_a_graph_follows_the_counts() -> None:
    placement = plan_layers(np.random.default_rng(0).gamma(0.6, size=(1, 32)), 4, 40)[0]
    kernel = SplitKernel(placement, torch.device("cuda", 0))
    counts = torch.zeros(4, 32, dtype=torch.int64, device="cuda")
    kernel(counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        shares = kernel(counts)
    for seed in range(5):
        drawn = np.random.default_rng(seed).poisson(40, size=(4, 32))
        counts.copy_(torch.from_numpy(drawn))
        graph.replay()
        assert np.array_equal(shares.cpu().numpy(), spread_choices(drawn, placement))


@pytest.mark.parametrize("name", CASES)
def test_routing_by_load_on_virtual_ranks(name: str) -> None:
    case = replace(CASES[name], balanced=True)
    check_exchange(case, make_exchange(case, "cuda", timeout=5.0), "cuda")


def infer(ranks: Ranks, transport: str, iterations: int, moving: bool, journal: str | None = None) -> dict:
    pace = replace(EAGER, split="balanced")
    balancer = OnlineBalancer(pace, timeout=20, journal=journal if ranks.rank == 0 else None)
    options: dict[str, Any] = {"transport": transport, "device": ranks.device, "dtype": torch.bfloat16}
    model = Model(ranks, balancer if moving else None, CONFIG, 2, split="balanced", **options).eval()
    outputs, switched = [], 0
    for iteration in range(iterations):
        x_TD = tokens(ranks.rank, iteration, CONFIG.hidden_size).to(ranks.device, torch.bfloat16)
        with torch.no_grad():
            outputs.append(model(x_TD))
        if moving:
            torch.cuda.synchronize()
            switched += len(balancer.step())
    balancer.settle()
    found = {"outputs": outputs, "switched": switched, "placements": [x.placement for x in model.layers]}
    found |= {"tally": dict(balancer.tally.values), "mover": balancer.mover and balancer.mover.name}
    balancer.close()
    return found


@two_gpus
@pytest.mark.parametrize(("transport", "iterations"), [("nvlink", 60), ("alltoall", 30)])
def test_inference_is_the_same_while_weights_move(nccl: Pool, transport: str, iterations: int) -> None:
    world = RANKS
    moving = nccl.run(world, infer, transport, iterations, True)
    still = nccl.run(world, infer, transport, iterations, False)
    # Ranks that share a GPU have no peer to copy from.
    assert moving[0]["mover"] == ("peer copies" if RANKS <= GPUS else "messages between hosts")
    assert moving[0]["switched"] >= 10
    for ours, theirs in zip(moving, still, strict=True):
        assert ours["placements"] == moving[0]["placements"]
        errors = [relative(a, b) for a, b in zip(ours["outputs"], theirs["outputs"], strict=True)]
        assert max(errors) < 1e-2, errors
    assert sum(one["tally"]["bytes_moved"] for one in moving) > 0


@two_gpus
def test_counts_on_the_device_are_all_choices(nccl: Pool, tmp_path) -> None:
    world, journal = RANKS, tmp_path / "journal.jsonl"
    nccl.run(world, infer, "nvlink", 12, True, str(journal))
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    choices = CONFIG.top_k * sum(6 + rank % 3 for rank in range(world))
    assert len(lines) == 12
    for line in lines:
        for name in ("loads", "expert_load"):
            assert [sum(row) for row in line[name]] == [choices, choices]


def replay(ranks: Ranks, iterations: int) -> dict:
    """One captured forward, replayed with other tokens while experts move under it, beside the eager one."""
    balancer = OnlineBalancer(replace(EAGER, split="balanced"), timeout=20)
    options: dict[str, Any] = {"transport": "nvlink", "device": ranks.device, "dtype": torch.bfloat16}
    model = Model(ranks, balancer, CONFIG, 2, split="balanced", **options).eval()
    x_TD = torch.zeros(8, CONFIG.hidden_size, device=ranks.device, dtype=torch.bfloat16)
    graph, worst, switched = torch.cuda.CUDAGraph(), 0.0, 0
    with torch.no_grad():
        for _ in range(3):
            model(x_TD)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y_TD = model(x_TD)
        for iteration in range(iterations):
            drawn = torch.randn(
                8, CONFIG.hidden_size, generator=torch.Generator().manual_seed(iteration // 4)
            )
            x_TD.copy_(drawn)
            graph.replay()
            torch.cuda.synchronize()
            worst = max(worst, relative(y_TD.clone(), model(x_TD)))
            switched += len(balancer.step())
    balancer.settle()
    balancer.close()
    return {"worst": worst, "switched": switched}


@two_gpus
def test_a_captured_forward_follows_the_experts(nccl: Pool) -> None:
    found = nccl.run(RANKS, replay, 40)
    assert found[0]["switched"] >= 5
    assert max(one["worst"] for one in found) < 1e-3
