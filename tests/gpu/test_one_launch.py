"""Both products of a small batch in one launch, behind a dispatch of virtual ranks: the bits of two."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from imbrex.kernels.exchange.groups import empty_groups
from imbrex.kernels.ffn.ffn import run_experts
from imbrex.kernels.ffn.glue import COUNTERS, Groups, plan_groups
from imbrex.kernels.gemm.gemm import check_products
from imbrex.placement.layouts import contiguous
from tests.emulated.ragged import hits_of
from tests.emulated.scenario import Case, make_exchange, make_inputs
from tests.gpu.sanitizer import check_tests

pytestmark = pytest.mark.gpu


def draw(*shape: int) -> Tensor:
    return (torch.randn(*shape, device="cuda") * shape[-1] ** -0.5).to(torch.bfloat16)


def check(
    rows: Tensor, up: Tensor, down: Tensor, plan: Tensor, weights: Tensor, hits: Tensor, live: int
) -> None:
    """Each with a plan of its own: the second begins before the first has ended."""
    groups, other = (Groups(plan.clone(), expected=64, hits=hits, one_launch=one) for one in (True, False))
    one, two = (run_experts(rows, up, down, of, weights) for of in (groups, other))
    assert torch.equal(one[:live].view(torch.int16), two[:live].view(torch.int16))
    assert not one[:live].isnan().any()
    assert groups.plan[:COUNTERS].tolist() == [0] * COUNTERS
    check_products(rows.get_device())


COUNTS = {
    "no rows": [0] * 64,
    "one token": [1] * 9 + [0] * 55,
    "many, uneven": [*range(32), *range(32)],
    "one has most": [3, 700, *[0] * 60, 1, 5],
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("width", "inner"), [(2048, 768), (7168, 2048), (264, 136)])
def test_the_bits_of_two_launches(name: str, width: int, inner: int) -> None:
    """Twenty times, one right behind the other."""
    torch.manual_seed(0)
    counts = COUNTS[name]
    rows = torch.randn(sum(counts) + 5, width, device="cuda").to(torch.bfloat16)
    weights = torch.rand(len(rows), device="cuda")
    up, down = draw(64, 2 * inner, width), draw(64, width, inner)
    plan, hits = plan_groups(torch.tensor(counts, device="cuda")).plan, hits_of(counts).cuda()
    for _ in range(20):
        check(rows, up, down, plan, weights, hits, sum(counts))


@pytest.mark.parametrize("skew", [0.0, 3.0], ids=["even", "skewed"])
@pytest.mark.parametrize("tokens", [1, 4, 16, 128])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_behind_a_dispatch(world: int, tokens: int, skew: float) -> None:
    """Rows, gate weights and ends of a small dispatch of virtual ranks, in a graph whose tokens change; the
    last rank's have none."""
    given = (tokens,) * (world - 1) + (tokens if world == 1 else 0,)
    case = Case(placement=contiguous(16 * world, world), tokens=given, choices=4, width=512, skew=skew)
    exchange, inputs = make_exchange(case, "cuda", timeout=10.0), make_inputs(case, "cuda")
    up, down = draw(16, 512, 512), draw(16, 512, 256)
    capacity = exchange.shape.row_capacity
    left = empty_groups(exchange.local_ranks, capacity, 16, COUNTERS, exchange.device)

    def step(one_launch: bool) -> tuple[Tensor, list[Tensor]]:
        tensors = inputs.x_WTD, inputs.ids_WTK, inputs.weights_WTK, 4, inputs.tokens_W
        rows, _ = exchange.dispatch_small(*tensors, groups=left)
        results = []
        for me in range(world):
            plan, hits = (part.view(world, -1)[me] for part in (left.plan, left.hits))
            groups = Groups(plan, expected=max(1, tokens), hits=hits, one_launch=one_launch)
            parts = rows.view(world, capacity, -1)[me], up, down, groups, left.weights.view(world, -1)[me]
            results.append(run_experts(*parts))
        return rows, results

    step(True)
    step(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(True)[1]
    for seed in range(4):
        fresh = make_inputs(replace(case, seed=seed), "cuda")
        for name in ("ids_WTK", "weights_WTK", "x_WTD"):
            getattr(inputs, name).copy_(getattr(fresh, name))
        graph.replay()
        found = [one.clone() for one in captured]
        wanted = step(False)[1]
        for me, (one, two) in enumerate(zip(found, wanted, strict=True)):
            live = int(left.plan.view(world, -1)[me, -1])
            assert torch.equal(one[:live].view(torch.int16), two[:live].view(torch.int16))
    exchange.check(synchronize=True)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.timeout(300)
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    check_tests(tool, f"{__file__}::test_the_bits_of_two_launches[264-136-one has most]")
