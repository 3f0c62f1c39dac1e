"""Both combines, emulated: however a block is cut it adds in one order; sums in fp8 are the codec's."""

from __future__ import annotations

import pytest
import torch

from imbrex.kernels.exchange import layout as lay
from imbrex.placement.layouts import contiguous
from tests.emulated import kernel
from tests.emulated.scenario import (
    Case,
    check_combine,
    combined,
    compact_rows,
    make_exchange,
    make_inputs,
    make_plans,
    route,
    sent_to,
)

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")


def test_a_block_of_the_gather_fits_its_sm() -> None:
    for row_bytes in (16, 1040, 4096, 14336, 14352, 16384, 20480, 38000):
        block = lay.gather_shape(row_bytes)
        assert block.threads <= 512
        assert block.shared <= lay.SHARED_BYTES
        assert block.crews >= 2
        assert 4 <= block.slots <= 64 // block.crews
        assert block.piece_bytes <= lay.GATHER_COLUMNS * block.adders
        assert block.piece_bytes == row_bytes or block.piece_bytes % 128 == 0


@pytest.mark.parametrize("num_sms", [2, 40])
def test_parts_of_rows_have_the_bits_of_whole_ones(num_sms: int) -> None:
    """Drawn by few warps, and one piece for each of many."""
    case = Case(placement=contiguous(6, 3), tokens=(23, 0, 41), choices=3, width=520)
    exchange, inputs = make_exchange(case, load=kernel.load, timeout=30.0), make_inputs(case)
    routed = route(case, exchange, inputs)
    rows = torch.randn(3, exchange.shape.row_capacity, case.width).bfloat16()
    how = {"weighted": False, "num_sms": num_sms}
    whole, parts = (
        exchange.combine(rows, routed, **how, pieces=(1, cut, lay.REDUCE_WARPS)) for cut in (1, 4)
    )
    exchange.check()
    for home, tokens in enumerate(case.tokens):
        assert torch.equal(whole[home, :tokens], parts[home, :tokens])
        assert whole[home, :tokens].isfinite().all()


@pytest.mark.parametrize(("width", "ranks"), [(520, 4), (72, 6), (9000, 3), (7168, 2), (2048, 5)])
def test_sums_of_ranks_are_added_in_their_order(width: int, ranks: int) -> None:
    case = Case(
        placement=contiguous(2 * ranks, ranks), tokens=(23, 0, 41, 7, 9, 2)[:ranks], choices=3, width=width
    )
    exchange, inputs = make_exchange(case, load=kernel.load, timeout=30.0), make_inputs(case)
    plans, routed = make_plans(case, inputs), route(case, exchange, inputs)
    make = torch.Generator().manual_seed(ranks)
    for with_addend in (False, True):
        given = torch.randn(ranks, ranks, max(case.tokens), width, generator=make).bfloat16()  # [rank, home]
        addend = torch.randn(inputs.x_WTD.shape, generator=make).bfloat16() if with_addend else None
        reduced = exchange.reduced_rows(width)
        for me in range(ranks):
            rows = [given[me, home, sent_to(plan, me)] for home, plan in enumerate(plans) if home != me]
            reduced[me, : len(compact_rows(case, plans, inputs, me))] = torch.cat(rows)
        own = given[torch.arange(ranks), torch.arange(ranks)].contiguous()
        y = exchange.combine_compact(own, routed, addend=addend, num_sms=2, out_dtype=torch.float32)
        exchange.check()
        for home, tokens in enumerate(case.tokens):
            want = torch.zeros(tokens, width)
            for rank in range(ranks):
                here = routed.send_row_LTW[home, :tokens, rank] >= 0
                want[here] += given[rank, home, :tokens][here].float()
            if addend is not None:
                want += addend[home, :tokens].float()
            assert torch.equal(y[home, :tokens], want)


@pytest.mark.parametrize("width", [256, 768, 2048])
def test_sums_cross_as_the_codecs_values(width: int) -> None:
    case = Case(placement=contiguous(8, 4), tokens=(13, 0, 5, 20), choices=3, width=width)
    exchange, inputs = make_exchange(case, load=kernel.load, timeout=30.0), make_inputs(case)
    plans, routed = make_plans(case, inputs), route(case, exchange, inputs)
    rows = torch.full((4, exchange.shape.row_capacity, width), float("nan"), dtype=torch.bfloat16)
    check_combine(case, plans, exchange, inputs, routed, rows, 2)


