"""schedule='fused' from call to call: experts move, with serial's bits, and an input is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import imbrex
from imbrex.balancer import OnlineBalancer
from imbrex.contracts import Roles
from imbrex.overlap import Fused, Serial
from imbrex.placement import from_slots
from tests.emulated import kernel
from tests.ranks.balancer_jobs import EAGER, first_slots
from tests.ranks.layer_jobs import coefficients
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_fused import CHOICES, EXPERTS, INNER, WIDTH, Weighing, an_exchange, emulating, inputs_of

pytestmark = [
    pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++"),
    pytest.mark.untraced,
]
PLACES = [[0, 1, 2], [2, 3, 0]], [[3, 2, -1], [0, 1, 3]]


class Housed(Weighing):
    """Experts whose weights are those of the slots that they live in: a replica's are its original's."""

    def __init__(self, slots: tuple[int, ...]) -> None:
        super().__init__(0, train_down=True)
        self.expert_ids = slots
        shapes = {"gate_up": (2 * INNER, WIDTH), "down": (WIDTH, INNER)}
        drawn = {e: torch.Generator().manual_seed(100 + e) for e in slots}
        for name, shape in shapes.items():
            parts = [torch.randn(shape, generator=drawn[e]).bfloat16() / 8 for e in slots]
            setattr(self, name, torch.nn.Parameter(torch.stack(parts)))


def run_moved(ranks: Ranks, split: str) -> list[bool]:
    """Whether y and all gradients are serial's: before a move, and, with the weights of the new slots, after
    one that comes between a forward and its backward."""
    before, after = (from_slots(slots, EXPERTS) for slots in PLACES)
    answers = []
    with an_exchange(ranks, placement=before, split=split) as (exchange, launches):
        for strategy in (Serial(), Fused()):
            exchange.relocate(before)
            waiting, found = [], []
            for turn, place in enumerate((before, after, before)):
                x_TD, routing = inputs_of(ranks.rank, 31 + 9 * ranks.rank)
                experts = Housed(place.local(ranks.rank))
                y_TD = strategy.run(x_TD, routing, exchange, experts, None).y_TD
                loss = (y_TD.float() * coefficients(y_TD)).sum()
                waiting.append((loss, [x_TD, routing.weights_TK, *experts.parameters()]))
                exchange.relocate((after, before, before)[turn])
                found.append(y_TD)
            for loss, leaves in waiting:
                found += torch.autograd.grad(loss, leaves)
            answers.append(found)
        exchange.check()
        assert len(launches) == 3  # of fused: dx home beside the weights' gradients
    return [torch.equal(a, b) for a, b in zip(*answers, strict=True)]


@pytest.mark.parametrize("split", ["balanced", "nearest"])
def test_experts_move_between_calls(pool: Pool, split: str) -> None:
    for same in pool.run(2, run_moved, split):
        assert same == [True] * 15


CONFIG = imbrex.MoEConfig(hidden_size=WIDTH, intermediate_size=INNER, num_experts=8, top_k=CHOICES)
TURNS, TRAINED = 5, 4


def run_balanced(ranks: Ranks) -> tuple[float, int, list[bool], str]:
    """Outputs of training steps while a balancer moves experts, and of inference behind them, of serial and
    of fused: how many experts moved, how many launches brought dx home, whether the bits are the same."""
    answers, moved, launched, reason = [], 0.0, 0, ""
    direction = torch.randn(WIDTH, generator=torch.Generator().manual_seed(2))
    for schedule in ("serial", "fused"):
        with emulating(ranks) as (nvlink, launches):
            torch.manual_seed(1)
            balancer, place = OnlineBalancer(EAGER, timeout=20), from_slots(first_slots(2, 8), 8)
            layer = imbrex.MoELayer(
                *(CONFIG, ranks.group),
                placement=place,
                transport=nvlink,
                schedule=schedule,
                experts=Housed(place.local(ranks.rank)),
                balancer=balancer,
                dtype=torch.bfloat16,
            )
            with torch.no_grad():  # the popular experts are 1 and 2, later 5 and 6: of one rank
                for expert, sign in ((1, 1), (2, 1), (5, -1), (6, -1)):
                    layer.gate.weight[expert] += sign * direction / 16
            optimizer = balancer.optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3, momentum=0.9)
            found: list[Tensor] = []
            for turn in range(TURNS):
                layer.train(turn < TRAINED)
                make = torch.Generator().manual_seed(10 * turn + ranks.rank)
                x_TD = torch.randn(20 + 9 * ranks.rank, WIDTH, generator=make)
                x_TD = (x_TD + (direction if turn < 2 else -direction)).bfloat16()
                with torch.set_grad_enabled(layer.training):
                    y_TD = layer(x_TD)
                found.append(y_TD.detach())
                if layer.training:
                    (y_TD.float() ** 2).mean().backward()
                    imbrex.sync_gradients(layer)
                    optimizer.step()
                    optimizer.zero_grad()
                    balancer.step()
            layer.check(synchronize=True)
            moved, launched = balancer.tally.values["switches"], len(launches)
            reason = layer.reasons["schedule"]
            balancer.close()
            answers.append(found)
    return moved, launched, [torch.equal(a, b) for a, b in zip(*answers, strict=True)], reason


def test_a_balancer_moves_experts_in_training(pool: Pool) -> None:
    for moved, launched, same, reason in pool.run(2, run_balanced):
        assert moved >= 2
        assert launched == TRAINED
        assert same == [True] * TURNS
        assert reason.startswith("fused: asked for")


def run_wrong(ranks: Ranks, roles: Roles | None) -> tuple[list[str], bool]:
    """What calls say whose input is wrong on rank 1, the first and one behind a good one; whether the last
    one's output is that of the good one."""
    said, good = [], []
    with emulating(ranks) as (nvlink, _):
        place = from_slots(first_slots(2, 8), 8)
        layer = imbrex.MoELayer(
            *(CONFIG, ranks.group),
            placement=place,
            transport=nvlink,
            schedule=Fused(roles),
            experts=Housed(place.local(ranks.rank)),
            dtype=torch.bfloat16,
        )
        x_TD = inputs_of(ranks.rank, 20)[0].detach()
        for wrong in (True, False, True, False):
            try:
                good.append(layer(x_TD[:, 8:] if wrong and ranks.rank == 1 else x_TD))
            except ValueError as error:
                said.append(str(error))
    return said, torch.equal(*good)


@pytest.mark.parametrize("roles", [None, Roles(dy=0)])
def test_a_wrong_input_is_every_ranks_error_and_the_next_call_is_fine(
    pool: Pool, roles: Roles | None
) -> None:
    (first, same), (second, _) = pool.run(2, run_wrong, roles)
    assert first == ["dispatch: rank 1 was given tokens that cannot be dispatched"] * 2
    assert len(second) == 2
    assert all("on rank 1, x has 2 dimensions" in said for said in second), second
    assert same
