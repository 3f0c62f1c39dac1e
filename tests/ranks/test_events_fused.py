"""Events over NVLink that do without nobody: `fused`'s kernels, emulated; their bits, and who runs else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import imbrex
from imbrex.contracts import Output, RowForm
from imbrex.overlap import Events, Fused, Serial
from imbrex.placement import from_slots
from tests.emulated import kernel
from tests.ranks.layer_jobs import coefficients
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_fused import EXPERTS, Weighing, an_exchange, emulating, inputs_of
from tests.ranks.test_fused_moving import CONFIG, PLACES, Housed

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
FP8 = {"dispatch": "fp8", "combine_backward": "fp8"}


def gradients(output: Output, leaves: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients; a second backward is refused."""
    loss = (output.y_TD.float() * coefficients(output.y_TD)).sum()
    found = [output.y_TD, *torch.autograd.grad(loss, leaves, retain_graph=True)]
    with pytest.raises(RuntimeError, match="goes backward once; run its forward again"):
        torch.autograd.grad(loss, leaves)
    return found


def run_whole(ranks: Ranks, codec: dict[str, str], replicas: bool) -> dict[str, Any]:
    """Of a call without gradients and one with them: whether bits are those of fused and of serial, how many
    calls brought their rows and launches brought dx home, by fused and by events."""
    with pytest.MonkeyPatch.context() as patch:
        if codec:
            patch.setattr("tests.ranks.test_fused.WIDTH", 512)  # which that codec's kernels take
        place = from_slots(PLACES[0], EXPERTS) if replicas else None
        with an_exchange(ranks, place, **codec) as (exchange, launches):
            answers, brought, schedule = [], [], Events()
            for strategy in (Fused(), schedule, Serial()):
                x_TD, routing = inputs_of(ranks.rank, 31 + 9 * ranks.rank)
                experts = Housed(place.local(ranks.rank)) if place else Weighing(ranks.rank, train_down=True)
                call = x_TD, routing, exchange, experts, lambda x_TD=x_TD: 0.5 * x_TD
                with torch.no_grad():
                    first = strategy.run(*call).y_TD
                leaves = [x_TD, routing.weights_TK, *experts.parameters()]
                if isinstance(strategy, Serial):
                    y_TD = strategy.run(*call).y_TD
                    loss = (y_TD.float() * coefficients(y_TD)).sum()
                    answers.append([first, y_TD, *torch.autograd.grad(loss, leaves)])
                    continue
                output = strategy.run(*call)
                assert output.kept_TK is None
                answers.append([first, *gradients(output, leaves)])
                brought.append((experts.brought, len(launches)))
            exchange.check()
            reason = schedule.reason(exchange, experts)
    fused, ours, serial = answers
    return {
        "fused's": [torch.equal(a, b) for a, b in zip(ours, fused, strict=True)],
        "serial's": [torch.equal(a, b) for a, b in zip(ours, serial, strict=True)],
        "brought": brought,
        "reason": reason,
    }


@pytest.mark.parametrize(("codec", "replicas"), [({}, False), (FP8, False), ({}, True)])
def test_who_does_without_nobody_is_run_by_fused(pool: Pool, codec: dict[str, str], replicas: bool) -> None:
    """Tokens in fp8 and replicas too, which patience's kernels refuse."""
    for answer in pool.run(2, run_whole, codec, replicas):
        assert answer["fused's"] == answer["serial's"] == [True] * 6
        assert answer["brought"] == [(2, 1), (2, 2)]
        assert answer["reason"].startswith(
            "asked for; nobody may be missing, so as fused: rows come beside gate and up"
        )


