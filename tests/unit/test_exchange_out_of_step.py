"""The exchange under an adversary, emulated: threads, warps, blocks and ranks that stop anywhere, and ranks
in different calls. A flag too early, a barrier or a credit left out gives other rows here."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from imbrex.kernels.exchange.exchange import Routed
from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.placement import from_slots
from tests.emulated import kernel
from tests.emulated.out_of_step import OutOfStep
from tests.emulated.scenario import (
    Case,
    check_dispatch,
    check_exchange,
    check_small,
    combined,
    compact_rows,
    make_exchange,
    make_inputs,
    make_plans,
    route,
    rows_at,
)

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
CASE = Case(placement=from_slots([[0, 1, 2], [3, 4, 5], [-1]], 6), tokens=(20, 0, 13), choices=2, width=64)
"""The second rank has no tokens and the third no experts, so each waits for nobody in some calls, and is held
back by credits alone."""
CALLS, SEEDS = 5, range(6)


@pytest.fixture
def unrest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.EmulatedKernel, "unrest", True)
    monkeypatch.setattr(kernel.EmulatedKernel, "seed", 0)


@pytest.mark.usefixtures("unrest")
def test_calls_under_an_adversary() -> None:
    exchange = make_exchange(CASE, load=kernel.load, timeout=30.0, route_blocks=2)
    for seed in range(3):
        check_exchange(replace(CASE, seed=seed), exchange, sms=1 + seed)


@pytest.mark.usefixtures("unrest")
def test_calls_in_one_kernel_under_an_adversary() -> None:
    exchange = make_exchange(CASE, load=kernel.load, timeout=30.0)
    for seed in range(3):
        case = replace(CASE, seed=seed)
        check_dispatch(case, exchange, sms=1 + seed)
        check_small(case, exchange, sms=2 + seed)
        check_small(case, exchange, sms=1 + seed, large=True)


def routed_case(case: Case = CASE) -> Routed:
    exchange = make_exchange(case, load=kernel.load, timeout=30.0)
    return route(case, exchange, make_inputs(case))


def tokens_of(call: int, rank: int, case: Case = CASE) -> Tensor:
    """bf16 [1, T, D], others in every call."""
    make = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(1, max(case.tokens), case.width, generator=make).bfloat16()


def count_of(rank: int) -> Tensor:
    return torch.tensor([CASE.tokens[rank]], dtype=torch.int32)


def inputs_of(call: int, case: Case = CASE) -> Any:
    return replace(make_inputs(case), x_WTD=torch.cat([tokens_of(call, rank, case) for rank in range(3)]))


def check_pushed(ranks: OutOfStep, views: dict[tuple[int, int], Tensor], seed: int) -> None:
    """Rows of a call are what was sent when it has ended, and still when the next one begins."""
    plans = make_plans(CASE, make_inputs(CASE))
    last = max(call for _, call in views)

    def look(rank: int, call: int, ended: bool) -> None:
        of = call if ended else call - 1
        if of >= 0:
            want = compact_rows(CASE, plans, inputs_of(of), rank)
            assert torch.equal(views[rank, of][0, : len(want)], want), (rank, of, ended)
            seen.append((rank, of))

    seen: list[tuple[int, int]] = []
    ranks.run(seed, look)
    assert len(seen) == 3 * (2 * last + 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_pushed_rows_last_until_the_next_push(seed: int) -> None:
    ranks, views = OutOfStep(CASE, routed_case()), {}
    for rank, exchange in enumerate(ranks.exchanges):
        for call in range(CALLS):
            given = ranks.keep(tokens_of(call, rank)), ranks.routed[rank], 1, ranks.keep(count_of(rank))
            lease = exchange.push(*given)
            views[rank, call] = lease.rows
    check_pushed(ranks, views, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_captured_push_waits_for_who_uses_its_buffer(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay takes the buffer of its capture again, also right after itself."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    ranks, views = OutOfStep(CASE, routed_case()), {}
    tokens = [torch.empty_like(tokens_of(0, rank)) for rank in range(3)]
    for rank, exchange in enumerate(ranks.exchanges):
        exchange.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
        lease = exchange.push(tokens[rank], ranks.routed[rank], 1, ranks.keep(count_of(rank)))
        for call in range(CALLS):
            views[rank, call] = lease.rows
            if call:
                ranks.replay(rank, 0)
    plans = make_plans(CASE, make_inputs(CASE))

    def look(rank: int, call: int, ended: bool) -> None:
        of = call if ended else call - 1
        if of >= 0:
            want = compact_rows(CASE, plans, inputs_of(of), rank)
            assert torch.equal(views[rank, of][0, : len(want)], want), (rank, of, ended)
        if not ended:
            tokens[rank].copy_(tokens_of(call, rank))

    ranks.run(seed, look)


def expert_rows(call: int, rank: int, plans: list[Any], case: Case = CASE) -> Tensor:
    """Rows of a rank's experts where every choice has its token."""
    x_WTD = inputs_of(call, case).x_WTD
    return rows_at(
        case,
        plans,
        rank,
        lambda source: x_WTD[source, : case.tokens[source], None].expand(-1, case.choices, -1),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_pulled_rows_are_those_of_their_call(seed: int) -> None:
    ranks, plans, outs = OutOfStep(CASE, routed_case()), make_plans(CASE, make_inputs(CASE)), {}
    for rank, exchange in enumerate(ranks.exchanges):
        for call in range(CALLS):
            outs[rank, call] = exchange.pull(ranks.keep(tokens_of(call, rank)), ranks.routed[rank], 1)
    ranks.run(seed)
    for (rank, call), rows in outs.items():
        want = expert_rows(call, rank, plans)
        filled = rows_at(
            CASE, plans, rank, lambda s: torch.ones(CASE.tokens[s], CASE.choices, dtype=torch.bool)
        )
        assert torch.equal(rows[0, : len(want)][filled], want[filled]), (rank, call)


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_are_those_of_their_call(seed: int) -> None:
    check_sums(CASE, CALLS, seed)


def test_sums_of_whole_rows_are_those_of_their_call() -> None:
    """More than 512 tokens: a warp tells of a piece while it sums the next one. They are the third rank's,
    which has nothing to reduce and so waits for every flag."""
    check_sums(replace(CASE, tokens=(13, 0, 530), width=256), 3, seed=0)


def check_sums(case: Case, calls: int, seed: int) -> None:
    ranks, plans, outs = OutOfStep(case, routed_case(case)), make_plans(case, make_inputs(case)), {}
    given = {(r, c): expert_rows(c, r, plans, case)[None] for r in range(3) for c in range(calls)}
    most = ranks.exchanges[0].shape.row_capacity
    for rank, exchange in enumerate(ranks.exchanges):
        for call in range(calls):
            rows = ranks.keep(torch.zeros(1, most, case.width, dtype=torch.bfloat16))
            rows[:, : given[rank, call].shape[1]] = given[rank, call]
            outs[rank, call] = exchange.combine(rows, ranks.routed[rank], num_sms=1, out_dtype=torch.float32)
    ranks.run(seed)
    for (rank, call), sums in outs.items():
        every = [given[r, call][0] for r in range(3)]
        want = combined(case, plans, inputs_of(call, case), every, weighted=True)[rank]
        assert torch.equal(sums[: case.tokens[rank]], want[: case.tokens[rank]]), (rank, call)


def test_sums_are_not_written_where_those_of_two_calls_before_may_be_read() -> None:
    """The rank without tokens goes on alone: a call ahead of the others it may be, two it waits."""
    ranks = OutOfStep(CASE, routed_case())
    most = ranks.exchanges[0].shape.row_capacity
    rows = [ranks.keep(torch.zeros(1, most, CASE.width, dtype=torch.bfloat16)) for _ in range(3)]
    for rank, exchange in enumerate(ranks.exchanges):
        ranks.keep(exchange.combine(rows[rank], ranks.routed[rank], num_sms=1))
    ranks.run(0)
    alone = ranks.exchanges[1]
    for group in alone._groups.values():
        group.timeout_ns = 10**9
    for ahead in (1, 2):
        ranks.keep(alone.combine(rows[1], ranks.routed[1], num_sms=1))
        ((variant, (grid, block, smem), _, given),) = ranks.launches[1]
        ranks.launches[1].clear()
        kernel.load(variant).launch(grid=grid, block=block, smem=smem, args=given)
        with pytest.raises(ExchangeError, match="timed out") if ahead == 2 else nullcontext():
            alone.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_gathered_sums_are_those_of_their_call(seed: int) -> None:
    """The caller writes them right before a call; every rank returns what it received."""
    ranks, plans, outs, views = OutOfStep(CASE, routed_case()), make_plans(CASE, make_inputs(CASE)), {}, {}
    for rank, exchange in enumerate(ranks.exchanges):
        for call in range(CALLS):
            views[rank, call] = exchange.reduced_rows(CASE.width)
            own = ranks.keep(tokens_of(call, rank))
            outs[rank, call] = exchange.combine_compact(own, ranks.routed[rank], num_sms=1)

    def write(rank: int, call: int, ended: bool) -> None:
        if not ended:
            rows = compact_rows(CASE, plans, inputs_of(call), rank)
            views[rank, call][0, : len(rows)] = rows

    ranks.run(seed, write)
    for (rank, call), sums in outs.items():
        times = (ranks.routed[rank].send_row_LTW[0, : CASE.tokens[rank]] >= 0).sum(1)
        want = (times[:, None] * tokens_of(call, rank)[0, : CASE.tokens[rank]].float()).bfloat16()
        assert torch.equal(sums[: CASE.tokens[rank]], want), (rank, call)
