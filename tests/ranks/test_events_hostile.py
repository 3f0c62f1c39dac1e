"""Events where something is wrong: ranks that die while they go backward, that are slow together, and calls
that cannot be."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import imbrex
from imbrex.overlap import Events, Serial
from imbrex.overlap.events.forward import Forward
from imbrex.overlap.events.ledger import Kind
from imbrex.router.capacity import Capacity
from imbrex.transport import RankLostError
from tests.emulated import kernel
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.layer_jobs import Case, make_layer
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_layer import SMALL, SPLIT_SLOTS

DEAD, SOON_S, SLEEP_S = 3, 20.0, 0.3


class GoneError(Exception):
    """A rank's last word."""


def run_death(ranks: Ranks, last_kind: Kind, sent: int, epsilon: int) -> list[str]:
    """What a rank is told of its backward and of the call that follows, where rank 3 leaves once it has sent
    so many messages of a kind."""
    schedule = Events(10 * SOON_S, epsilon)
    layer = make_layer(
        Case(config=SMALL, options={"transport": "alltoall", "schedule": schedule}), ranks.group
    )
    x_TD, post, kinds = torch.randn(5, SMALL.hidden_size, requires_grad=True), Forward.post, list[Kind]()
    y_TD = layer(x_TD)
    seat: Any = next(iter(schedule._seats.values()))
    seat.timeout_s = 10 * SOON_S
    # Who is slow in the forward would hear of the death there.
    dist.barrier(ranks.group)

    def post_and_die(self: Any, peer: int, kind: Kind, *rest: Any) -> None:
        if ranks.rank == DEAD and kind is last_kind and kinds.count(kind) == sent:
            seat.mail.close()
            raise GoneError
        kinds.append(kind)
        post(self, peer, kind, *rest)

    said, began = [], time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forward, "post", post_and_die)
        for call in (lambda: y_TD.sum().backward(), lambda: layer(x_TD.detach())):
            try:
                call()
                said.append("")
            except (RankLostError, GoneError) as error:
                said.append(str(error))
            if ranks.rank == DEAD:
                break
    assert time.monotonic() - began < SOON_S
    dist.barrier(ranks.group)
    return said


@pytest.mark.parametrize(
    ("last_kind", "sent", "epsilon", "whole"),
    [
        (Kind.GRADIENT, 0, 0, []),
        (Kind.GRADIENT, 1, 1, []),
        (Kind.GRADIENT_BACK, 0, 1, []),
        (Kind.GRADIENT_BACK, 2, 1, [0, 1]),
    ],
)
def test_who_dies_in_a_backward_is_named_at_once(
    pool: Pool, last_kind: Kind, sent: int, epsilon: int, whole: list[int]
) -> None:
    """However patient the others are. Those that had heard all from it may have gone back whole, and hear of
    it in the next call."""
    *others, _ = pool.run(4, run_death, last_kind, sent, epsilon)
    for rank, (backward, following) in enumerate(others):
        assert "rank 3" in following, others
        assert "rank 3" in backward or (rank in whole and not backward), others


def run_slow_together(ranks: Ranks) -> tuple[float, float]:
    """When a rank begins its second call, and when it leaves it; ranks 2 and 3 begin late."""
    options = {"transport": "alltoall", "schedule": Events(0.0, 1)}
    layer = make_layer(Case(config=SMALL, options=options), ranks.group)
    x_TD = torch.randn(5, SMALL.hidden_size)
    with torch.no_grad():
        layer(x_TD)
        dist.barrier(ranks.group)
        time.sleep(SLEEP_S if ranks.rank >= 2 else 0.0)
        began = time.monotonic()
        layer(x_TD)
        left = time.monotonic()
    dist.barrier(ranks.group)
    return began, left


def test_patience_is_not_for_more_than_epsilon_who_are_slow_together(pool: Pool) -> None:
    """A tau of 0 counts from when one of two is there."""
    (_, left_0), (_, left_1), (began_2, _), (began_3, _) = pool.run(4, run_slow_together)
    assert min(left_0, left_1) > min(began_2, began_3)


def run_twice_back(ranks: Ranks) -> str:
    layer = make_layer(
        Case(config=SMALL, options={"transport": "alltoall", "schedule": Events()}), ranks.group
    )
    y_TD = layer(torch.randn(5, SMALL.hidden_size, requires_grad=True))
    y_TD.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError) as caught:
        y_TD.sum().backward()
    return str(caught.value)


def test_a_call_goes_backward_once(pool: Pool) -> None:
    for said in pool.run(4, run_twice_back):
        assert said == "a layer that runs by events goes backward once; run its forward again"


def run_swapped(ranks: Ranks, schedules: list[Any], over_nvlink: bool) -> list[str]:
    """The errors of a layer's calls by one schedule after the other, where rank 1's input of the third is
    wrong."""
    over = EmulatedNvlink(ranks.group, timeout=SOON_S) if over_nvlink else "alltoall"
    config = replace(SMALL, hidden_size=64) if over_nvlink else SMALL
    options = {"transport": over, "timeout": SOON_S, "schedule": schedules[0]}
    case = Case(config=config, options=options, dtype=torch.bfloat16 if over_nvlink else torch.float32)
    layer, said = make_layer(case, ranks.group), []
    for turn, schedule in enumerate(schedules):
        layer.strategy = schedule
        width = config.hidden_size - (turn == 2 and ranks.rank == 1)
        try:
            with torch.no_grad():
                layer(torch.randn(5, width, dtype=case.dtype))
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(
    ("schedules", "over_nvlink"),
    [
        ([Events(20.0, 1), Serial(), Serial(), Serial()], False),
        ([Events(20.0, 1), Events(20.0, 2), Events(20.0, 1), Events(20.0, 2)], False),
        pytest.param(
            [Events(20.0, 1), Events(), Events(), Serial()],
            True,
            marks=pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++"),
        ),
    ],
)
def test_a_schedule_that_was_replaced_tells_nobody(
    pool: Pool, schedules: list[Any], over_nvlink: bool
) -> None:
    """A wrong input is told as the ranks' present schedule hears it."""
    for first, second, wrong, after in pool.run(4, run_swapped, schedules, over_nvlink):
        assert first == second == after == ""
        assert wrong.startswith("dispatch: ")
        assert "rank 1" in wrong


def run_refused(ranks: Ranks, gate: Any, slots: Any) -> str:
    options = {"transport": "alltoall", "schedule": Events(0.5, 1)}
    case = Case(config=replace(SMALL, gate=gate), slots=slots, options=options)
    layer = make_layer(case, ranks.group)
    with pytest.raises(ValueError, match="schedule") as caught:
        layer(torch.randn(5, SMALL.hidden_size))
    return str(caught.value)


@pytest.mark.parametrize(
    ("gate", "slots", "sentence"),
    [
        (imbrex.Gate(capacity=Capacity(factor=2.0, pad=True)), None, "padding wants the tokens"),
        (SMALL.gate, SPLIT_SLOTS, "events choose no replicas"),
    ],
)
def test_what_wants_all_ranks_is_refused_on_every_rank(
    pool: Pool, gate: Any, slots: Any, sentence: str
) -> None:
    answers = pool.run(4, run_refused, gate, slots)
    assert all(said.startswith(f"schedule: {sentence}") for said in answers), answers
