"""dx home beside both weights' gradients on virtual ranks of one GPU: the bits of three launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.exchange.launches import Sums
from imbrex.kernels.ffn.ffn import LeftGradient
from imbrex.kernels.ffn.products import queue_product
from imbrex.kernels.fused.home import home_beside_gradients
from imbrex.kernels.gemm.gemm import Layout
from imbrex.placement.layouts import contiguous
from tests.emulated.home import apart, begin, beside, differences
from tests.emulated.scenario import Case
from tests.gpu.sanitizer import check_tests
from tests.gpu.stalling import Stalling

pytestmark = pytest.mark.gpu

CASES = {
    "two ranks": (Case(placement=contiguous(16, 2), tokens=(900, 700), choices=4, width=2048), 1408),
    "narrow": (Case(placement=contiguous(32, 2), tokens=(400, 512), choices=8, width=2048), 768),
    "in turns": (Case(placement=contiguous(8, 2), tokens=(600, 530), choices=4, width=7168), 2048),
    "four ranks": (Case(placement=contiguous(16, 4), tokens=(170, 0, 5, 633), choices=6, width=512), 256),
    "all to one": (Case(placement=contiguous(4, 4), tokens=(150,) * 4, choices=1, skew=-100.0, width=64), 64),
}


def blocks_of(case: Case) -> int:
    return multiprocessors(0) // case.ranks


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_three_launches(name: str) -> None:
    case, inner = CASES[name]
    backward, blocks = begin(case, inner, device="cuda", timeout=10.0), blocks_of(case)
    wanted = apart(backward, sms=8)
    for first in (0, 1, 16, blocks // 2, blocks):
        assert differences(case, beside(backward, first, blocks), wanted) == []


@pytest.mark.parametrize("name", ["two ranks", "in turns", "four ranks"])
def test_sums_in_fp8_have_the_bits_of_a_combine(name: str) -> None:
    case, inner = CASES[name]
    backward, blocks = begin(case, inner, device="cuda", timeout=10.0), blocks_of(case)
    backward.d_rows[:, 0::7, :128], backward.d_rows[:, 1::7, 130] = 0.0, 3e30
    wanted = apart(backward, sms=8, wire="fp8")
    for first in (0, 16, blocks):
        assert differences(case, beside(backward, first, blocks, wire="fp8"), wanted) == []


@pytest.mark.parametrize("name", ["two ranks", "in turns"])
@pytest.mark.parametrize("add", [torch.bfloat16, torch.float32])
def test_gradients_are_added(name: str, add: torch.dtype) -> None:
    case, inner = CASES[name]
    backward, blocks = begin(case, inner, add, device="cuda", timeout=10.0), blocks_of(case)
    wanted = apart(backward, sms=8)
    for first in (0, 16):
        assert differences(case, beside(backward, first, blocks), wanted) == []


def test_many_calls_with_delays_in_them() -> None:
    case, inner = CASES["four ranks"]
    backward, blocks = begin(case, inner, device="cuda", timeout=10.0, load=Stalling), blocks_of(case)
    wanted = apart(backward, sms=8)
    for call in range(100):
        assert differences(case, beside(backward, call % (blocks + 1), blocks), wanted) == [], call


@pytest.mark.parametrize("name", ["two ranks", "narrow", "in turns"])
def test_gradients_beside_the_last_tiles_of_those_of_rows(name: str) -> None:
    """The launch right before makes the rows that are summed."""
    case, inner = CASES[name]
    backward, blocks = begin(case, inner, device="cuda", timeout=10.0), blocks_of(case)
    for _, gate_up in backward.pairs:
        gate_up.weight.normal_(std=0.02)

    def make_rows() -> None:
        for rank, (_, gate_up) in enumerate(backward.pairs):
            operands = gate_up.d_out, gate_up.weight, gate_up.groups, backward.d_rows[rank]
            queue_product(Layout.DGRAD, *operands)

    make_rows()
    wanted = apart(backward, sms=8)
    pairs = [(with_memory(one), with_memory(other)) for one, other in backward.pairs]
    out, home = (torch.empty_like(tensor) for tensor in backward.like)
    sums: Sums = {"values": (backward.numbers, home)}
    given = backward.exchange, backward.d_rows, backward.routed, sums, out, pairs
    results_of: list[Any] = [out, home, backward.d_rows, *(one.out for pair in pairs for one in pair)]
    for call in range(30):
        for tensor in results_of:
            tensor.fill_(float("nan"))
        make_rows()
        made = home_beside_gradients(*given, first_blocks=(0, 16, blocks)[call % 3], blocks=blocks)
        backward.exchange.check(synchronize=True)
        results = [out, home, *(gradient for pair in made for gradient in pair)]
        assert differences(case, results, wanted) == [], call


def with_memory(gradient: LeftGradient) -> LeftGradient:
    return replace(gradient, out=torch.empty_like(gradient.weight))


def test_a_captured_launch_is_replayed() -> None:
    case, inner = CASES["two ranks"]
    backward, blocks = begin(case, inner, device="cuda", timeout=10.0), blocks_of(case)
    wanted = apart(backward, sms=8)
    out, home = (torch.empty_like(tensor) for tensor in backward.like)
    sums: Sums = {"values": (backward.numbers, home)}
    given = backward.exchange, backward.d_rows, backward.routed, sums, out, backward.pairs

    def call() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return home_beside_gradients(*given, first_blocks=16, blocks=blocks)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    results = [out, home, *(gradient for pair in made for gradient in pair)]
    for _ in range(3):
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        backward.exchange.check(synchronize=True)
        assert differences(case, results, wanted) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizers_find_nothing(tool: str) -> None:
    check_tests(tool, f"{__file__}::test_bits_are_those_of_three_launches[four ranks]")
