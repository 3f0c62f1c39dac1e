"""Every schedule gives the numbers of `serial`, over every transport and codec, forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import imbrex
from imbrex import overlap
from imbrex.contracts import RowForm
from imbrex.experts.experts import Experts
from imbrex.overlap import SCHEDULERS, Kind, Order, Pipelined, Task
from imbrex.overlap.chunks import Backward, Forward
from imbrex.overlap.engine import execute
from imbrex.overlap.pipelined import split_by_source
from imbrex.placement import contiguous
from imbrex.schedule.tasks import tasks
from tests.ranks.layer_jobs import Case, run_layer
from tests.ranks.pool import Pool, RankError, Ranks
from tests.ranks.test_layer import SMALL, SPLIT_SLOTS, largest_error, relative

SCHEDULES = ["sequential-2", "stage-major-3", "optsche-3", "exact-4", "megatron", "fastermoe"]


@pytest.mark.parametrize("transport", ["alltoall", "allgather", "allreduce"])
@pytest.mark.parametrize(("expert_ranks", "tensor_ranks"), [(1, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_oracle(pool: Pool, schedule: str, transport: str, expert_ranks: int, tensor_ranks: int) -> None:
    options = {"transport": transport, "schedule": schedule}
    case = Case(config=SMALL, tensor_parallel=tensor_ranks, options=options)
    world = expert_ranks * tensor_ranks
    results = pool.run(world, run_layer, case)
    errors = largest_error(case, world, results)
    assert max(errors.values()) < 1e-5, errors


def differences(pool: Pool, world: int, schedule: Any, **case: Any) -> float:
    """The largest relative difference to `serial`, of outputs and all gradients."""
    options = case.pop("options", {"transport": "alltoall"})
    case = {"config": SMALL} | case
    plain = pool.run(world, run_layer, Case(**case, options=options))
    ours = pool.run(world, run_layer, Case(**case, options=options | {"schedule": schedule}))
    worst = 0.0
    for mine, theirs in zip(ours, plain, strict=True):
        pairs = [(mine[k], theirs[k]) for k in ("y", "x_grad")]
        pairs += [(mine["grads"][k], g) for k, g in theirs["grads"].items() if g is not None]
        worst = max(worst, *(relative(a, b) for a, b in pairs))
    return worst


@pytest.mark.parametrize("codec", ["int8", "bf16", "fp8", "zfp2d-8", {"dispatch": "int8", "combine": "fp16"}])
def test_codecs_round_at_the_same_points(pool: Pool, codec: Any) -> None:
    """The same tokens are rounded to the same bytes, whatever chunk they are in."""
    options = {"transport": "alltoall", "codec": codec}
    assert differences(pool, 4, "optsche-3", options=options) < 1e-5


def test_eight_ranks_more_chunks_than_tokens(pool: Pool) -> None:
    assert differences(pool, 8, "optsche-11", tokens=(5, 0, 3, 8)) < 1e-5
    assert differences(pool, 8, "fastermoe", tokens=(5, 0, 3, 8)) < 1e-5


def test_a_preset_is_options_of_a_layer(pool: Pool) -> None:
    """Tutel's: its degree found by prediction, over an all-to-all in two levels."""
    case = Case(config=SMALL, options=dict(overlap.PRESETS["tutel"]))
    errors = largest_error(case, 2, pool.run(2, run_layer, case))
    assert max(errors.values()) < 1e-5, errors
    for preset in overlap.PRESETS.values():
        assert overlap.make(preset["schedule"]).name == preset["schedule"]


def test_no_tokens_at_all(pool: Pool) -> None:
    assert differences(pool, 2, "optsche-2", tokens=(0,)) == 0


def test_shared_experts(pool: Pool) -> None:
    shared = imbrex.SharedExperts(intermediate_size=6, gated=True)
    config = imbrex.MoEConfig(hidden_size=7, intermediate_size=10, num_experts=6, top_k=2, shared=shared)
    assert differences(pool, 4, "optsche-2", config=config) < 1e-5


