"""Every transport and factorisation gives the dense oracle's outputs and gradients."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import imbrex
from imbrex.cli import main
from imbrex.placement import from_slots, read_plan, split_evenly
from tests.ranks.layer_jobs import Case, run_layer
from tests.ranks.pool import Pool, Ranks
from tests.ranks.reference import expert_gradient, run_reference

SMALL = imbrex.MoEConfig(hidden_size=13, intermediate_size=24, num_experts=6, top_k=3)
FACTORS = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4), (1, 8)]
TRANSPORTS = ["alltoall", "allgather", "allreduce"]
SPLIT_SLOTS = [[0, 1], [2, 3, 0], [4, 5], [1, -1]]


def relative(ours: Tensor, theirs: Tensor) -> float:
    """||ours - theirs|| / ||theirs||, or the norm itself where there is nothing to compare with.

    Infinity where there is a NaN, which `max` may pass over.
    """
    assert ours.shape == theirs.shape
    norm = theirs.double().norm().item()
    error = (ours.double() - theirs.double()).norm().item() / (norm or 1.0)
    return math.inf if math.isnan(error) else error


def largest_error(case: Case, world: int, results: list[dict[str, Any]]) -> dict[str, float]:
    """Relative errors of outputs and all gradients against the oracle in float64."""
    replicated = case.options.get("transport") == "allreduce"
    truth = run_reference(case, world, replicated=replicated, routing=results)
    return errors_beside(truth, case, results)


def errors_beside(truth: dict[str, Any], case: Case, results: list[dict[str, Any]]) -> dict[str, float]:
    """Relative errors of outputs and all gradients against `run_reference`'s."""
    ours = results[: len(truth["y"])]
    gate = torch.stack([r["grads"]["gate.weight"].double() for r in ours]).sum(0)
    errors = {
        "y": max(relative(r["y"], y) for r, y in zip(ours, truth["y"], strict=True)),
        "x": max(relative(r["x_grad"], g) for r, g in zip(ours, truth["x_grad"], strict=True)),
        "gate": relative(gate, truth["gate.weight"]),
    }
    for name, grads in truth["experts"].items():
        found = [
            expert_gradient(results, name, e, case.config.activation) for e in range(case.config.num_experts)
        ]
        errors[name] = relative(torch.stack(found), grads)
    return errors


def test_a_layer_has_the_homes_that_imbrex_plan_wrote(pool: Pool, tmp_path) -> None:
    counts = [[[30, 20, 9, 1, 1, 1]]]
    (tmp_path / "stats.json").write_text(json.dumps({"logical_count": counts}))
    files = ["--trace", str(tmp_path / "stats.json"), "--placement", str(tmp_path / "homes.json")]
    sizes = ["--model", "13,24,6,3", "--gpus", "2", "--profile", "two-cores", "--replicas", "2"]
    assert main(["plan", *sizes, *files]) == 0
    homes = read_plan(tmp_path / "homes.json", 2, 6).of(0)
    slots = [list(homes.local(rank)) for rank in range(2)]
    assert sum(map(len, slots)) == 8
    case = Case(config=SMALL, slots=slots, options={"split": "balanced"})
    errors = largest_error(case, 2, pool.run(2, run_layer, case))
    assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("expert_ranks", "tensor_ranks"), FACTORS)
def test_outputs_and_all_gradients(pool: Pool, transport: str, expert_ranks: int, tensor_ranks: int) -> None:
    case = Case(config=SMALL, tensor_parallel=tensor_ranks, options={"transport": transport})
    world = expert_ranks * tensor_ranks
    results = pool.run(world, run_layer, case)
    again = pool.run(world, run_layer, case)
    errors = largest_error(case, world, results)
    assert max(errors.values()) < 1e-5, errors
    for first, second in zip(results, again, strict=True):
        assert torch.equal(first["y"], second["y"])
        assert torch.equal(first["x_grad"], second["x_grad"])
        for name, grad in first["grads"].items():
            assert torch.equal(grad, second["grads"][name]), name


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_replicas_bias_and_uneven_ranks(pool: Pool, transport: str, activation: Any) -> None:
    config = imbrex.MoEConfig(
        hidden_size=7, intermediate_size=10, num_experts=6, top_k=2, activation=activation, bias=True
    )
    case = Case(config=config, slots=SPLIT_SLOTS, options={"transport": transport})
    errors = largest_error(case, 4, pool.run(4, run_layer, case))
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bfloat16_stays_within_its_error(pool: Pool, transport: str) -> None:
    case = Case(config=SMALL, dtype=torch.bfloat16, options={"transport": transport})
    errors = largest_error(case, 4, pool.run(4, run_layer, case))
    # 2^-8 a rounding; a value meets five of them (weights, two products, activation, partial sums).
    assert max(errors.values()) < 0.03, errors


def test_loop_and_grouped_agree(pool: Pool) -> None:
    by_name = {}
    for name in ("loop", "grouped"):
        case = Case(config=SMALL, options={"transport": "alltoall", "experts": name})
        by_name[name] = pool.run(2, run_layer, case)
    for loop, grouped in zip(by_name["loop"], by_name["grouped"], strict=True):
        assert relative(grouped["y"], loop["y"]) < 1e-6
        for name, grad in loop["grads"].items():
            assert relative(grouped["grads"][name], grad) < 1e-6, name


def shares_nothing(counts_WE: Tensor, placement: imbrex.Placement) -> Tensor:
    return torch.zeros(len(counts_WE), placement.num_slots, dtype=torch.int64)


def takes_back(counts_WE: Tensor, placement: imbrex.Placement) -> Tensor:
    split_WS = split_evenly(counts_WE, placement)
    split_WS[:, 0] -= 1000
    split_WS[:, 5] += 1000
    return split_WS


WRONG = {
    "nothing": (shares_nothing, "shares_nothing gave expert "),
    "back": (takes_back, "takes_back gave a slot fewer than no choices"),
    "none": (lambda counts, place: None, "<lambda> gave a NoneType in the place of int64 [W, S], here ["),
    "kind": (lambda counts, place: counts[:, :2].float(), "gave shape, dtype and device (("),
}


def run_wrong_split(ranks: Ranks, wrong: str, transport: str) -> tuple[str, bool]:
    """What a rank is told of a split that is wrong, and whether another works behind it. Expert 0 has two
    slots, the first and the sixth."""
    config = imbrex.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=5, top_k=2)
    place: Any = {"placement": from_slots([[0, 1, 2], [3, 4, 0]], 5), "transport": transport, "timeout": 2.0}
    layer, x = imbrex.MoELayer(config, ranks.group, split=WRONG[wrong][0], **place), torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"^split: .* gave .*; imbrex.testing.check_split checks") as caught:
        layer(x)
    right = imbrex.MoELayer(config, ranks.group, split=lambda *counts: split_evenly(*counts), **place)
    return str(caught.value), right(x).shape == x.shape


@pytest.mark.parametrize("transport", ["alltoall", "allreduce"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_split_that_is_wrong_is_every_ranks_error(pool: Pool, wrong: str, transport: str) -> None:
    for said, works in pool.run(2, run_wrong_split, wrong, transport):
        assert WRONG[wrong][1] in said
        assert works
