"""Bytes of the fullest rank, by hand; and plans that do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imbrex.exchange import nvlink_fit
from imbrex.simulate.loads import Spread
from imbrex.simulate.memory import (
    SPARED,
    SPARED_BY_ALL,
    memory_of,
    memory_of_experts,
    memory_of_rows,
    most_rows,
)
from imbrex.simulate.plans import choose, weigh
from imbrex.simulate.request import Request
from imbrex.simulate.run import FEW_FUSED, Layout
from imbrex.simulate.story import lines
from tests.unit.test_simulate_plans import DEEPSEEK, QWEN, world


def test_memory_is_the_fullest_rank_s() -> None:
    """By Zipf's law an eighth of all choices fall on one expert: its rank keeps 16 times the mean's rows."""
    request = Request(shape=DEEPSEEK, ranks=128, tokens=4096, mode="train", layers=58)
    skewed = world(128, 8, spread=Spread.parse("zipf:1"))
    layout = Layout(ep=128, transport="alltoall")
    even, uneven = (weigh(request, of, layout, {}) for of in (world(128, 8), skewed))
    assert even.outcome
    assert uneven.imbalance == pytest.approx(15, abs=0.5)
    assert even.memory == pytest.approx(memory_of(request, world(128, 8), layout, 1 + even.imbalance))
    kept, at_work = 58 * (7168 + 3 * 2048), 2 * 7168 + 3 * 2048
    more = (uneven.imbalance - even.imbalance) * 4096 * 8 * 2 * (kept + at_work)
    assert uneven.memory - even.memory == pytest.approx(more, rel=2e-3)
    assert "GB a rank, which has 141" in str(uneven.why_not)


def test_over_nvlink_there_is_room_for_all_rows_that_could_come() -> None:
    """8 ranks of 16 experts, 4096 tokens with 8 choices: all of them could want one rank. A training's host
    asks how many do, in one chunk and by kernels that are not fused, where that spares 200 MiB in a layer or
    1 GiB in all."""
    request = Request(shape=QWEN, ranks=8, tokens=4096, mode="train", layers=48)
    eight = world(8, 8)
    layout = Layout(ep=8, transport="nvlink")
    coming, most = 4096 * 8, 8 * 4096 * 8
    forward = replace(request, mode="forward")
    few = replace(request, tokens=256)
    fewer = replace(request, tokens=400)  # 46 MB a layer
    assert most_rows(fewer, eight, layout) == 400 * 8
    assert most_rows(replace(fewer, layers=11), eight, layout) == 8 * 400 * 8
    assert most_rows(request, eight, layout, 1.5) == 1.5 * coming
    assert most_rows(forward, eight, layout, 1.5) == most
    assert most_rows(few, eight, layout) == most / 16  # 29 MB
    for schedule in ("fused", "optsche-1", "optsche-2"):
        assert most_rows(request, eight, replace(layout, schedule=schedule)) == most
    assert most_rows(request, eight, replace(layout, transport="alltoall", schedule="optsche-2")) == coming
    narrow = replace(QWEN, experts=32)
    assert most_rows(replace(forward, shape=narrow), eight, layout) == most / 2
    assert most_rows(replace(forward, shape=narrow), eight, replace(layout, replicas=8)) == most * 5 / 8
    more = memory_of(forward, eight, layout) - memory_of(
        forward, eight, replace(layout, transport="alltoall")
    )
    assert more > (most - coming) * 2048 * 2


def test_of_few_tokens_no_host_asks() -> None:
    """One kernel routes and moves them: 16 ranks of 256 tokens have room for 470 MB of rows a layer."""
    request = Request(shape=DEEPSEEK, ranks=16, tokens=256, mode="train", layers=58)
    layout, node = Layout(ep=16, transport="nvlink"), world(16, 16)
    assert most_rows(request, node, layout) == 16 * 256 * 8
    assert most_rows(replace(request, tokens=257), node, layout) == 257 * 8
    theirs = nvlink_fit.SPARED, nvlink_fit.SPARED_BY_ALL, nvlink_fit.FEW_TOKENS
    assert theirs == (SPARED, SPARED_BY_ALL, FEW_FUSED)


def test_two_tiers_have_room_for_all_rows_of_a_pool() -> None:
    """Two nodes of eight: where all tokens of one want the other, a rank's pool is 8192 tokens, and all
    choices of eight pools could fall on one rank. In one chunk of a training the host asks, in more never."""
    request = Request(shape=QWEN, ranks=16, tokens=4096, mode="train", layers=48)
    layout, nodes = Layout(ep=16, transport="tiered", schedule="optsche-2"), world(16, 8)
    assert most_rows(request, nodes, layout, 4.0) == 8 * 8192 * 8
    assert most_rows(request, nodes, replace(layout, schedule="serial"), 4.0) == 4.0 * 4096 * 8
    assert most_rows(request, world(64, 32), replace(layout, ep=64)) == 4096 * 8  # by bytes inside
    even, uneven = (most_rows(request, nodes, layout, fullest) for fullest in (1.0, 4.0))
    assert even == pytest.approx(uneven, rel=2e-3)  # nearly all tokens want both nodes anyway
    heap = 17 * 8192 * 2048 * 2
    forward = replace(request, mode="forward")
    by_rows = most_rows(forward, nodes, layout, 4.0) * (2 * 2048 + 3 * 768) * 2
    assert memory_of_rows(forward, nodes, layout, 4.0) == pytest.approx(by_rows + heap)


def test_a_rank_with_an_expert_more_decides() -> None:
    """Of 256 experts on 7 ranks four have 37."""
    request = Request(shape=DEEPSEEK, ranks=7, tokens=1, mode="forward")
    assert memory_of_experts(request, Layout(ep=7)) == 37 * 3 * 7168 * 2048 * 2


def test_what_does_not_fit_is_refused_by_its_bytes() -> None:
    request = Request(shape=DEEPSEEK, ranks=64, tokens=4096, mode="train", layers=58)
    (first, *_) = plans = choose(request, world(64, 8))
    assert {plan.outcome for plan in plans} == {None}
    assert "GB a rank, which has 141" in str(first.why_not)
    weights = 3 * 256 * 7168 * 2048 * 58 / 64 * 16
    assert memory_of(request, world(64, 8), first.layout) > weights
    forward = Request(shape=DEEPSEEK, ranks=64, tokens=4096, mode="forward", layers=58)
    assert choose(forward, world(64, 8))[0].outcome


def test_what_does_not_fit_says_whether_experts_or_rows_are_too_many() -> None:
    for tokens, mended in ((4096, "fewer layers"), (10**9, "fewer tokens")):
        request = Request(shape=DEEPSEEK, ranks=8, tokens=tokens, mode="forward", layers=58)
        (first, *_) = lines(choose(request, world(8, 8)), request, world(8, 8))
        assert first.startswith("nothing fits")
        assert mended in first