def test_replicas_and_bias(pool: Pool) -> None:
    """A chunk's choices may go to other replicas than the whole batch's; their sums are the same."""
    config = imbrex.MoEConfig(hidden_size=7, intermediate_size=10, num_experts=6, top_k=2, bias=True)
    case = Case(config=config, slots=SPLIT_SLOTS, options={"transport": "alltoall", "schedule": "optsche-3"})
    errors = largest_error(case, 4, pool.run(4, run_layer, case))
    assert max(errors.values()) < 1e-5, errors


def test_integers_are_exact(pool: Pool) -> None:
    """On integer-valued data no order of sums can differ: y is the serial one to the bit."""
    for schedule in ("optsche-3", "stage-major-2"):
        results = pool.run(4, run_integers, schedule)
        assert results == [True] * 4


def run_apart(ranks: Ranks) -> list[bool]:
    """After `experts` no parameter has a gradient yet; after `weights` all have."""
    exchange = imbrex.Exchange(contiguous(4, 2), 8, 2, group=ranks.group, transport="alltoall")
    experts = Experts(exchange.geometry.placement.local(ranks.rank), 8, 12, implementation="grouped")
    ids_TK = torch.tensor([[0, 2], [1, 3], [2, 1]])
    routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=torch.ones(3, 2))
    x_TD, parameters = torch.randn(3, 8), list(experts.parameters())
    with torch.no_grad():
        forward = Forward(exchange, experts, x_TD, routing, None, [3], keep=True, defer=True)
        execute(SCHEDULERS["sequential"](dict.fromkeys(tasks(1), 1.0)), forward)
        work = Backward(forward, torch.ones_like(x_TD), parameters, [True] * len(parameters))
        work.encode_out(0)
        pending: Any = work.move_out(0)
        work.decode_out(0, pending.finish())
        work.experts(0)
        before = [grad is None for grad in work.d_parameters]
        work.weights(0)
    return before + [grad is not None for grad in work.d_parameters]


def test_weight_gradients_wait_for_their_task(pool: Pool) -> None:
    assert pool.run(2, run_apart) == [[True] * 4] * 2


class Tied(torch.nn.Module):
    """Experts whose down projection is used once more: a part of its gradient comes with the rows, and the
    part of the grouped product later."""

    applies_weights, forms = False, (RowForm.ROWS,)

    def __init__(self) -> None:
        super().__init__()
        self.inner = Experts(tuple(range(4)), 8, 12, implementation="grouped", seed=3)

    def forward(self, dispatched: Any) -> torch.Tensor:
        return self.inner(dispatched) * (1 + self.inner.down_proj.sum())


def test_gradients_that_come_with_rows_and_later_are_added() -> None:
    exchange, experts = imbrex.Exchange(contiguous(4, 1), 8, 2), Tied()
    drawn = torch.Generator().manual_seed(5)
    x_TD = torch.randn(9, 8, generator=drawn)
    ids_TK = torch.rand(9, 4, generator=drawn).argsort(1)[:, :2]
    routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=torch.rand(9, 2, generator=drawn))
    found = []
    for schedule in ("serial", "optsche-2"):
        experts.zero_grad()
        overlap.make(schedule).run(x_TD, routing, exchange, experts, None).y_TD.square().sum().backward()
        found.append([parameter.grad for parameter in experts.parameters()])
    for serial, ours in zip(*found, strict=True):
        assert relative(ours, serial) < 1e-5


