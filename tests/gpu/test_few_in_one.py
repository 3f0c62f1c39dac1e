"""A small dispatch and its experts in one launch, among virtual ranks: the bits of the launches before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.kernels.fused.few import dispatch_and_experts
from imbrex.kernels.gemm.gemm import check_products
from imbrex.placement.layouts import contiguous
from tests.emulated.few import Few, apart, begin, differences, summed, together
from tests.emulated.scenario import Case, make_inputs
from tests.gpu.sanitizer import check_tests

pytestmark = pytest.mark.gpu
SMS = {1: 64, 2: 32, 4: 16}
"""Multiprocessors of a rank that dispatch, of 132 that ranks share."""


def few_of(world: int, tokens: int, skew: float = 0.0, *, timeout: float = 10.0, **sizes: Any) -> Few:
    """The last rank of several has no tokens."""
    given = (tokens,) * (world - 1) + (tokens if world == 1 else 0,)
    how = {"choices": 4, "width": 512, **sizes}
    inner = how.pop("inner", 256)
    case = Case(placement=contiguous(16 * world, world), tokens=given, skew=skew, **how)
    return begin(case, inner, device="cuda", timeout=timeout)


@pytest.mark.parametrize("skew", [0.0, 3.0], ids=["even", "skewed"])
@pytest.mark.parametrize("tokens", [1, 4, 16, 128])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_bits_of_a_dispatch_and_its_experts(world: int, tokens: int, skew: float) -> None:
    """In a graph, too, of which twenty replays have other tokens."""
    few, sms = few_of(world, tokens, skew), SMS[world]
    two = apart(few, sms)
    assert differences(few, together(few, sms), two) == []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dispatch_and_experts(few.exchange, few.tensors, few.experts, sms)
    for seed in range(20):
        fresh = make_inputs(replace(few.case, seed=seed), "cuda")
        for name in ("ids_WTK", "weights_WTK", "x_WTD"):
            getattr(few.inputs, name).copy_(getattr(fresh, name))
        graph.replay()
        few.exchange.check(synchronize=True)
        two = apart(few, sms)
        assert differences(few, captured[:3], two) == [], f"replay {seed}"
    check_products(few.exchange.device.index or 0)


@pytest.mark.parametrize(("width", "inner"), [(2048, 768), (7168, 2048), (264, 136)])
def test_sizes_of_models(width: int, inner: int) -> None:
    few = few_of(1, 16, width=width, inner=inner)
    two = apart(few, 64)
    for _ in range(20):
        assert differences(few, together(few, 64), two) == []


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sums_right_behind(world: int) -> None:
    """In a graph of eight layers, so that every kernel begins beside the one before."""
    few, sms = few_of(world, 16, width=2048, inner=768), SMS[world]
    rows, routed, _ = apart(few, sms)
    wanted, graph = summed(few, rows, routed), torch.cuda.CUDAGraph()

    def layer() -> torch.Tensor:
        done = dispatch_and_experts(few.exchange, few.tensors, few.experts, sms)
        ends = {"weighted": False, "behind": done.behind}
        return few.exchange.combine(done.out, done.routed, num_sms=64 // world, **ends)

    layer()
    with torch.cuda.graph(graph):
        sums = [layer() for _ in range(8)]
    for replay in range(50):
        for y_LTD in sums:
            y_LTD.fill_(torch.nan)
        graph.replay()
        few.exchange.check(synchronize=True)
        for y_LTD in sums:
            for me, tokens in enumerate(few.case.tokens):
                y_TD, wanted_TD = (y.view(world, -1, 2048)[me, :tokens] for y in (y_LTD, wanted))
                assert torch.equal(y_TD, wanted_TD), f"replay {replay}"


@pytest.mark.parametrize("name", ["no rows", "one rank has all", "all dispatch", "few dispatch"])
def test_shapes(name: str) -> None:
    few, sms = few_of(2, 16), {"all dispatch": 66, "few dispatch": 8}.get(name, 32)
    if name == "no rows":
        few.inputs.ids_WTK.fill_(-1)
    if name == "one rank has all":
        few.inputs.ids_WTK.copy_(torch.arange(4, device="cuda").expand_as(few.inputs.ids_WTK))
    two = apart(few, sms)
    for _ in range(20):
        assert differences(few, together(few, sms), two) == []


def test_a_rank_that_never_comes_leaves_no_rows() -> None:
    """Products end, and the result is what nobody takes for rows."""
    few = few_of(2, 4, timeout=1.0)
    exchange = few.exchange
    together(few, 32)
    exchange.heap.local, exchange.local_ranks = exchange.heap.local[:1], 1
    done = dispatch_and_experts(exchange, few.tensors, few.experts[:1], 32)
    with pytest.raises(ExchangeError, match=r"timed out, waiting for expert ids of rank 1"):
        exchange.check(synchronize=True)
    assert done.out.isnan().all()


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.timeout(300)
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    check_tests(tool, f"{__file__}::test_sizes_of_models[264-136]")
