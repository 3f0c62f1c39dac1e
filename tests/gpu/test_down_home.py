"""Down and the sums home on virtual ranks of one GPU: the bits of a product and a combine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.fused.down_home import Cut, cut_of
from imbrex.kernels.gemm.gemm import Epilogue, Layout
from imbrex.kernels.gemm.tiling import PAIRED, SHARED, SMALL, Tiling, override_tilings
from imbrex.placement.layouts import contiguous
from tests.emulated.down_home import apart, begin, differences, together
from tests.emulated.scenario import Case
from tests.gpu.sanitizer import check_tests
from tests.gpu.stalling import Stalling

pytestmark = pytest.mark.gpu

CASES = {
    "two ranks": (Case(placement=contiguous(16, 2), tokens=(900, 700), choices=4, width=2048), 1408),
    "narrow": (Case(placement=contiguous(32, 2), tokens=(1400, 1512), choices=8, width=2048), 768),
    "wide": (Case(placement=contiguous(8, 2), tokens=(600, 530), choices=4, width=7168), 2048),
    "four ranks": (Case(placement=contiguous(16, 4), tokens=(170, 0, 5, 633), choices=6, width=520), 256),
    "all to one": (
        Case(placement=contiguous(4, 4), tokens=(150,) * 4, choices=1, skew=-100.0, width=512),
        64,
    ),
}


def blocks_of(case: Case) -> int:
    return multiprocessors(0) // case.ranks // 2 * 2


def tiled(tiling: Tiling) -> dict[tuple[Layout, Epilogue], Tiling]:
    return {(Layout.FORWARD, epilogue): tiling for epilogue in (Epilogue.PLAIN, Epilogue.WEIGHTED)}


@pytest.mark.parametrize("tiling", [SHARED, PAIRED, SMALL], ids=("shared", "pairs", "small"))
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_two_launches(name: str, tiling: Tiling) -> None:
    case, inner = CASES[name]
    with override_tilings(tiled(tiling)):
        for applied in (True, False):
            forward = begin(case, inner, applied=applied, addend=applied, device="cuda", timeout=10.0)
            wanted, blocks = apart(forward, sms=8), blocks_of(case)
            for cut in (cut_of(case.width), cut_of(case.width, 2), Cut(parts=1, slices=(1,))):
                for piece, beside in ((8, True), (3, True), (16, False)):
                    found = together(forward, cut=cut, piece=piece, blocks=blocks, beside=beside)
                    assert differences(case, found, wanted) == [], (cut, piece, beside)


def test_many_calls_with_delays_in_them() -> None:
    case, inner = CASES["four ranks"]
    with override_tilings(tiled(SHARED)):
        for seed in range(20):
            random = replace(case, seed=seed, tokens=(170 + seed, seed, 5, 633 - seed))
            forward = begin(random, inner, device="cuda", timeout=10.0, load=Stalling)
            wanted, blocks = apart(forward, sms=8), blocks_of(case)
            for call in range(5):
                assert differences(random, together(forward, blocks=blocks), wanted) == [], (seed, call)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizers_find_nothing(tool: str) -> None:
    check_tests(tool, f"{__file__}::test_bits_are_those_of_two_launches[four ranks-shared]")
