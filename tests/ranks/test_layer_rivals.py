"""The layers that the benchmark compares with compute the same layer, forward and backward."""

from __future__ import annotations

import pytest
import torch

from imbrex.bench.layer.rivals import AllToAll, GatherScatter, GatherScatterBag, Weights
from imbrex.bench.shapes import Shape
from imbrex.bench.skew import make_routing
from imbrex.contracts import Routing
from imbrex.exchange.exchange import Exchange
from imbrex.experts.experts import Experts
from imbrex.overlap.serial import Serial
from imbrex.placement import contiguous
from tests.ranks.pool import Pool, Ranks

SHAPE = Shape(hidden_size=32, intermediate_size=16, num_experts=8, top_k=3)
RIVALS = {kind.name: kind for kind in (AllToAll, GatherScatter, GatherScatterBag)}


def run_both(ranks: Ranks, name: str) -> list[float]:
    """Relative differences of y and of the gradients of x, weights and experts."""
    placement, world = contiguous(8, ranks.world_size), ranks.world_size
    exchange = Exchange(placement, 32, 3, group=ranks.group, transport="alltoall")
    experts = Experts(placement.local(ranks.rank), 32, 16, implementation="loop")
    routing = make_routing("uniform", SHAPE, 24, rank=ranks.rank)
    torch.manual_seed(ranks.rank)
    x, d_y = torch.randn(24, 32, requires_grad=True), torch.randn(24, 32)
    weights = routing.weights_TK.requires_grad_()
    routing = Routing(ids_TK=routing.ids_TK, weights_TK=weights)
    y = Serial().run(x, routing, exchange, experts, None).y_TD
    leaves = [x, weights, experts.gate_up_proj, experts.down_proj]
    expected = [y, *torch.autograd.grad(y, leaves, d_y)]
    held = Weights(gate_up_eGD=experts.gate_up_proj.detach(), down_eDF=experts.down_proj.detach())
    rival = RIVALS[name](held, 8, world, ranks.rank, group=ranks.group)
    found = [rival.forward(x.detach(), routing.ids_TK, weights.detach(), keep=True), *rival.backward(d_y)]
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("name", list(RIVALS))
def test_the_same_layer(pool: Pool, name: str) -> None:
    for errors in pool.run(4, run_both, name):
        assert max(errors) < 1e-5, errors
