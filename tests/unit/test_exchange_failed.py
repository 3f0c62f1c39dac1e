"""A call that failed leaves NaN, whatever the memory held: at the call that waits in vain, and at every
replay of what was captured while all ranks were there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from imbrex.kernels import jit
from imbrex.kernels.exchange.exchange import NvlinkExchange, Routed
from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.kernels.gemm.tiling import SHARED
from imbrex.kernels.structs import struct
from imbrex.placement.layouts import contiguous
from tests.emulated import kernel
from tests.emulated.gemm import emulate
from tests.emulated.rows_out import begin, beside_silent
from tests.emulated.scenario import Case, Inputs, check_exchange, make_exchange, make_inputs, route

pytestmark = pytest.mark.skipif(not kernel.available(), reason="needs g++")

CASE = Case(placement=contiguous(6, 3), tokens=(16, 9, 12), choices=2, width=512, drop=0.0)
THERE = 2
"""Ranks that are left of three."""
CONTROL = struct("peers/protocol.cuh", "Control")


class Recorded:
    """A kernel as a graph has it: with the arguments of its last launch."""

    last: dict[str, Any]

    def __init__(self, variant: jit.Variant, device: object = None) -> None:
        self.kernel = kernel.load(replace(variant, defines=(*variant.defines, ("LAST_TRIES", 256))))

    def launch(self, **options: Any) -> None:
        Recorded.last = {"kernel": self.kernel, **options}
        self.kernel.launch(**options)


def replay() -> None:
    """The last launch once more, for the ranks that are left."""
    options = dict(Recorded.last)
    options["grid"] = options["grid"] // CASE.ranks * THERE
    options.pop("kernel").launch(**options)


def lose_a_rank(exchange: NvlinkExchange, inputs: Inputs) -> Inputs:
    exchange.heap.local, exchange.local_ranks = exchange.heap.local[:THERE], THERE
    parts = inputs.ids_WTK, inputs.weights_WTK, inputs.x_WTD, inputs.tokens_W
    ids, weights, x, tokens = (part[:THERE] for part in parts)
    return Inputs(ids_WTK=ids, weights_WTK=weights, x_WTD=x, tokens_W=tokens)


def given(inputs: Inputs) -> tuple[Any, ...]:
    return inputs.x_WTD, inputs.ids_WTK, inputs.weights_WTK, 2, inputs.tokens_W


def received(exchange: NvlinkExchange) -> Tensor:
    """The buffer of the push that was called last, as numbers of two bytes."""
    size = exchange.shape.token_capacity * exchange.shape.row_bytes
    at = exchange.layout.received + (exchange._calls["push"] - 1) % exchange.shape.buffers * size
    return exchange.heap.local[:, at : at + size].view(torch.bfloat16)


Called = tuple[Tensor, Any]
"""The result, and what else a replay writes to."""


def push(exchange: NvlinkExchange, inputs: Inputs, routed: Routed, *, quantise: bool) -> Called:
    exchange.push(inputs.x_WTD, routed, 2, inputs.tokens_W, quantise=quantise)
    return received(exchange), None


def dispatch(exchange: NvlinkExchange, inputs: Inputs, routed: Routed, *, quantise: bool) -> Called:
    _, written = exchange.dispatch(*given(inputs), quantise=quantise)
    return received(exchange), written


def gather(exchange: NvlinkExchange, inputs: Inputs, routed: Routed) -> Called:
    return exchange.combine_compact(inputs.x_WTD, routed, num_sms=2), None


def combine(exchange: NvlinkExchange, inputs: Inputs, routed: Routed) -> Called:
    rows = torch.zeros(
        exchange.local_ranks, exchange.shape.row_capacity, CASE.width, dtype=torch.bfloat16, device="cpu"
    )
    return exchange.combine(rows, routed, num_sms=2), rows


CALLS: dict[str, Callable[[NvlinkExchange, Inputs, Routed], Called]] = {
    "pull": lambda exchange, inputs, routed: (exchange.pull(inputs.x_WTD, routed, 2), None),
    "expert": lambda exchange, inputs, _: exchange.dispatch_expert(*given(inputs)),
    "small": lambda exchange, inputs, _: exchange.dispatch_small(*given(inputs)),
    "push": lambda *call: push(*call, quantise=False),
    "push fp8": lambda *call: push(*call, quantise=True),
    "dispatch": lambda *call: dispatch(*call, quantise=False),
    "dispatch fp8": lambda *call: dispatch(*call, quantise=True),
    "gather": gather,
    "combine": combine,
}


@pytest.fixture
def zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody writes holds numbers, as it may on a GPU."""
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr("imbrex.kernels.exchange.launches.FEW_SMS", 0)


