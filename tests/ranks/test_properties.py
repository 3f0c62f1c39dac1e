"""Any legal input works: ragged ranks, no tokens, all tokens to one expert, dropped choices, odd widths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import imbrex
from imbrex.experts.experts import Experts
from imbrex.placement import contiguous, from_slots
from imbrex.testing import dense
from tests.ranks.pool import Pool, Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    seed: int
    world: int
    num_experts: int
    top_k: int
    width: int
    tokens: tuple[int, ...]
    routing: str
    transport: str
    replicas: bool


def draw_routing(example: Example, rank: int) -> imbrex.Routing:
    """ids and weights of a rank: random, with dropped choices, or everyone wanting the same experts."""
    drawn = torch.Generator().manual_seed(example.seed * 100 + rank)
    tokens, (E, K) = example.tokens[rank], (example.num_experts, example.top_k)
    order_TE = torch.rand(tokens, E, generator=drawn).argsort(1)
    if example.routing == "one":
        order_TE = torch.arange(E).expand(tokens, E)
    ids_TK = order_TE[:, :K].clone()
    if example.routing == "dropped":
        ids_TK[torch.rand(tokens, K, generator=drawn) < 0.5] = -1
    weights_TK = torch.randint(-3, 4, (tokens, K), generator=drawn).float()
    return imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK)


def draw_tokens(example: Example, rank: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(example.seed * 100 + rank + 50)
    return torch.randint(-4, 5, (example.tokens[rank], example.width), generator=drawn).float()


def placement_of(example: Example) -> imbrex.Placement:
    if not example.replicas:
        return contiguous(example.num_experts, example.world)
    home = [list(range(r, example.num_experts, example.world)) for r in range(example.world)]
    for rank, held in enumerate(home):
        extra = (rank + 1) % example.num_experts
        held.append(extra if extra not in held else -1)
    return from_slots(home, example.num_experts)


def linear(expert: int, width: int) -> torch.Tensor:
    """An expert's integer matrix."""
    return torch.randint(-2, 3, (width, width), generator=torch.Generator().manual_seed(expert)).float()


def run_example(ranks: Ranks, example: Example) -> dict[str, Any]:
    """Experts that are integer matrices: sums are exact in float32, so every path gives the same bits."""
    placement = placement_of(example)
    group = ranks.group if ranks.world_size > 1 else None
    exchange = imbrex.Exchange(
        placement, example.width, example.top_k, group=group, transport=example.transport
    )
    source = 0 if exchange.transport.replicated else ranks.rank
    x_TD = draw_tokens(example, source).requires_grad_()
    routing = draw_routing(example, source)
    routing.weights_TK.requires_grad_()
    d = exchange.dispatch(x_TD, routing)
    pieces, begin = [d.rows_RD[:0]], 0
    for expert, count in zip(placement.local(ranks.rank), d.counts_e.tolist(), strict=True):
        pieces.append(d.rows_RD[begin : begin + count] @ linear(max(expert, 0), example.width))
        begin += count
    y_TD = exchange.combine(torch.cat(pieces), d.handle)
    y_TD.sum().backward()
    return {"y": y_TD.detach(), "x": x_TD.grad, "w": routing.weights_TK.grad}


def expected(example: Example, rank: int) -> dict[str, torch.Tensor]:
    x_TD = draw_tokens(example, rank).requires_grad_()
    routing = draw_routing(example, rank)
    weights_TK = routing.weights_TK.requires_grad_()
    y_TD = 0 * x_TD
    for k in range(example.top_k):
        for expert in range(example.num_experts):
            wanted_T = routing.ids_TK[:, k] == expert
            out_TD = x_TD @ linear(expert, example.width)
            y_TD = y_TD + torch.where(wanted_T, weights_TK[:, k], 0)[:, None] * out_TD
    y_TD.sum().backward()
    assert x_TD.grad is not None
    grad = weights_TK.grad
    return {"y": y_TD.detach(), "x": x_TD.grad, "w": torch.zeros_like(weights_TK) if grad is None else grad}


@st.composite
def examples(draw) -> Example:
    world = draw(st.sampled_from([1, 2, 4]))
    num_experts = draw(st.integers(1, 7))
    return Example(
        seed=draw(st.integers(0, 10**6)),
        world=world,
        num_experts=num_experts,
        top_k=draw(st.sampled_from(sorted({1, (num_experts + 1) // 2, num_experts}))),
        width=draw(st.sampled_from([1, 3, 8, 17])),
        tokens=tuple(draw(st.lists(st.sampled_from([0, 0, 1, 2, 9]), min_size=world, max_size=world))),
        routing=draw(st.sampled_from(["random", "one", "dropped"])),
        transport=draw(st.sampled_from(["alltoall", "allgather", "allreduce"])),
        replicas=draw(st.booleans()),
    )


@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(example=examples())
def test_integer_data_comes_out_exactly(pool: Pool, example: Example) -> None:
    results = pool.run(example.world, run_example, example)
    for rank, result in enumerate(results):
        source = 0 if example.transport == "allreduce" else rank
        for name, value in expected(example, source).items():
            assert torch.equal(result[name], value), (rank, name)


def test_the_oracle_knows_a_hand_computed_case() -> None:
    """x = 2, up = 3, gelu(6) = 6.0 to 8 digits, down = 5, weight 0.5: 0.5 * 5 * 6 = 15."""
    experts = Experts((0,), 1, 1, activation="gelu", implementation="loop")
    with torch.no_grad():
        experts.gate_up_proj.fill_(3.0)
        experts.down_proj.fill_(5.0)
    routing = imbrex.Routing(ids_TK=torch.tensor([[0, -1]]), weights_TK=torch.tensor([[0.5, 9.0]]))
    assert abs(dense(torch.tensor([[2.0]]), routing, experts).item() - 15.0) < 1e-6
