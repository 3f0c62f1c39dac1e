"""Gradients summed while the backward runs: the bits of `sync_gradients` after it, and the same order on
every rank, whatever ranks use."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import imbrex
from imbrex.parallel import buckets
from imbrex.parallel.backward import sync_in_backward
from tests.ranks.layer_jobs import SEED, Case, coefficients, make_layer, tokens_of
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_layer import SMALL, SPLIT_SLOTS
from tests.ranks.test_parallel import MESHES

CASE = Case(config=SMALL, losses=imbrex.AuxLosses(load_balance=0.1))


class Model(nn.Module):
    """Two MoE layers between dense ones, one of which only some ranks use."""

    def __init__(self, case: Case, place: Any) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        width = case.config.hidden_size
        self.first, self.some = (nn.Linear(width, width, dtype=case.dtype) for _ in range(2))
        self.layers = nn.ModuleList(make_layer(case, place) for _ in range(2))
        self.last = nn.Linear(width, width, dtype=case.dtype)

    def forward(self, x_TD: Tensor, *, some: bool) -> Tensor:
        x_TD = self.first(x_TD)
        for layer in self.layers:
            x_TD = x_TD + layer(x_TD)
        return self.last(x_TD + self.some(x_TD) if some else x_TD)


def place_of(ranks: Ranks, mesh_name: str | None) -> Any:
    if mesh_name is None:
        return ranks.group
    return init_device_mesh("cpu", MESHES[mesh_name], mesh_dim_names=tuple(mesh_name.split("-")))


def train(model: Model, ranks: Ranks, case: Case, sync: Any, *, clip: bool) -> list[Tensor]:
    """Gradients of two steps of three micro-batches, of which a rank uses `some` in one or in none."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(2):
        for micro in range(3):
            x_TD = tokens_of(case, ranks.rank + micro).to(ranks.device)
            some = ranks.rank % 2 == 1 and micro == step
            y_TD = model(x_TD, some=some)
            loss = (y_TD * coefficients(y_TD)).sum() + imbrex.aux_loss(model)
            if sync is not None and micro < 2:
                with sync.no_sync():
                    loss.backward()
            else:
                loss.backward()
        imbrex.sync_gradients(model)
        if clip:
            imbrex.clip_grad_norm_(model, 0.5)
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
    return seen


def run_both(ranks: Ranks, case: Case, mesh_name: str | None, clip: bool) -> list[bool]:
    """Whether each gradient has the same bits; how many buckets left before `sync_gradients` was called."""
    buckets.BUCKET_BYTES = 300  # a few parameters each
    try:
        place = place_of(ranks, mesh_name)
        plain = train(Model(case, place).to(ranks.device), ranks, case, None, clip=clip)
        model = Model(case, place).to(ranks.device)
        sync = sync_in_backward(model)
        left: list[int] = []
        finish = sync.finish
        sync.finish = lambda **how: (left.append(len(sync._waits)), finish(**how))[1]  # type: ignore
        beside = train(model, ranks, case, sync, clip=clip)
    finally:
        buckets.BUCKET_BYTES = 25 << 20
    assert len(plain) == len(beside) == 2 * len(list(model.parameters()))
    assert all(count > 0 for count in left), "nothing left in the backward"
    # Chunks of tokens are added before they are multiplied by the ranks, and not one by one to the rest.
    rounding = 1e-5 if "schedule" in case.options else 0.0
    pairs = zip(plain, beside, strict=True)
    return [bool(((one - other).abs() <= rounding * one.abs().max()).all()) for one, other in pairs]


CHUNKS = {"config": SMALL, "options": {"schedule": "optsche-2"}}
RICH = replace(SMALL, shared=imbrex.SharedExperts(intermediate_size=6, gated=True))


@pytest.mark.parametrize(
    ("world", "mesh_name", "change"),
    [
        (4, None, {"config": RICH}),
        (4, None, CHUNKS),
        (4, None, {"slots": SPLIT_SLOTS}),
        (8, "dp-ep-tp", {}),
        (2, None, {"tokens": (3, 0)}),
    ],
)
def test_the_bits_are_those_of_the_call_behind_the_backward(
    pool: Pool, world: int, mesh_name: str | None, change: dict[str, Any]
) -> None:
    case = replace(CASE, **change)
    for same in pool.run(world, run_both, case, mesh_name, world == 4):
        assert all(same)