def run_masked(ranks: Ranks) -> list[list[bool]]:
    """Whether a layer that is given a mask has the bits of serial, by events without and with patience."""
    answers: list[list[Any]] = []
    for schedule in (Serial(), Events(), Events(math.inf, 1)):
        with emulating(ranks) as (nvlink, _):
            torch.manual_seed(1)
            slots = from_slots([[0, 1, 2, 3], [4, 5, 6, 7]], 8)
            layer = imbrex.MoELayer(
                *(CONFIG, ranks.group),
                placement=slots,
                transport=nvlink,
                schedule=schedule,
                experts=Housed(slots.local(ranks.rank)),
                dtype=torch.bfloat16,
            )
            x_TD = inputs_of(ranks.rank, 20 + 9 * ranks.rank)[0]
            kept_TK = torch.rand(len(x_TD), 2, generator=torch.Generator().manual_seed(ranks.rank)) < 0.7
            y_TD = layer(x_TD, kept_TK=kept_TK)
            (y_TD.float() * coefficients(y_TD)).sum().backward()
            assert layer.routing is not None
            assert layer.routing.kept_TK is not None
            assert torch.equal(layer.routing.kept_TK, kept_TK)
            answers.append([y_TD, *(leaf.grad for leaf in (x_TD, *layer.parameters()))])
            layer.check(synchronize=True)
    truth, *others = answers
    return [[torch.equal(a, b) for a, b in zip(other, truth, strict=True)] for other in others]


def test_a_mask_gives_the_bits_of_serial(pool: Pool) -> None:
    assert pool.run(2, run_masked) == [[[True] * 5] * 2] * 2


def run_unlike(ranks: Ranks) -> tuple[list[bool], str]:
    """Whether the bits are those of serial where rank 1's experts cannot bring their rows, and what runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMBREX_TIMEOUT_S", "5")
        with an_exchange(ranks) as (exchange, _):
            answers, schedule = [], Events()
            for strategy in (Serial(), schedule):
                x_TD, routing = inputs_of(ranks.rank, 9)
                experts: Any = Weighing(ranks.rank, train_down=True)
                if ranks.rank == 1:
                    experts.forms = (RowForm.ROWS,)
                y_TD = strategy.run(x_TD, routing, exchange, experts, None).y_TD
                loss = (y_TD.float() * coefficients(y_TD)).sum()
                leaves = [x_TD, routing.weights_TK, *experts.parameters()]
                answers.append([y_TD, *torch.autograd.grad(loss, leaves)])
            reason = schedule.reason(exchange, experts)
    return [torch.equal(a, b) for a, b in zip(*answers, strict=True)], reason


def test_ranks_whose_experts_are_unlike_run_serially(pool: Pool) -> None:
    for same, reason in pool.run(2, run_unlike):
        assert same == [True] * 5
        assert reason.endswith("as fused: runs serially: the experts of some ranks cannot bring their rows, "
                               "those of others can")  # fmt: skip


def run_at_odds(ranks: Ranks, schedules: list[Events], codec: dict[str, str]) -> list[str]:
    """The errors of two calls of ranks whose patience is not the same."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.ranks.test_fused.WIDTH", 512)
        with an_exchange(ranks, None, **codec) as (exchange, _):
            for _ in range(2):
                call = *inputs_of(ranks.rank, 9), exchange, Weighing(ranks.rank, train_down=True), None
                with pytest.raises(ValueError, match="events") as caught:
                    schedules[ranks.rank].run(*call)
                said.append(str(caught.value))
    return said


@pytest.mark.parametrize(
    ("theirs", "what"),
    [
        (Events(math.inf, 1), "epsilon"),
        (Events(0.5, 1), "tau"),
        (Events(0.5), "tau"),
        (Events(every=3), "every"),
        (Events(every=1 << 70), "every"),
        (Events(budget=0.5), "budget"),
    ],
)
def test_other_patience_is_every_ranks_sentence(pool: Pool, theirs: Events, what: str) -> None:
    for said in pool.run(2, run_at_odds, [Events(), theirs], {}):
        for sentence in said:
            assert sentence.startswith(
                f"schedule: events: ranks disagree about {what}: rank 1 was given some"
            )


def test_a_rank_whose_patience_cannot_be_served(pool: Pool) -> None:
    """Its peer, which has none, could be."""
    other, own = pool.run(2, run_at_odds, [Events(), Events(1.0, 1)], {"dispatch": "fp8"})
    assert other == ["schedule: events: rank 1 cannot be served; its own error says why"] * 2
    assert all(
        said.startswith("schedule: patient events over nvlink move tokens as they are") for said in own
    )
