"""What an exchange says about itself, emulated: leases that expire, failures that name their layer, overflows
counted, and what `IMBREX_DEBUG=1` finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from imbrex.kernels import jit
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.exchange.failures import ExchangeError, check_choices
from imbrex.kernels.heap import VirtualHeap
from imbrex.placement.layouts import contiguous
from tests.emulated import kernel
from tests.emulated.scenario import (
    Case,
    check_dispatch,
    check_exchange,
    check_positions,
    check_small,
    compact_rows,
    make_exchange,
    make_inputs,
    make_plans,
    route,
)

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
CASE = Case(placement=contiguous(6, 3), tokens=(12, 3, 9), choices=3, width=512)


@pytest.mark.parametrize(("buffers", "lasts"), [(1, 1), (2, 1), (3, 2)])
def test_a_lease_ends_with_the_call_that_takes_its_buffer(buffers: int, lasts: int) -> None:
    made = make_exchange(CASE, load=kernel.load)
    exchange = NvlinkExchange(
        lambda nbytes: VirtualHeap(3, nbytes, "cpu"),
        CASE.placement,
        replace(made.shape, buffers=buffers),
        load=kernel.load,
        timeout=20.0,
    )
    given = [make_inputs(replace(CASE, seed=seed)) for seed in range(1 + lasts)]
    leases, kept = [], None
    for inputs in given:
        leases.append(exchange.push(inputs.x_WTD, route(CASE, exchange, inputs), 2, inputs.tokens_W))
        kept = leases[0].keep() if kept is None else kept
        assert [lease.live for lease in leases] == [len(leases) - i <= lasts for i in range(len(leases))]
    exchange.check()
    with pytest.raises(ValueError, match=rf"rows of dispatch 1, and dispatch {1 + lasts} gave their buffer"):
        _ = leases[0].rows
    with pytest.raises(ValueError, match=r"or keep\(\) a copy"):
        leases[0].keep()
    assert kept is not None
    for rows, inputs in ((kept, given[0]), (leases[-1].rows, given[-1])):
        plans = make_plans(CASE, inputs)
        for me in range(3):
            want = compact_rows(CASE, plans, inputs, me)
            assert torch.equal(rows[me, : len(want)], want)


def test_rows_that_have_expired_read_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMBREX_DEBUG", "1")
    exchange, inputs = make_exchange(CASE, load=kernel.load, timeout=20.0), make_inputs(CASE)
    routed = route(CASE, exchange, inputs)
    old = exchange.push(inputs.x_WTD, routed, 2, inputs.tokens_W).rows
    assert not bool(old[0, : int(routed.totals_L4[0, 1])].isnan().any())
    exchange.push(inputs.x_WTD, routed, 2, inputs.tokens_W)
    assert bool(old.isnan().all())
    rows = exchange.pull(inputs.x_WTD, routed, 2)
    assert bool(rows[:, int(routed.totals_L4[:, 0].max()) :].isnan().all())
    for check in (check_exchange, check_dispatch, check_small):  # nothing that is promised reads it
        check(CASE, exchange)


def test_debug_looks_before_a_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMBREX_DEBUG", "1")
    exchange, inputs = make_exchange(CASE, load=kernel.load, timeout=20.0), make_inputs(CASE)
    routed = route(CASE, exchange, inputs)
    rows = exchange.pull(inputs.x_WTD, routed, 2)
    last = int(routed.position_LWTK.max())
    below, above, twice = (inputs.ids_WTK.clone() for _ in range(3))
    below[1, 0, 0], above[0, 3, 1], twice[2, 8] = -2, 6, 4
    far = routed.replace(send_row_LTW=routed.send_row_LTW + exchange.shape.token_capacity)
    low = routed.replace(position_LWTK=routed.position_LWTK - 1)
    given = inputs.weights_WTK, inputs.tokens_W
    calls = {
        r"expert ids outside \[-1, 6\)": lambda: exchange.route(below, *given),
        r"ids outside": lambda: exchange.dispatch(
            inputs.x_WTD, above, inputs.weights_WTK, 2, inputs.tokens_W
        ),
        r"an expert twice": lambda: exchange.dispatch_small(
            inputs.x_WTD, twice, inputs.weights_WTK, 2, inputs.tokens_W
        ),
        r"\[13, 3, 9\] tokens where ids are of 12": lambda: exchange.route(
            inputs.ids_WTK, inputs.weights_WTK, torch.tensor([13, 3, 9], dtype=torch.int32)
        ),
        rf"a choice has row {last} of {last}": lambda: exchange.combine(rows[:, :last], routed),
        r"rows past the 24 that a rank can receive": lambda: exchange.push(inputs.x_WTD, far, 2),
        r"positions below -1": lambda: exchange.combine(rows, low),
    }
    made = dict(exchange._calls)
    for says, call in calls.items():
        with pytest.raises(ValueError, match=says):
            call()
    assert exchange._calls == made, "none of them was launched"
    check_choices(exchange.shape, inputs.ids_WTK[0, :0], None)  # a rank without tokens
    check_exchange(CASE, exchange)


def test_routings_that_do_not_fit_are_counted() -> None:
    inputs = make_inputs(CASE)
    whole = make_exchange(CASE, load=kernel.load)
    most = int(route(CASE, whole, inputs).totals_L4[:, 0].max())
    exchange = NvlinkExchange(
        lambda nbytes: VirtualHeap(3, nbytes, "cpu"),
        CASE.placement,
        replace(whole.shape, row_capacity=most - 1),
        load=kernel.load,
        timeout=20.0,
    )
    flags = torch.zeros(3, dtype=torch.int32)
    for seed in range(4):
        flags += route(CASE, exchange, make_inputs(replace(CASE, seed=seed))).totals_L4[:, 2]
    assert exchange.overflows() == flags.tolist()
    assert int(flags.sum()) > 0
    assert whole.overflows() == [0, 0, 0]


@pytest.mark.parametrize("layer", [None, 0, 17])
def test_a_failed_call_names_its_layer_and_leaves_the_exchange_unusable(layer: int | None) -> None:
    exchange, inputs = make_exchange(CASE, load=kernel.load, timeout=1.0), make_inputs(CASE)
    exchange.layer = layer
    routed = route(CASE, exchange, inputs)
    assert exchange.usable
    exchange.local_ranks = 2
    exchange.pull(inputs.x_WTD, routed, 2)
    where = "" if layer is None else f"of layer {layer} "
    with pytest.raises(ExchangeError, match=rf"in pull call 1 {where}\(block \d\): timed out"):
        exchange.check()
    assert not exchange.usable


def test_a_launch_that_was_prepared_names_the_layer_set_last() -> None:
    exchange = make_exchange(CASE, load=kernel.load)
    prepared = exchange.group_of(0, 4)
    for layer, word in ((5, 6), (None, 0), (0, 1)):
        exchange.layer = layer
        assert (exchange.layer, prepared.layer, exchange.group_of(1, 2).layer) == (layer, word, word)


class Stalling:
    """A kernel whose threads stop here and there for up to 0.3 ms; built when it is first called."""

    def __init__(self, variant: jit.Variant, device: object = None) -> None:
        self.variant = replace(variant, defines=(*variant.defines, ("STALL_NS", 300_000)))

    def launch(self, **options: Any) -> None:
        kernel.load(self.variant).launch(**options)


def test_calls_with_delays_in_them() -> None:
    case = Case(placement=contiguous(6, 3), tokens=(40, 3, 21), choices=2, width=16)
    exchange = make_exchange(case, load=Stalling, timeout=30.0, route_blocks=2)
    for seed in range(4):
        check_exchange(replace(case, seed=seed), exchange, sms=1 + seed % 3)


def test_routing_among_more_ranks_than_a_word_has_bits() -> None:
    """On a GPU 64 of them: `tests/gpu/test_exchange.py`."""
    case = Case(
        placement=contiguous(33, 33), tokens=tuple(rank % 3 for rank in range(33)), choices=2, width=8
    )
    only = {"compact": False, "expert": False, "route_blocks": 1}
    exchange, inputs = make_exchange(case, load=kernel.load, timeout=60.0, **only), make_inputs(case)
    routed = route(case, exchange, inputs)
    exchange.check()
    check_positions(case, make_plans(case, inputs), routed)


def test_rows_among_sixteen_ranks_and_no_more() -> None:
    case = Case(placement=contiguous(32, 16), tokens=(3, 0, 4, 1) * 4, choices=4, width=16)
    check_exchange(case, make_exchange(case, load=kernel.load, timeout=60.0, route_blocks=1), sms=1)
    case = Case(placement=contiguous(34, 17), tokens=(1,) * 17, choices=2)
    with pytest.raises(ValueError, match="17 ranks; at most 16 exchange rows, 64 route"):
        make_exchange(case, load=kernel.load)


def test_multiprocessors_are_chosen_by_the_length_of_a_row() -> None:
    """As measured on H200: `kernels/exchange/launches.py`."""
    for width, few, more in ((4096, 8, 24), (4088, 16, 32)):
        case = Case(placement=contiguous(4, 2), tokens=(3, 2), choices=1, width=width)
        exchange, inputs = make_exchange(case, load=Counting, timeout=30.0), make_inputs(case)
        given = inputs.x_WTD, inputs.ids_WTK, inputs.weights_WTK
        _, routed = exchange.dispatch(*given, tokens=inputs.tokens_W)
        exchange.push(inputs.x_WTD, routed, tokens=inputs.tokens_W)
        exchange.combine_compact(inputs.x_WTD, routed)
        rows, _ = exchange.dispatch_expert(*given, tokens=inputs.tokens_W)
        exchange.pull(inputs.x_WTD, routed)
        exchange.combine(rows, routed)
        sms = exchange.last_sms
        assert (sms["push"], sms["gather"]) == (few, few)
        assert (sms["pull"], sms["combine"]) == (more, more)


class Counting:
    """A kernel that is not run."""

    def __init__(self, variant: jit.Variant, device: object = None) -> None:
        pass

    def launch(self, **options: Any) -> None:
        pass
