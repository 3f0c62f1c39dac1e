"""Capacity and losses are over the tokens of all ranks; what is dropped is said, and can be replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import imbrex
from imbrex.router.capacity import Capacity
from tests.ranks.layer_jobs import Case, make_layer, run_layer
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_layer import largest_error, relative

LOSSES = imbrex.AuxLosses(load_balance=0.1, sequence_balance=0.05, z=0.01)
TOTAL = 24
TRANSPORTS = ["alltoall", "allgather", "allreduce"]


def config(capacity: Capacity | None) -> imbrex.MoEConfig:
    gate = imbrex.Gate(capacity=capacity)
    return imbrex.MoEConfig(hidden_size=10, intermediate_size=8, num_experts=6, top_k=2, gate=gate)


def run_share(ranks: Ranks, case: Case) -> dict[str, Any]:
    """One step on this rank's share of 24 tokens in 8 sequences: loss, synced gradients, what was kept."""
    layer = make_layer(case, ranks.group if ranks.world_size > 1 else None)
    drawn = torch.Generator().manual_seed(5)
    x = torch.randn(8, TOTAL // 8, case.config.hidden_size, generator=drawn)
    target = torch.randn(x.shape, generator=drawn)
    if not layer.exchange.transport.replicated:
        x, target = (t.chunk(ranks.world_size)[ranks.rank] for t in (x, target))
    loss = ((layer(x) - target) ** 2).mean() + layer.aux_loss()
    loss.backward()
    imbrex.sync_gradients(layer)
    assert layer.routing is not None
    return {
        "loss": loss.detach(),
        "gate": layer.gate.weight.grad,
        "kept": layer.routing.kept_TK,
        "aux": {name: value.item() for name, value in layer.routing.losses.items()},
        "down": (layer.experts.expert_ids, layer.experts.down_proj.grad),
    }


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("drop_by", [None, "position", "probability"])
def test_the_number_of_ranks_changes_nothing(pool: Pool, transport: str, drop_by: Any) -> None:
    capacity = None if drop_by is None else Capacity(factor=0.8, drop_by=drop_by)
    case = Case(config=config(capacity), losses=LOSSES, options={"transport": transport})
    (alone,) = pool.run(1, run_share, case)
    if drop_by is not None:
        limit = 7  # ceil(0.8 * 2 * 24 / 6)
        assert int((~alone["kept"]).sum()) > 0
        assert int(alone["kept"].sum()) <= 6 * limit
    for world in (2, 4):
        results = pool.run(world, run_share, case)
        loss = torch.stack([r["loss"] for r in results]).mean()
        assert abs(loss.item() - alone["loss"].item()) < 1e-5
        grads = {e: g for r in results for e, g in zip(*r["down"], strict=True)}
        for expert, grad in zip(*alone["down"], strict=True):
            assert relative(grads[expert], grad) < 1e-5
        for result in results:
            assert relative(result["gate"], alone["gate"]) < 1e-5
            for name, value in alone["aux"].items():
                assert abs(result["aux"][name] - value) < 1e-5 * max(1, abs(value))
        if drop_by is not None and transport != "allreduce":
            assert torch.equal(torch.cat([r["kept"] for r in results]), alone["kept"])


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("drop_by", ["position", "probability"])
def test_the_oracle_given_the_mask_agrees_and_the_mask_replays(pool: Pool, drop_by: Any, pad: bool) -> None:
    capacity = Capacity(factor=0.7, drop_by=drop_by, pad=pad)
    case = Case(config=config(capacity), tokens=(5, 0, 3, 8), options={"transport": "alltoall"})
    results = pool.run(4, run_layer, case)
    assert sum(int((~r["kept"]).sum()) for r in results) > 0
    errors = largest_error(case, 4, results)
    assert max(errors.values()) < 1e-5, errors
    again = pool.run(4, run_layer, case, [r["kept"] for r in results])
    for first, second in zip(results, again, strict=True):
        assert torch.equal(first["y"], second["y"])
        assert torch.equal(first["x_grad"], second["x_grad"])
        assert torch.equal(first["ids"], second["ids"])


def run_padded(ranks: Ranks, case: Case) -> list[int]:
    layer = make_layer(case, ranks.group)
    x_TD = torch.randn(6, case.config.hidden_size)
    return layer.exchange.dispatch(x_TD, layer.gate(x_TD)).counts_e.tolist()


def test_padding_fills_every_expert_up_to_capacity(pool: Pool) -> None:
    case = Case(config=config(Capacity(factor=1.0, pad=True)))
    # ceil(1.0 * 2 * (4 * 6) / 6) = 8 rows an expert, whatever the routing.
    assert pool.run(4, run_padded, case) == [[8, 8], [8, 8], [8], [8]]