def run_integers(ranks: Ranks, schedule: str) -> bool:
    drawn = torch.Generator().manual_seed(ranks.rank)
    x_TD = torch.randint(-9, 9, (17, 8), generator=drawn).float()
    ids_TK = torch.rand(17, 6, generator=drawn).argsort(1)[:, :3]
    weights_TK = torch.randint(1, 5, (17, 3), generator=drawn).float()
    routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK)
    outputs = []
    for name in ("serial", schedule):
        exchange = imbrex.Exchange(contiguous(6, 4), 8, 3, group=ranks.group, transport="alltoall")
        experts = Double()
        x = x_TD.clone().requires_grad_()
        y_TD = overlap.make(name).run(x, routing, exchange, experts, None).y_TD
        y_TD.backward(torch.ones_like(y_TD))
        outputs.append((y_TD.detach(), x.grad))
        exchange.close()
    expected = x_TD * 2 * weights_TK.sum(1, keepdim=True)
    same = all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    return same and torch.equal(outputs[0][0], expected)


class Double:
    applies_weights = False
    forms = (RowForm.ROWS,)

    def parameters(self):
        return iter(())

    def __call__(self, dispatched: imbrex.Dispatched) -> torch.Tensor:
        return dispatched.rows_RD * 2


class Weighs:
    """Experts that apply the weights themselves, with a parameter."""

    applies_weights = True
    forms = (RowForm.ROWS,)

    def __init__(self) -> None:
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def parameters(self):
        return iter([self.scale])

    def __call__(self, dispatched: imbrex.Dispatched) -> torch.Tensor:
        return dispatched.rows_RD * self.scale * dispatched.handle.weights_R[:, None]


def run_weighing(ranks: Ranks, schedule: str) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(ranks.rank)
    x_TD = torch.randn(9, 4, generator=drawn).requires_grad_()
    weights_TK = torch.rand(9, 2, generator=drawn).requires_grad_()
    ids_TK = torch.rand(9, 4, generator=drawn).argsort(1)[:, :2]
    exchange = imbrex.Exchange(contiguous(4, 2), 4, 2, group=ranks.group, transport="alltoall")
    experts = Weighs()
    routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK)
    y_TD = overlap.make(schedule).run(x_TD, routing, exchange, experts, None).y_TD
    y_TD.square().sum().backward()
    grads = x_TD.grad, weights_TK.grad, experts.scale.grad
    return [y_TD.detach(), *(grad for grad in grads if grad is not None)]


class TwoShifts(torch.nn.Module):
    """Experts with two parameters that autograd gives one gradient, the same tensor."""

    applies_weights = False
    forms = (RowForm.ROWS,)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))

    def forward(self, dispatched: imbrex.Dispatched) -> torch.Tensor:
        return dispatched.rows_RD + (self.first + self.second)


def test_gradients_that_are_one_tensor_are_summed_apart() -> None:
    for schedule in ("serial", "optsche-3"):
        config = imbrex.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=4, top_k=2)
        experts = TwoShifts()
        moe = imbrex.MoELayer(config, schedule=schedule, experts=experts)
        # Gate weights of a token sum to one.
        for found in torch.autograd.grad(moe(torch.randn(7, 4)).sum(), [*experts.parameters()]):
            assert relative(found, torch.full((4,), 7.0)) < 1e-6


def test_experts_that_weigh(pool: Pool) -> None:
    for mine, theirs in zip(
        pool.run(2, run_weighing, "optsche-3"), pool.run(2, run_weighing, "serial"), strict=True
    ):
        assert len(mine) == 4
        assert max(relative(a, b) for a, b in zip(mine, theirs, strict=True)) < 1e-6


def reversed_moves(times) -> Order:
    found = SCHEDULERS["stage-major"](times)
    degree = len(found.moves) // 2
    moves = sorted(found.moves, key=lambda task: (task.kind, -task.chunk))
    return Order(compute=found.compute, moves=tuple(moves)) if degree > 1 else found


def missing(times) -> Order:
    found = SCHEDULERS["optsche"](times)
    return Order(compute=found.compute[:-1], moves=found.moves)


