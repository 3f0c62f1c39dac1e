"""Loops of ranks whose loaders end at different steps, or break, end on all of them together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import imbrex
from imbrex.parallel.batches import even, in_step
from tests.ranks.pool import Pool, Ranks

CONFIG = imbrex.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=4, top_k=2)


def loader(number: int, wrong: bool) -> Iterator[torch.Tensor]:
    yield from (torch.full((2, 4), float(step)) for step in range(number))
    if wrong:
        raise OSError("no such shard")


def run_uneven(ranks: Ranks, numbers: list[int], wrong_rank: int) -> tuple[int, list[str], str]:
    """How many steps a rank makes, what it is warned of, and the error that ends its loop."""
    layer, steps, said = imbrex.MoELayer(CONFIG, ranks.group), 0, ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for x in even(loader(numbers[ranks.rank], ranks.rank == wrong_rank), ranks.group):
                layer(x).sum().backward()
                steps += 1
        except (OSError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
    layer(torch.ones(1, 4))  # nobody is left behind
    return steps, [str(warning.message) for warning in caught if "even" in str(warning.message)], said


@pytest.mark.parametrize(
    ("numbers", "who"), [([3, 2], "rank 1 had 2 batches"), ([0, 1], "rank 0 had 0"), ([2, 2], "")]
)
def test_loops_end_with_the_shortest_on_every_rank(pool: Pool, numbers: list[int], who: str) -> None:
    for steps, warned, said in pool.run(2, run_uneven, numbers, -1):
        assert (steps, said, len(warned)) == (min(numbers), "", bool(who))
        assert not who or warned[0].startswith(f"even: {who}")
        assert not who or "drop_last=True" in warned[0]


def test_a_loader_that_raises_ends_every_loop(pool: Pool) -> None:
    (steps, _, theirs), (_, _, own) = pool.run(2, run_uneven, [3, 2], 1)
    assert steps == 2
    assert own == "OSError: no such shard"
    assert theirs == "ValueError: even: on rank 1, the loader raised OSError('no such shard')"


def run_without_batches(ranks: Ranks) -> str:
    wrong: Any = 3 if ranks.rank == 1 else [torch.ones(1, 4)]
    with pytest.raises((TypeError, ValueError)) as caught:
        list(even(wrong, ranks.group))
    return f"{caught.type.__name__}: {caught.value}"


def test_what_is_no_loader_ends_every_loop(pool: Pool) -> None:
    theirs, own = pool.run(2, run_without_batches)
    assert own == "TypeError: 'int' object is not iterable"
    assert theirs.startswith("ValueError: even: on rank 1, the loader raised TypeError")
    wrong: Any = "WORLD"
    with pytest.raises(ValueError, match=r"even: group is .WORLD.; give a process group"):
        list(even([], wrong))


def test_one_process_has_all_batches() -> None:
    assert len(list(even(loader(3, wrong=False), None))) == 3


def run_dry(ranks: Ranks, schedule: str) -> bool:
    """A rank without batches goes on without tokens: whether all gradients are finite, and come."""
    losses = imbrex.AuxLosses(load_balance=0.01, z=0.01)
    layer = imbrex.MoELayer(CONFIG, ranks.group, losses=losses, schedule=schedule)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), layer)
    x = torch.randn(5, 4)
    loss = model(x).square().mean() if ranks.rank == 0 else model(x[:0]).sum()
    (loss + imbrex.aux_loss(model)).backward()
    imbrex.sync_gradients(model)
    return all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("schedule", ["serial", "optsche-2"])
def test_a_rank_may_go_on_without_tokens(pool: Pool, schedule: str) -> None:
    assert all(pool.run(2, run_dry, schedule))


def evaluate(ranks: Ranks, numbers: list[int], how: str) -> tuple[bool, str]:
    """Whether outputs of unequally many batches are those of one process; and the error of a rank that has
    one in its loop, which stops nobody."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), imbrex.MoELayer(CONFIG, ranks.group)).eval()
    batches = [torch.full((1 + ranks.rank, 4), float(n)) for n in range(numbers[ranks.rank])]
    expected, outputs, said = [], [], ""
    with torch.no_grad():
        for n in range(max(numbers)):  # what all ranks call together
            expected.append(model(torch.full((1 + ranks.rank, 4), float(n))))
        try:
            with in_step(model):
                for x in batches:
                    outputs.append(model(x))
                if how == "raises" and ranks.rank == 1:
                    raise KeyError("no such label")
                if how == "trains" and ranks.rank == 1:
                    model.train()(torch.ones(1, 4))
        except (KeyError, ValueError) as error:
            said = str(error)
    return all(torch.equal(*pair) for pair in zip(outputs, expected, strict=False)), said


@pytest.mark.parametrize("numbers", [[3, 1], [0, 2], [0, 0]])
def test_ranks_evaluate_as_many_batches_as_they_have(pool: Pool, numbers: list[int]) -> None:
    assert pool.run(2, evaluate, numbers, "") == [(True, "")] * 2


@pytest.mark.parametrize(
    ("how", "said"), [("raises", "'no such label'"), ("trains", "this model is training")]
)
def test_a_rank_that_fails_in_its_loop_helps_the_others(pool: Pool, how: str, said: str) -> None:
    (first, nothing), (second, told) = pool.run(2, evaluate, [3, 1], how)
    assert (first, second, nothing) == (True, True, "")
    assert said in told


def evaluate_mixed(ranks: Ranks) -> list[torch.dtype]:
    """Calls under autocast inside of the context, more of them on rank 0."""
    model, dtypes = imbrex.MoELayer(CONFIG, ranks.group).eval(), []
    with torch.no_grad(), in_step(model):
        for _ in range(2 - ranks.rank):
            with torch.autocast("cpu", torch.bfloat16):
                dtypes.append(model(torch.ones(1, 4)).dtype)
    return dtypes


def test_who_helps_does_so_under_the_autocast_of_the_call(pool: Pool) -> None:
    assert pool.run(2, evaluate_mixed) == [[torch.bfloat16] * 2, [torch.bfloat16]]


def enter_wrapped(ranks: Ranks, how: str) -> str:
    layer = imbrex.MoELayer(CONFIG, ranks.group)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), layer)
    if how == "ddp":
        imbrex.ignore_in_ddp(model)
        model = DistributedDataParallel(model, process_group=ranks.group)
    else:
        mesh = DeviceMesh.from_group(ranks.group, "cpu")
        fully_shard(model, mesh=mesh, ignored_params=set(imbrex.expert_parameters(model)))
    with pytest.raises(ValueError, match="in_step") as caught, in_step(model.eval()):
        pass
    return str(caught.value)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_models_that_communicate_outside_of_layers_are_refused(pool: Pool, how: str) -> None:
    for said in pool.run(2, enter_wrapped, how):
        assert "communicates in every call" in said


def test_a_model_whose_ranks_are_lost_is_left_as_it_was() -> None:
    model = imbrex.MoELayer(CONFIG).eval()
    with pytest.raises(imbrex.RankLostError, match="gone"), in_step(model):
        raise imbrex.RankLostError("gone")
    assert not model._forward_pre_hooks


def test_models_that_nobody_helps_are_refused(pool: Pool) -> None:
    with (
        pytest.raises(ValueError, match="in_step: the model has no MoELayer"),
        in_step(torch.nn.Linear(2, 2)),
    ):
        pass
