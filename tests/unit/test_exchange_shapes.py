"""Any legal shape goes through the exchange kernels, emulated on the CPU, to the bit."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imbrex.placement.layouts import contiguous, from_slots
from tests.emulated import kernel
from tests.emulated.scenario import Case, check_exchange, make_exchange

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 5))
    experts = draw(st.integers(ranks, 3 * ranks))
    placement = contiguous(experts, ranks)
    if ranks > 1 and draw(
        st.booleans()
    ):  # a replica of some expert on a rank that does not hold it, and a spare
        expert = draw(st.integers(0, experts - 1))
        held = [list(placement.local(rank)) for rank in range(ranks)]
        free = [rank for rank in range(ranks) if expert not in held[rank]]
        held[draw(st.sampled_from(free))] += [expert, -1]
        placement = from_slots(held, experts)
    tokens = draw(st.lists(st.integers(0, 14), min_size=ranks, max_size=ranks))
    tokens[draw(st.integers(0, ranks - 1))] = draw(st.integers(1, 20))
    return Case(
        placement=placement,
        tokens=tuple(tokens),
        choices=draw(st.integers(1, min(experts, 9))),
        width=8 * draw(st.integers(1, 40)),
        alignment=draw(st.sampled_from([1, 8, 16, 64, 128])),
        drop=draw(st.sampled_from([0.0, 0.3, 0.9])),
        skew=draw(st.sampled_from([0.0, 2.0, 100.0])),
        seed=draw(st.integers(0, 1000)),
    )


@given(case=cases(), sms=st.integers(1, 3))
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_shape(case: Case, sms: int) -> None:
    exchange = make_exchange(case, load=kernel.load, timeout=30.0)
    check_exchange(case, exchange, sms=sms)


def test_two_exchanges_side_by_side() -> None:
    first = Case(placement=contiguous(6, 2), tokens=(9, 4), choices=2, width=24)
    second = Case(placement=contiguous(6, 3), tokens=(5, 0, 7), choices=3, width=16, alignment=8)
    exchanges = [make_exchange(case, load=kernel.load, timeout=30.0) for case in (first, second)]
    for _ in range(3):
        for case, exchange in zip((first, second), exchanges, strict=True):
            check_exchange(case, exchange)
