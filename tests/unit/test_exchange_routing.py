"""The exchange kernels on virtual ranks, emulated on the CPU: positions, dispatched rows and sums to the bit."""

from __future__ import annotations

import pytest

from imbrex.placement.layouts import contiguous, from_slots
from tests.emulated import kernel
from tests.emulated.scenario import Case, check_exchange, make_exchange

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")

CASES = {
    "two ranks": Case(placement=contiguous(8, 2), tokens=(20, 20), choices=3),
    "four ranks, ragged": Case(placement=contiguous(8, 4), tokens=(17, 0, 5, 33), choices=2, alignment=8),
    "one rank": Case(placement=contiguous(4, 1), tokens=(9,), choices=2),
    "uneven ranks, top-1": Case(placement=contiguous(5, 3), tokens=(11, 12, 13), choices=1, drop=0.0),
    "replicas and a spare": Case(
        placement=from_slots([[0, 1, 2], [2, 3, -1], [0, 2, 4, 5]], 6), tokens=(40, 3, 21), choices=3
    ),
    "all to the last experts": Case(placement=contiguous(8, 4), tokens=(15, 15, 15, 15), choices=2, skew=100.0),
    "nothing at all": Case(placement=contiguous(4, 2), tokens=(6, 6), choices=2, drop=1.1),
    "long rows": Case(placement=contiguous(4, 2), tokens=(7, 9), choices=4, width=9000),
    "two chunks": Case(placement=contiguous(4, 2), tokens=(140, 131), choices=1, width=8),
}


@pytest.mark.parametrize("name", CASES)
def test_exchange(name: str) -> None:
    case = CASES[name]
    exchange = make_exchange(case, load=kernel.load, timeout=20.0, route_blocks=2)
    check_exchange(case, exchange)
