"""Down with others' rows first, and the sums home, on virtual ranks of one GPU: the bits of a product and a
combine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from imbrex.kernels.ffn.glue import Groups
from imbrex.kernels.ffn.products import queue_product
from imbrex.kernels.gemm.gemm import Epilogue, Layout
from imbrex.kernels.gemm.tiling import SHARED, override_tilings
from imbrex.placement.layouts import contiguous
from tests.emulated.down_home import apart, begin, differences, products_of
from tests.emulated.others_first import together
from tests.emulated.rows_out import begin as begin_rows
from tests.emulated.rows_out import beside
from tests.emulated.scenario import Case, make_exchange
from tests.gpu.sanitizer import check_tests
from tests.gpu.stalling import Stalling
from tests.gpu.test_down_home import blocks_of, tiled

pytestmark = pytest.mark.gpu

CASES = {
    "two ranks": (Case(placement=contiguous(16, 2), tokens=(900, 700), choices=4, width=2048), 1408),
    "narrow": (Case(placement=contiguous(32, 2), tokens=(1400, 1512), choices=8, width=2048), 768),
    "four ranks": (Case(placement=contiguous(16, 4), tokens=(170, 0, 5, 633), choices=6, width=520), 256),
    "all to one": (
        Case(placement=contiguous(4, 4), tokens=(150,) * 4, choices=1, skew=-100.0, width=512),
        64,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_two_launches(name: str) -> None:
    case, inner = CASES[name]
    with override_tilings(tiled(SHARED)):
        for applied in (True, False):
            forward = begin(case, inner, applied=applied, addend=applied, device="cuda", timeout=10.0)
            wanted, blocks = apart(forward, sms=8), blocks_of(case)
            for first, last in ((0, None), (0, 1), (0, 1 << 10), (1, 3), (blocks // 4, None), (blocks, None)):
                for _ in range(2):
                    found = together(forward, first, blocks, last=last)
                    assert differences(case, found, wanted) == [], (applied, first, last)


@pytest.mark.parametrize("name", ["two ranks", "narrow"])
def test_it_begins_in_the_last_wave_of_gate_and_up(name: str) -> None:
    case, inner = CASES[name]
    with override_tilings(tiled(SHARED)):
        forward = begin(case, inner, device="cuda", timeout=10.0)
        torch.manual_seed(7)
        x = [torch.randn(len(act), case.width, device="cuda", dtype=torch.bfloat16) for act in forward.acts]
        gate_up = [
            torch.randn(len(down), 2 * inner, case.width, device="cuda", dtype=torch.bfloat16) / 64
            for down in forward.weights
        ]

        def make(rank: int, groups: Groups) -> int:
            act_RF = forward.acts[rank].fill_(float("nan"))
            operands = Layout.FORWARD, x[rank], gate_up[rank], groups, act_RF, Epilogue.SWIGLU
            return queue_product(*operands, progress=groups.progress)

        for rank, product in enumerate(products_of(forward)[1]):
            assert make(rank, product.groups) == inner // 128
        wanted, blocks = apart(forward, sms=8), blocks_of(case)
        for call in range(30):
            found = together(forward, call % 3 * 8, blocks, make=make)
            assert differences(case, found, wanted) == [], call


def test_many_calls_with_delays_in_them() -> None:
    case, inner = CASES["four ranks"]
    with override_tilings(tiled(SHARED)):
        for seed in range(20):
            random = replace(case, seed=seed, tokens=(170 + seed, seed, 5, 633 - seed))
            forward = begin(random, inner, device="cuda", timeout=10.0, load=Stalling)
            wanted, blocks = apart(forward, sms=8), blocks_of(case)
            for call in range(5):
                found = together(forward, call, blocks)
                assert differences(random, found, wanted) == [], (seed, call)


def test_movers_find_own_rows() -> None:
    """`beside` compares what they found (`own_rows`)."""
    case = replace(CASES["narrow"][0], width=1024)
    forward = begin_rows(case, 256, make_exchange(case, "cuda", timeout=10.0), SHARED, "cuda")
    assert len(beside(forward, sms=8)) == case.ranks


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizers_find_nothing(tool: str) -> None:
    check_tests(tool, f"{__file__}::test_bits_are_those_of_two_launches[four ranks]")
