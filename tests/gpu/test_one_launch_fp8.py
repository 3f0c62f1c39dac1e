"""Experts in fp8 of few rows in one launch, which quantises them: the bits of the three launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from imbrex import MoEConfig, MoELayer
from imbrex.kernels.exchange.groups import empty_groups
from imbrex.kernels.ffn.both import ENTRY
from imbrex.kernels.ffn.fp8 import ffn_fp8, quantise_experts, why_not_one_launch
from imbrex.kernels.ffn.glue import COUNTERS, Groups, plan_groups
from imbrex.kernels.gemm.gemm import check_products
from imbrex.placement.layouts import contiguous
from tests.emulated.ragged import hits_of
from tests.emulated.scenario import Case, make_exchange, make_inputs
from tests.gpu.sanitizer import check_tests
from tests.gpu.test_one_launch import COUNTS

pytestmark = pytest.mark.gpu


def draw(*shape: int) -> Tensor:
    return (torch.randn(*shape, device="cuda") * shape[-1] ** -0.5).to(torch.bfloat16)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("width", "inner"), [(2048, 768), (7168, 2048), (256, 384)])
def test_the_bits_of_three_launches(name: str, width: int, inner: int) -> None:
    """Twenty times, one right behind the other; rows of very different magnitudes."""
    torch.manual_seed(0)
    counts = COUNTS[name]
    live, counts_e = sum(counts), torch.tensor(counts, device="cuda")
    rows = torch.randn(live + 5, width, device="cuda")
    rows = (rows * 10 ** torch.linspace(-3, 3, live + 5, device="cuda")[:, None]).to(torch.bfloat16)
    weights = torch.rand(len(rows), device="cuda")
    experts = quantise_experts(draw(64, 2 * inner, width), draw(64, width, inner))
    plan, hits = plan_groups(counts_e).plan, hits_of(counts).cuda()
    three = ffn_fp8(rows, experts, counts_e, weights_R=weights)[:live]
    for _ in range(20):
        groups = Groups(plan.clone(), expected=64, hits=hits, one_launch=True)
        assert why_not_one_launch(rows, experts, groups) is None
        one = ffn_fp8(rows, experts, counts_e, weights_R=weights, groups=groups)[:live]
        assert torch.equal(one.view(torch.int16), three.view(torch.int16))
        assert not one.isnan().any()
        assert groups.plan[:COUNTERS].tolist() == [0] * COUNTERS
        check_products(rows.get_device())


@pytest.mark.parametrize("skew", [0.0, 3.0], ids=["even", "skewed"])
@pytest.mark.parametrize("tokens", [1, 4, 16, 128])
@pytest.mark.parametrize("world", [1, 2])
def test_behind_a_dispatch(world: int, tokens: int, skew: float) -> None:
    """Rows, gate weights and ends of a small dispatch of virtual ranks, in a graph whose tokens change; the
    last of two ranks has none."""
    given = (tokens,) * (world - 1) + (tokens if world == 1 else 0,)
    case = Case(placement=contiguous(16 * world, world), tokens=given, choices=4, width=512, skew=skew)
    exchange, inputs = make_exchange(case, "cuda", timeout=10.0), make_inputs(case, "cuda")
    experts, capacity = quantise_experts(draw(16, 512, 512), draw(16, 512, 256)), exchange.shape.row_capacity
    left = empty_groups(exchange.local_ranks, capacity, 16, COUNTERS, exchange.device)

    def step(one_launch: bool) -> list[Tensor]:
        tensors = inputs.x_WTD, inputs.ids_WTK, inputs.weights_WTK, 4, inputs.tokens_W
        rows, _ = exchange.dispatch_small(*tensors, groups=left)
        results = []
        for me in range(world):
            parts = left.plan, left.hits, left.counts, left.weights
            plan, hits, counts_e, weights_R = (part.view(world, -1)[me] for part in parts)
            groups = Groups(plan, expected=max(1, tokens), hits=hits, one_launch=one_launch)
            more: dict[str, Any] = {"weights_R": weights_R, "groups": groups}
            results.append(ffn_fp8(rows.view(world, capacity, -1)[me], experts, counts_e, **more))
        return results

    step(True)
    step(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(True)
    for seed in range(4):
        fresh = make_inputs(replace(case, seed=seed), "cuda")
        for name in ("ids_WTK", "weights_WTK", "x_WTD"):
            getattr(inputs, name).copy_(getattr(fresh, name))
        graph.replay()
        found = [one.clone() for one in captured]
        for me, (one, three) in enumerate(zip(found, step(False), strict=True)):
            live = int(left.plan.view(world, -1)[me, -1])
            assert torch.equal(one[:live].view(torch.int16), three[:live].view(torch.int16))
    exchange.check(synchronize=True)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 8, 100])
def test_a_layer_of_one_rank(tokens: int) -> None:
    """Captured, in one launch and in three: the same bits, and the launches that were asked for."""
    torch.manual_seed(1)
    config = MoEConfig(hidden_size=512, intermediate_size=256, num_experts=32, top_k=4)
    layer = MoELayer(config, experts="kernels-fp8", device="cuda", dtype=torch.bfloat16)
    x, found, names = torch.randn(tokens, 512, device="cuda").bfloat16(), [], []
    for one_launch in (False, True):
        layer.experts.one_launch = one_launch
        layer(x)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            layer(x)
        names.append({event.key for event in seen.key_averages()})
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        found.append(y.clone())
    assert torch.equal(*found)
    assert [ENTRY in of for of in names] == [False, True]
    assert ["quantise_rows" in of for of in names] == [True, False]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.timeout(300)
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    check_tests(tool, f"{__file__}::test_the_bits_of_three_launches[256-384-one has most]")