def cyclic(times) -> Order:
    """The first chunk is not encoded before the second is decoded, whose move waits for the first's."""
    found = SCHEDULERS["optsche"](times)
    first = Task(kind=Kind.encode_out, chunk=0)
    rest = [t for t in found.compute if t != first]
    return Order(compute=(*rest, first), moves=found.moves)


def breaking(times) -> Order:
    return times["nothing"]


def nothing(times) -> Any:
    return None


def run_disagreeing(ranks: Ranks, odd: Any, degree: int) -> str:
    degree += (degree > 5) * ranks.rank
    schedule = Pipelined(odd if ranks.rank == 1 else "optsche", degree, name="one or another")
    try:
        run_layer(ranks, Case(config=SMALL, options={"schedule": schedule}))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("odd", "degree", "on_it", "elsewhere"),
    [
        (
            reversed_moves,
            2,
            "rank 0 moves 2 chunks in another order",
            "rank 1 moves 2 chunks in another order",
        ),
        ("optsche", 6, "rank 0 moves 6 chunks", "rank 1 moves 7 chunks"),
        (missing, 2, "decode_back of chunk 1 is missing; 1 of 14", "rank 1 has an order that cannot run"),
        (cyclic, 2, "the order has a cycle", "rank 1 has an order that cannot run"),
        (breaking, 2, "one or another raised KeyError('nothing')", "rank 1 has an order that cannot run"),
        (nothing, 2, "one or another gave None; return an Order", "rank 1 has an order that cannot run"),
    ],
)
def test_ranks_that_disagree_hear_it_before_anything_moves(
    pool: Pool, odd: Any, degree: int, on_it: str, elsewhere: str
) -> None:
    found = pool.run(2, run_disagreeing, odd, degree)
    assert on_it in found[1]
    assert elsewhere in found[0]


def run_other_schedules(ranks: Ranks) -> None:
    imbrex.MoELayer(SMALL, ranks.group, schedule="optsche-2" if ranks.rank else "serial")


def test_another_schedule_on_one_rank_is_every_rank_s_error_when_the_layer_is_made(pool: Pool) -> None:
    with pytest.raises(RankError, match="ranks disagree about the schedule: rank 1 was given something else"):
        pool.run(2, run_other_schedules)


def test_one_rank_s_wrong_input_is_every_rank_s_error(pool: Pool) -> None:
    with pytest.raises(RankError, match="on rank 1, x has 2 dimensions and last size 5"):
        pool.run(2, run_wrong_width)


def run_wrong_width(ranks: Ranks) -> None:
    layer = imbrex.MoELayer(SMALL, ranks.group, schedule="optsche-2")
    layer(torch.randn(4, 5 if ranks.rank == 1 else SMALL.hidden_size))


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"'optimal' is not known; use one of serial, .*optsche, exact"):
        overlap.make("optimal")
    with pytest.raises(ValueError, match="'best' is not a scheduler; use one of sequential"):
        Pipelined("best")
    with pytest.raises(ValueError, match="'best' is not a scheduler"):
        overlap.Auto(scheduler="best")
    made: Any = overlap.make(reversed_moves)
    assert (made.name, made.degree) == ("reversed_moves-2", 2)
    made = overlap.make(partial(reversed_moves))
    assert made.orders() == Pipelined(reversed_moves, 2).orders()


def test_names_of_schedulers() -> None:
    for name, says in (("optsche", "is taken"), ("auto", "is taken"), ("best-4", "like a number of chunks")):
        with pytest.raises(ValueError, match=says):
            overlap.register(name, reversed_moves)
    try:
        overlap.register("mine", reversed_moves)
        assert overlap.make("mine-3").name == "mine-3"
    finally:
        SCHEDULERS.pop("mine")


def test_split_by_source() -> None:
    assert [split_by_source(7, 2, rank, 4) for rank in range(4)] == [[7, 0], [7, 0], [0, 7], [0, 7]]
    assert len(tasks(3)) == 21
