"""Rows that come beside gate and up, on virtual ranks of one GPU: the bits of a pull and a product."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imbrex.kernels.gemm.gemm import Epilogue
from imbrex.kernels.gemm.tiling import GRADIENT_TILINGS, PAIRED, SHARED, SMALL, TALL, Tiling
from imbrex.placement.layouts import contiguous
from tests.emulated.rows_out import apart, begin, beside, differences, rows_before
from tests.emulated.scenario import Case, make_exchange
from tests.gpu.sanitizer import check_tests
from tests.gpu.stalling import Stalling

pytestmark = pytest.mark.gpu

CASES = {
    "two ranks": (Case(placement=contiguous(16, 2), tokens=(900, 700), choices=4, width=2048), 1408),
    "wide": (Case(placement=contiguous(8, 2), tokens=(600, 530), choices=4, width=7168), 2048),
    "four ranks": (Case(placement=contiguous(16, 4), tokens=(170, 0, 5, 633), choices=6, width=512), 256),
    "all to one": (Case(placement=contiguous(4, 4), tokens=(150,) * 4, choices=1, skew=-100.0, width=64), 64),
}


@pytest.mark.parametrize("tiling", [SHARED, PAIRED, SMALL, TALL], ids=("shared", "pairs", "small", "tall"))
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_two_launches(name: str, tiling: Tiling) -> None:
    case, inner = CASES[name]
    forward = begin(case, inner, make_exchange(case, "cuda", timeout=10.0), tiling, "cuda")
    wanted = apart(forward, 16)
    for _ in range(3):
        assert differences(beside(forward, 132 // case.ranks), wanted) == []


@pytest.mark.parametrize("name", CASES)
def test_rows_that_are_read_before_their_product(name: str) -> None:
    case, inner = CASES[name]
    forward = begin(case, inner, make_exchange(case, "cuda", timeout=10.0), SHARED, "cuda")
    assert rows_before(forward, 132 // case.ranks) == [True] * case.ranks


GRADIENTS = {
    "plain": (Epilogue.PLAIN, SHARED),
    "plain, pairs": (Epilogue.PLAIN, PAIRED),
    "plain, small": (Epilogue.PLAIN, SMALL),
    "plain, tall": (Epilogue.PLAIN, TALL),
    "swiglu": (Epilogue.SWIGLU_GRADIENT, GRADIENT_TILINGS[0]),
    "swiglu, small": (Epilogue.SWIGLU_GRADIENT, GRADIENT_TILINGS[1]),
}


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("name", CASES)
def test_rows_of_dy_beside_the_gradient_through_down(name: str, gradient: str) -> None:
    case, inner = CASES[name]
    epilogue, tiling = GRADIENTS[gradient]
    exchange = make_exchange(case, "cuda", timeout=10.0)
    backward = begin(case, inner, exchange, tiling, "cuda", epilogue)
    wanted = apart(backward, 16)
    for _ in range(3):
        assert differences(beside(backward, 132 // case.ranks), wanted) == []


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("name", CASES)
def test_rows_of_dy_in_fp8_have_the_bits_of_the_codec(name: str, gradient: str) -> None:
    case, inner = CASES[name]
    case = replace(case, width=-(-case.width // 512) * 512)
    epilogue, tiling = GRADIENTS[gradient]
    exchange = make_exchange(case, "cuda", timeout=10.0)
    backward = begin(case, inner, exchange, tiling, "cuda", epilogue, fp8=True)
    wanted = apart(backward, 16)
    for _ in range(3):
        assert differences(beside(backward, 132 // case.ranks), wanted) == []


def test_many_calls_with_delays_in_them() -> None:
    case, inner = CASES["four ranks"]
    for seed in range(30):
        random = replace(case, seed=seed, tokens=(170 + seed, seed, 5, 633 - seed))
        exchange = make_exchange(random, "cuda", timeout=10.0, load=Stalling)
        forward = begin(random, inner, exchange, SHARED, "cuda")
        wanted = apart(forward, 16)
        for call in range(3):
            assert differences(beside(forward, 32), wanted) == [], (seed, call)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizers_find_nothing(tool: str) -> None:
    before = f"{__file__}::test_rows_that_are_read_before_their_product[four ranks]"
    check_tests(tool, f"{__file__}::test_bits_are_those_of_two_launches[four ranks-shared]", before)
