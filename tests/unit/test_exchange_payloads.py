"""Payloads other than bf16, and rows that do not fit, through the exchange kernels emulated on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from imbrex.codec.fp8 import Fp8
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.heap import VirtualHeap
from imbrex.placement.layouts import contiguous
from tests.emulated import kernel
from tests.emulated.scenario import Case, compact_rows, make_exchange, make_inputs, make_plans, rows_at

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
CASE = Case(placement=contiguous(6, 3), tokens=(12, 3, 9), choices=3, width=512)


@pytest.mark.parametrize("payload", ["int8", "fp8 rows with their scales", "float32"])
def test_opaque_rows(payload: str) -> None:
    inputs = make_inputs(CASE)
    if payload == "int8":
        x = torch.randint(-128, 128, (3, 12, 48), dtype=torch.int8)
    elif payload == "float32":
        x = inputs.x_WTD[:, :, :128].float().contiguous()
    else:
        x = Fp8.e4m3().encode(inputs.x_WTD.flatten(0, 1), torch.bfloat16).view(3, 12, -1)
    inputs = replace(inputs, x_WTD=x)
    exchange = make_exchange(CASE, load=kernel.load, timeout=20.0)
    plans = make_plans(CASE, inputs)
    routed = exchange.route(inputs.ids_WTK, inputs.weights_WTK, inputs.tokens_W)
    received = exchange.push(x, routed, 2, inputs.tokens_W).keep()
    rows = exchange.pull(x, routed, 2)
    exchange.check()
    for me in range(3):
        want = compact_rows(CASE, plans, inputs, me)
        assert torch.equal(received[me, : len(want)], want)
        copies = [x[source, :tokens, None].expand(-1, 3, -1) for source, tokens in enumerate(CASE.tokens)]
        filled = rows_at(CASE, plans, me, lambda source: torch.ones(CASE.tokens[source], 3, dtype=torch.bool))
        assert torch.equal(
            rows[me, : len(filled)][filled], rows_at(CASE, plans, me, copies.__getitem__)[filled]
        )


def test_rows_past_the_capacity_are_dropped_and_counted() -> None:
    inputs = make_inputs(CASE)
    whole = make_exchange(CASE, load=kernel.load)
    most = int(whole.route(inputs.ids_WTK, inputs.weights_WTK, inputs.tokens_W).totals_L4[:, 0].max())
    shape = replace(whole.shape, row_capacity=most - 1)
    exchange = NvlinkExchange(
        lambda nbytes: VirtualHeap(3, nbytes, "cpu"), CASE.placement, shape, load=kernel.load, timeout=20.0
    )
    routed = exchange.route(inputs.ids_WTK, inputs.weights_WTK, inputs.tokens_W)
    full = routed.totals_L4[:, 0] >= most
    assert torch.equal(routed.totals_L4[:, 2].bool(), full)
    assert full.any()
    assert int(routed.position_LWTK.max()) == most - 2
    rows = exchange.pull(inputs.x_WTD, routed, 2)
    out = exchange.combine(rows, routed, num_sms=2)
    exchange.check()
    kept = torch.zeros(3, 12, 3)
    for home, plan in enumerate(make_plans(CASE, inputs)):
        here = (plan.slot_TK >= 0) & (plan.position_TK < most - 1)
        kept[home, : len(here)] = torch.where(here, inputs.weights_WTK[home, : len(here)], 0.0)
    want = inputs.x_WTD.float() * kept.sum(-1, keepdim=True)
    for home, tokens in enumerate(CASE.tokens):
        torch.testing.assert_close(out[home, :tokens].float(), want[home, :tokens], atol=0.05, rtol=0.02)


@pytest.mark.parametrize("width", [100, 513])
def test_rows_that_the_copies_cannot_take_are_refused(width: int) -> None:
    exchange = make_exchange(CASE, load=kernel.load)
    inputs = make_inputs(CASE)
    routed = exchange.route(inputs.ids_WTK, inputs.weights_WTK, inputs.tokens_W)
    x = torch.zeros(3, 12, width, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="a multiple of 16"):
        exchange.pull(x, routed)
    with pytest.raises(ValueError, match="multiples of 512"):
        exchange.push(inputs.x_WTD[:, :, :256].contiguous(), routed, quantise=True)
