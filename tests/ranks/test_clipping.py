"""Clipping by the norm over all ranks: that of the model in one process, and the same on every rank."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import imbrex
from tests.ranks.layer_jobs import Case, coefficients, make_layer, tokens_of
from tests.ranks.pool import Pool, Ranks
from tests.ranks.reference import run_reference
from tests.ranks.test_layer import SMALL, SPLIT_SLOTS
from tests.ranks.test_parallel import MESHES, Model, full

BIASED = replace(SMALL, activation="gelu", bias=True)


def backward(layer: imbrex.MoELayer, case: Case, rank: int) -> None:
    y_TD = layer(tokens_of(case, rank))
    (y_TD * coefficients(y_TD)).sum().backward()
    imbrex.sync_gradients(layer)


def gradients_of(layer: imbrex.MoELayer) -> list[torch.Tensor]:
    return [p.grad.clone() for p in layer.parameters() if p.grad is not None]


def run_clipped(ranks: Ranks, case: Case, mesh_name: str | None, order: float) -> dict[str, Any]:
    """The norm, and how far gradients clipped to half of it are from half the gradients."""
    place = ranks.group
    if mesh_name is not None:
        place = init_device_mesh("cpu", MESHES[mesh_name], mesh_dim_names=tuple(mesh_name.split("-")))
    layer = make_layer(case, place)
    backward(layer, case, ranks.rank)
    before = gradients_of(layer)
    norm = imbrex.clip_grad_norm_(layer, 1e30, order)
    same = all(torch.equal(a, b) for a, b in zip(gradients_of(layer), before, strict=True))
    again = imbrex.clip_grad_norm_(layer, 0.5 * float(norm), order)
    assert same
    assert torch.equal(norm, again)
    assert norm.dtype == torch.float32
    pairs = zip(gradients_of(layer), before, strict=True)
    far = max(float((a - 0.5 * b).abs().max()) for a, b in pairs if b.numel())
    assert layer.routing is not None
    return {"ids": layer.routing.ids_TK, "norm": float(norm), "far": far}


@pytest.mark.parametrize(
    ("world", "mesh_name", "change", "order"),
    [
        (4, None, {}, 2.0),
        (4, None, {"slots": SPLIT_SLOTS}, 2.0),
        (4, None, {"slots": SPLIT_SLOTS}, float("inf")),
        (4, None, {"config": BIASED, "tensor_parallel": 2}, 2.0),
        (8, "dp-ep-tp", {"config": BIASED}, 1.0),
    ],
)
def test_the_norm_is_that_of_one_process(
    pool: Pool, world: int, mesh_name: str | None, change: dict[str, Any], order: float
) -> None:
    case = replace(Case(config=SMALL), **change)
    results = pool.run(world, run_clipped, case, mesh_name, order)
    truth = run_reference(case, world, replicated=False, routing=results)
    gradients = [truth["gate.weight"], *truth["experts"].values()]
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]) / world, order)
    for result in results:
        assert result["norm"] == results[0]["norm"]
        assert result["norm"] == pytest.approx(float(norm), rel=1e-5)
        assert result["far"] < 1e-5 * float(norm)


def run_sharded(ranks: Ranks, case: Case) -> list[float]:
    """The norm and the sum of all gradients after clipping, without and with FSDP2."""
    found = []
    for sharded in (False, True):
        model = Model(case, ranks.group)
        if sharded:
            mesh = DeviceMesh.from_group(ranks.group, "cpu")
            fully_shard(model, mesh=mesh, ignored_params=set(imbrex.expert_parameters(model)))
        y = model(tokens_of(case, ranks.rank))
        (y * coefficients(y)).sum().backward()
        imbrex.sync_gradients(model, dense=not sharded)
        found.append(float(imbrex.clip_grad_norm_(model, 0.1)))
        found.append(sum(float(full(p.grad).abs().sum()) for p in model.parameters()))
    return found


def test_with_fsdp(pool: Pool) -> None:
    for norm, clipped, sharded_norm, sharded_clipped in pool.run(4, run_sharded, Case(config=SMALL)):
        assert norm > 0.1
        assert sharded_norm == pytest.approx(norm, rel=1e-5)
        assert sharded_clipped == pytest.approx(clipped, rel=1e-5)


def run_trained(ranks: Ranks, case: Case, right: bool) -> tuple[list[str], torch.Tensor]:
    """Three clipped steps: what was warned of, and the gate."""
    layer = make_layer(case, ranks.group)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            backward(layer, case, ranks.rank)
            # Who asks for the norm alone scales nothing, and is told nothing.
            nn.utils.clip_grad_norm_(layer.parameters(), math.inf)
            if right:
                imbrex.clip_grad_norm_(layer, 1e-2)
            else:
                nn.utils.clip_grad_norm_(layer.parameters(), 1e-2)
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in caught if "clip" in str(one.message)], layer.gate.weight.detach()


@pytest.mark.parametrize("right", [True, False])
def test_torch_s_own_is_told_of_once(pool: Pool, right: bool) -> None:
    (said, gate), *others = pool.run(2, run_trained, Case(config=SMALL), right)
    assert len(said) == (0 if right else 1)
    assert right or said[0].endswith("call imbrex.clip_grad_norm_(model, max_norm)")
    assert torch.equal(gate, others[0][1]) == right


def run_not_finite(ranks: Ranks, case: Case) -> str:
    layer = make_layer(case, ranks.group)
    backward(layer, case, ranks.rank)
    if ranks.rank == 1:
        layer.experts.down_proj.grad[0, 0, 0] = float("nan")  # pyright: ignore
    try:
        imbrex.clip_grad_norm_(layer, 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_one_rank_s_nan_is_every_rank_s_error(pool: Pool) -> None:
    for said in pool.run(2, run_not_finite, Case(config=SMALL)):
        assert said.startswith("clip_grad_norm_: the norm of order 2.0 of the gradients is nan; look for")


def test_parameters_are_no_model() -> None:
    with pytest.raises(
        ValueError, match="clip_grad_norm_: list is no model; give the module whose MoELayers"
    ):
        imbrex.clip_grad_norm_([], 1.0)  # pyright: ignore[reportArgumentType]


def run_summed(ranks: Ranks, case: Case) -> list[bool]:
    """`gradient_sums` that hold what the parameters would: they are synced and clipped as those, and the
    parameters get no gradients."""
    found = []
    for summed in (False, True):
        layer = make_layer(case, ranks.group)
        y_TD = layer(tokens_of(case, ranks.rank))
        (y_TD * coefficients(y_TD)).sum().backward()
        experts = layer.experts
        weights = experts.gate_up_proj, experts.down_proj
        for weight in weights:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        kept = [weight.grad for weight in weights]
        if summed:
            experts.gradient_sums = kept[0], kept[1]  # pyright: ignore
            experts.gate_up_proj.grad = experts.down_proj.grad = None
        imbrex.sync_gradients(layer)
        norm = imbrex.clip_grad_norm_(layer, 1e-2)
        assert not summed or (experts.gate_up_proj.grad is None and experts.down_proj.grad is None)
        found.append([norm, *kept, layer.gate.weight.grad])
    return [torch.equal(a, b) for a, b in zip(*found, strict=True)]


def test_gradient_sums_stand_for_gradients(pool: Pool) -> None:
    for same in pool.run(4, run_summed, Case(config=SMALL, slots=SPLIT_SLOTS)):
        assert same == [True] * 4
