"""The exchange kernels on virtual ranks of one GPU: all of it, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.placement.layouts import contiguous, from_slots
from tests.emulated.scenario import (
    Case,
    check_dispatch,
    check_exchange,
    check_positions,
    check_quantised,
    check_small,
    compact_rows,
    make_exchange,
    make_inputs,
    make_plans,
    route,
)
from tests.gpu.sanitizer import check_tests
from tests.gpu.stalling import Stalling

pytestmark = pytest.mark.gpu

CASES = {
    "two ranks": Case(placement=contiguous(16, 2), tokens=(200, 200), choices=4, width=2048),
    "four ranks, ragged": Case(
        placement=contiguous(32, 4), tokens=(170, 0, 5, 333), choices=8, alignment=64, width=7168
    ),
    "sixteen ranks": Case(placement=contiguous(64, 16), tokens=(40, 0, 77, 9) * 4, choices=6, width=512),
    "eight ranks": Case(placement=contiguous(64, 8), tokens=(90,) * 8, choices=6, width=1024, alignment=16),
    "one rank": Case(placement=contiguous(4, 1), tokens=(99,), choices=2),
    "replicas and a spare": Case(
        placement=from_slots([[0, 1, 2], [2, 3, -1], [0, 2, 4, 5]], 6), tokens=(400, 3, 21), choices=3
    ),
    "all to the last experts": Case(placement=contiguous(8, 4), tokens=(150,) * 4, choices=2, skew=100.0),
    "nothing at all": Case(placement=contiguous(4, 2), tokens=(6, 6), choices=2, drop=1.1),
    "experts split over two ranks": Case(
        placement=contiguous(16, 2), tokens=(70, 90, 0, 41), choices=4, width=2048, tensor=2, alignment=16
    ),
    "long rows": Case(placement=contiguous(4, 2), tokens=(70, 90), choices=4, width=16000),
}


@pytest.mark.parametrize("name", CASES)
def test_exchange(name: str) -> None:
    case = CASES[name]
    exchange = make_exchange(case, "cuda", timeout=10.0, route_blocks=3)
    for sms in (1, 8):
        check_exchange(case, exchange, "cuda", sms=sms)


@pytest.mark.parametrize("width", [512, 7168, 10240])
def test_rows_cross_as_fp8(width: int) -> None:
    case = Case(placement=contiguous(16, 4), tokens=(150, 90, 0, 47), choices=4, width=width, drop=0.0)
    for sms in (1, 8):
        check_quantised(case, make_exchange(case, "cuda", timeout=10.0), "cuda", sms)


@pytest.mark.parametrize(
    "name", ["two ranks", "four ranks, ragged", "replicas and a spare", "nothing at all"]
)
def test_small_dispatch(name: str) -> None:
    case = CASES[name]
    exchange = make_exchange(case, "cuda", timeout=10.0)
    for seed in range(6):
        check_small(replace(case, seed=seed), exchange, "cuda", sms=2 + 3 * seed)


@pytest.mark.parametrize("name", CASES)
def test_routing_beside_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imbrex.kernels.exchange.launches.FEW_SMS", 0)
    case = CASES[name]
    exchange = make_exchange(case, "cuda", timeout=10.0)
    for seed in range(4):
        sms = min(1 + 3 * seed, 132 // case.ranks)
        check_dispatch(replace(case, seed=seed), exchange, "cuda", sms=sms)
        check_small(replace(case, seed=seed), exchange, "cuda", sms=sms, large=True)


def test_many_calls_on_rotating_buffers() -> None:
    exchange = None
    for seed in range(40):
        make = torch.Generator().manual_seed(seed)
        case = Case(
            placement=contiguous(16, 4),
            tokens=(*torch.randint(0, 60, (3,), generator=make).tolist(), 60),
            choices=3,
            width=256,
            seed=seed,
            skew=float(seed % 3),
        )
        exchange = exchange or make_exchange(case, "cuda", timeout=10.0)
        check_exchange(case, exchange, "cuda", sms=1 + seed % 7)


def test_routing_among_64_ranks() -> None:
    case = Case(
        placement=contiguous(64, 64), tokens=tuple(7 * r % 100 for r in range(64)), choices=2, width=8
    )
    only = {"compact": False, "expert": False, "route_blocks": 1}
    exchange = make_exchange(case, "cuda", timeout=10.0, **only)
    for seed in range(3):
        inputs = make_inputs(replace(case, seed=seed), "cuda")
        routed = route(case, exchange, inputs)
        exchange.check(synchronize=True)
        check_positions(case, make_plans(case, inputs), routed)


def test_calls_with_delays_in_them() -> None:
    case = Case(placement=contiguous(16, 4), tokens=(60, 3, 41, 60), choices=3, width=256)
    exchange = make_exchange(case, "cuda", timeout=10.0, load=Stalling, route_blocks=3)
    for seed in range(12):
        check_exchange(replace(case, seed=seed), exchange, "cuda", sms=1 + seed % 7)
        check_small(replace(case, seed=seed), exchange, "cuda", sms=2 + seed % 7)


def test_leases_and_debug_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMBREX_DEBUG", "1")
    case = Case(placement=contiguous(16, 4), tokens=(60, 3, 41, 60), choices=3, width=512)
    exchange, inputs = make_exchange(case, "cuda", timeout=10.0), make_inputs(case, "cuda")
    routed = route(case, exchange, inputs)
    lease = exchange.push(inputs.x_WTD, routed, 8, inputs.tokens_W)
    kept, view = lease.keep(), lease.rows
    exchange.push(inputs.x_WTD, routed, 8, inputs.tokens_W)
    with pytest.raises(ValueError, match="gave their buffer away"):
        _ = lease.rows
    assert bool(view.isnan().all())
    want = compact_rows(case, make_plans(case, inputs), inputs, 1)
    assert torch.equal(kept[1, : len(want)].cpu(), want)
    wrong = inputs.ids_WTK.clone()
    wrong[1, 2, 0] = 16
    with pytest.raises(ValueError, match=r"expert ids outside \[-1, 16\)"):
        exchange.route(wrong, inputs.weights_WTK, inputs.tokens_W)
    for check in (check_exchange, check_dispatch, check_small, check_quantised):
        check(case, exchange, "cuda", 4)
    assert exchange.overflows() == [0] * 4
    assert exchange.usable


def test_a_captured_call_follows_new_routing() -> None:
    case = Case(placement=contiguous(16, 4), tokens=(32,) * 4, choices=4, width=512)
    exchange = make_exchange(case, "cuda", timeout=10.0)
    static = make_inputs(case, "cuda")

    def step() -> torch.Tensor:
        routed = exchange.route(static.ids_WTK, static.weights_WTK, static.tokens_W)
        rows = exchange.pull(static.x_WTD, routed, num_sms=4)
        return exchange.combine(rows, routed, num_sms=4)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(1, 6):
        fresh = make_inputs(
            Case(placement=case.placement, tokens=case.tokens, choices=4, width=512, seed=seed), "cuda"
        )
        for name in ("ids_WTK", "weights_WTK", "x_WTD"):
            getattr(static, name).copy_(getattr(fresh, name))
        graph.replay()
        replayed = captured.clone()
        assert torch.equal(replayed, step())
    exchange.check(synchronize=True)


def test_a_missing_rank_ends_in_one_exception() -> None:
    case = Case(placement=contiguous(8, 4), tokens=(16,) * 4, choices=2)
    exchange = make_exchange(case, "cuda", timeout=0.2)
    exchange.heap.local = exchange.heap.local[:3]
    exchange.local_ranks = 3
    inputs = make_inputs(case, "cuda")
    exchange.route(inputs.ids_WTK[:3], inputs.weights_WTK[:3], inputs.tokens_W[:3])
    with pytest.raises(
        ExchangeError, match=r"rank \d in route call 1 .*timed out, waiting for expert ids of rank 3"
    ):
        exchange.check(synchronize=True)
    with pytest.raises(ExchangeError):
        exchange.route(inputs.ids_WTK[:3], inputs.weights_WTK[:3], inputs.tokens_W[:3])


def test_wrong_ids_end_in_one_exception() -> None:
    case = Case(placement=contiguous(8, 2), tokens=(16, 16), choices=2)
    exchange = make_exchange(case, "cuda", timeout=5.0)
    inputs = make_inputs(case, "cuda")
    inputs.ids_WTK[1, 3] = 7
    exchange.route(inputs.ids_WTK, inputs.weights_WTK, inputs.tokens_W)
    with pytest.raises(ExchangeError, match="expert ids out of range or repeated"):
        exchange.check(synchronize=True)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.timeout(300)
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    names = "test_a_captured_call_follows_new_routing", "test_exchange[two ranks]"
    check_tests(tool, *(f"{__file__}::{name}" for name in names))