@pytest.mark.parametrize("replayed", [False, True], ids=["first", "replay"])
@pytest.mark.parametrize("name", CALLS)
def test_what_a_rank_did_not_send_is_no_number(name: str, replayed: bool, zeros: None) -> None:
    exchange, inputs = make_exchange(CASE, load=Recorded, timeout=30.0), make_inputs(CASE)
    routed = route(CASE, exchange, inputs)
    exchange.check()
    exchange._status.timeout = 0.5
    if replayed:
        out, _written = CALLS[name](exchange, inputs, routed)
        exchange.check()
        assert not out[:THERE].isnan().any()
        replay()
        for _ in range(2):
            out.zero_()
            with pytest.raises(ExchangeError):
                exchange.check()
            replay()
            assert out[:THERE].isnan().all()
        return
    left = lose_a_rank(exchange, inputs)
    out, _ = CALLS[name](exchange, left, routed)
    with pytest.raises(
        ExchangeError, match=r"timed out, .*make a new one; if no rank died or came late.* in one stream"
    ):
        exchange.check()
    assert out[:THERE].isnan().all()


def after(exchange: NvlinkExchange, calls: int) -> None:
    """Of every kind so many calls are over, none of which has written any other flag."""
    for heap in exchange.heap.local:
        for words in (CONTROL.epoch, CONTROL.started):
            number = calls % 2**32 - 2**32 * (calls % 2**32 >= 2**31)
            heap[words.offset : words.offset + words.size].view(torch.int32).fill_(number)


@pytest.mark.parametrize("name", CALLS)
def test_a_flag_that_nobody_wrote_for_two_billion_calls_says_nothing(name: str, zeros: None) -> None:
    exchange, inputs = make_exchange(CASE, load=Recorded, timeout=0.5), make_inputs(CASE)
    routed = route(CASE, exchange, inputs)
    exchange.check()
    after(exchange, 2**31 + 5)
    out, _ = CALLS[name](exchange, lose_a_rank(exchange, inputs), routed)
    with pytest.raises(ExchangeError, match="timed out"):
        exchange.check()
    assert out[:THERE].isnan().all()


def test_numbers_of_calls_wrap() -> None:
    exchange = make_exchange(CASE, load=kernel.load, timeout=30.0)
    after(exchange, 2**32 - 2)
    for seed in range(3):
        check_exchange(replace(CASE, seed=seed), exchange)


@pytest.mark.parametrize("name", ["pull", "push", "gather", "combine"])
def test_a_call_behind_a_routing_that_failed_leaves_no_number(
    name: str, zeros: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds no tokens, and so may have nothing to wait for."""
    exchange, inputs = make_exchange(CASE, load=Recorded, timeout=0.5), make_inputs(CASE)
    left = lose_a_rank(exchange, inputs)
    routed = exchange.route(left.ids_WTK, left.weights_WTK, left.tokens_W)
    with pytest.raises(ExchangeError, match="timed out"):
        exchange.check()
    monkeypatch.setattr(exchange, "check", lambda: None)  # a graph asks nobody
    out, _ = CALLS[name](exchange, left, routed)
    assert out[:THERE].isnan().all()


@pytest.mark.parametrize(("file", "votes_itself"), [("gather.cu", 1), ("quantise.cuh", 0)])
def test_lanes_that_wait_for_a_barrier_go_on_together(file: str, votes_itself: int) -> None:
    """One may hear of a failure before the others, which would wait for it where they vote next. That is one
    interleaving of thousands, so the text is looked at."""
    text = (Path(jit.__file__).parent / "exchange" / file).read_text()
    assert len(re.findall(r"\bwait_stage\(", text)) == votes_itself
    assert "warp_wait_stage(" in text


def test_rows_that_a_peer_did_not_stage_are_no_numbers_beside_a_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulate(monkeypatch, None, blocks=4)
    case = Case(placement=contiguous(4, 2), tokens=(40, 31), choices=2, width=448, drop=0.0)
    exchange = make_exchange(case, load=kernel.load, timeout=0.5)
    forward = begin(case, 72, exchange, SHARED)
    rows, result = beside_silent(forward, 0, peer=1)
    with pytest.raises(ExchangeError, match="waiting for staged rows of rank 1"):
        exchange.check()
    assert rows.isnan().any(1).sum() > 10
    assert torch.equal(rows.isnan().all(1), result.isnan().all(1))