def run_in_place(ranks: Ranks) -> tuple[list[int], list[bool]]:
    """Numbers of parameters of all buckets of dense gradients; of those of one, whether its gradient itself
    is summed."""
    model = Model(CASE, ranks.group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_BYTES", model.last.weight.nbytes)
        found = buckets.buckets_of(model, buckets.moe_layers(model, "a test"), dense=True)
    dense = [bucket for bucket in found if not bucket.experts]
    model.first.weight.grad = torch.zeros_like(model.first.weight).t()
    alone = [bucket for bucket in dense if len(bucket.parameters) == 1]
    sums = [next(bucket.sums())[0] is bucket.parameters[0].grad for bucket in alone]
    return [len(bucket.parameters) for bucket in dense], sums


def test_a_large_gradient_is_summed_where_it_lies(pool: Pool) -> None:
    """A copy of an embedding's would be a rank's peak. One whose values stand in another order is copied."""
    for sizes, in_place in pool.run(2, run_in_place):
        assert sizes == [1, 3, 1, 1, 2]
        assert in_place == [True, True, False]


def run_refused(ranks: Ranks) -> list[str]:
    """What is said of a second backward, of a second call, of `dense`, and that all works afterwards."""
    said: list[str] = []

    def attempt(call: Any) -> None:
        try:
            call()
            said.append("nothing")
        except (RuntimeError, ValueError) as error:
            said.append(str(error))

    model = Model(CASE, ranks.group)
    x_TD = tokens_of(CASE, ranks.rank)
    sync = sync_in_backward(model)
    attempt(lambda: sync_in_backward(model))
    model(x_TD, some=True).sum().backward()
    attempt(lambda: model.last(x_TD).sum().backward())
    attempt(lambda: imbrex.sync_gradients(model, dense=False))
    sync.forget()
    model.zero_grad()
    model(x_TD, some=True).sum().backward()
    imbrex.sync_gradients(model)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    sync.remove()
    model.zero_grad()
    for _ in range(2):
        model(x_TD, some=True).sum().backward()
    imbrex.sync_gradients(model)
    second = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.allclose(2 * a, b, rtol=1e-4, atol=1e-5) for a, b in zip(first, second, strict=True))
    attempt(lambda: sync_in_backward(nn.Linear(2, 2)))
    dist.barrier(ranks.group)
    return said


def run_and_forget(ranks: Ranks) -> list[bool]:
    """Which parameters of a model are left when it is gone, and how a copy of it was made meanwhile."""
    model = Model(CASE, ranks.group)
    sync_in_backward(model)
    copied = copy.deepcopy(model)
    train(model, ranks, replace(CASE, tokens=(5, 3)), sync_of(model), clip=False)
    assert all(layer.backward_sync is None for layer in copied.layers)
    references = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    return [reference() is not None for reference in references]


def sync_of(model: Model) -> Any:
    layer: Any = model.layers[0]
    return layer.backward_sync


def test_a_model_that_is_gone_leaves_nothing(pool: Pool) -> None:
    """Whoever drops what `sync_in_backward` returned has a model that sums, and frees it with its name."""
    for left in pool.run(2, run_and_forget):
        assert not any(left)


def test_what_is_refused(pool: Pool) -> None:
    for twice, second, dense, none in pool.run(2, run_refused):
        assert twice.endswith("call remove() first")
        assert second.startswith("sync_in_backward: a gradient came twice before sync_gradients(model)")
        assert "give dense=False to both, or to none" in dense
        assert none.startswith("sync_in_backward: the model has no MoELayer")


def run_divided(ranks: Ranks, world: int) -> bool:
    """Whether the gradients of tokens, gate and shared experts keep their bits where those of experts come
    divided by the ranks, and are not divided again."""
    found = []
    for divided in (False, True):
        layer = make_layer(replace(CASE, config=RICH), ranks.group)
        if divided:
            sync_in_backward(layer, dense=False)
        x_TD = tokens_of(CASE, ranks.rank).requires_grad_()
        (layer(x_TD).square().sum() + layer.aux_loss()).backward()
        before = layer.experts.down_proj.grad.clone()  # type: ignore
        imbrex.sync_gradients(layer, dense=False)
        others = [p.grad for n, p in layer.named_parameters() if not n.startswith("experts.")]
        found.append((before, layer.experts.down_proj.grad, [x_TD.grad, *others]))
    (plain, mean, same), (early, behind, others) = found
    assert torch.equal(mean, behind)
    assert torch.equal(early * world, plain)
    return all(torch.equal(a, b) for a, b in zip(same, others, strict=True))  # type: ignore


@pytest.mark.parametrize("world", [2, 4])
def test_experts_gradients_come_divided(pool: Pool, world: int) -> None:
    assert all(pool.run(world, run_divided, world))