def test_awkward_sums_cross_as_the_codecs_values() -> None:
    """Blocks of zeros, tiny and huge ones, infinities and NaN; more than 512 tokens a rank, so whole rows."""
    case = Case(placement=contiguous(4, 2), tokens=(520, 30), choices=1, width=768, drop=0.0)
    exchange, inputs = make_exchange(case, load=kernel.load, timeout=30.0), make_inputs(case)
    plans, routed = make_plans(case, inputs), route(case, exchange, inputs)
    given = torch.randn(2, exchange.shape.row_capacity, 6, 128, generator=torch.Generator().manual_seed(3))
    given *= 10.0 ** (torch.arange(given.shape[1]) % 75 - 37).float()[None, :, None, None]
    given[:, :, 1] = 0
    given[:, ::3, 2, 5] = float("inf")
    given[:, ::5, 3, 7] = float("nan")
    rows = given.view(2, -1, 768).bfloat16()
    y = exchange.combine(
        rows, routed, weighted=False, num_sms=1, num_tokens=520, wire="fp8", out_dtype=torch.float32
    )
    exchange.check()
    want = combined(case, plans, inputs, list(rows), False, "fp8")
    assert int(want.isnan().sum()) > 1000
    for home, tokens in enumerate(case.tokens):
        torch.testing.assert_close(y[home, :tokens], want[home, :tokens], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_a_token_whose_rows_are_all_one_too_many_adds_zero(wire: str) -> None:
    """As with DeepEP's `num_permuted_tokens`: its home was told that it was sent, and adds what arrives."""
    case = Case(placement=contiguous(6, 3), tokens=(9, 14, 6), choices=2, width=512)
    exchange, inputs = make_exchange(case, load=kernel.load, timeout=30.0), make_inputs(case)
    routed = route(case, exchange, inputs)
    rows = exchange.pull(inputs.x_WTD, routed, num_sms=2)
    for _ in range(2):  # what stands in both buffers must not come back
        exchange.combine(torch.full_like(rows, float("nan")), routed, weighted=False, num_sms=2, wire=wire)
    budget, position_LWTK = 5, routed.position_LWTK
    few = routed.replace(position_LWTK=torch.where(position_LWTK < budget, position_LWTK, -1))
    fewer = rows.clone()
    fewer[:, budget:] = 0
    y = exchange.combine(rows, few, weighted=False, num_sms=2, wire=wire)
    want = exchange.combine(fewer, routed, weighted=False, num_sms=2, wire=wire)
    exchange.check()
    for home, tokens in enumerate(case.tokens):
        assert torch.equal(y[home, :tokens], want[home, :tokens])
        assert (want[home, :tokens] == 0).all(1).any()


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_whole_rows_are_one_stream(wire: str) -> None:
    """More than 512 tokens: a warp goes from piece to piece, over tokens without rows and rows too many."""
    width, budget = (264 if wire == "bf16" else 1280), 150
    case = Case(placement=contiguous(6, 3), tokens=(530, 40, 17), choices=2, width=width, drop=0.6)
    exchange, inputs = make_exchange(case, load=kernel.load, timeout=30.0), make_inputs(case)
    plans, routed = make_plans(case, inputs), route(case, exchange, inputs)
    make = torch.Generator().manual_seed(5)
    rows = torch.randn(3, exchange.shape.row_capacity, width, generator=make).bfloat16()
    numbers = torch.rand(3, exchange.shape.row_capacity, generator=make)
    home_numbers = torch.empty(3, 530, 2)
    few = routed.replace(position_LWTK=torch.where(routed.position_LWTK < budget, routed.position_LWTK, -1))
    y = exchange.combine(
        *(rows, few),
        num_sms=1,
        num_tokens=530,
        wire=wire,
        out_dtype=torch.float32,
        values=(numbers, home_numbers),
    )
    exchange.check()
    rows[:, budget:] = 0
    numbers[:, budget:] = 0
    want = combined(case, plans, inputs, list(rows), True, wire)
    assert (want[0] == 0).all(1).sum() > 100
    for home, (plan, tokens) in enumerate(zip(plans, case.tokens, strict=True)):
        assert torch.equal(y[home, :tokens], want[home, :tokens])
        rank_TK = torch.div(plan.slot_TK, 2, rounding_mode="floor")
        sent = plan.slot_TK >= 0
        here = torch.zeros(tokens, 2)
        here[sent] = numbers[rank_TK[sent], plan.position_TK[sent]]
        assert torch.equal(home_numbers[home, :tokens], here)
