"""Rows encoded to cross the wire: the same as an oracle that rounds at the same points."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import imbrex
from imbrex.codec import make_wire
from imbrex.exchange.plan import choose_slots, count_choices, owner_of_slot
from imbrex.placement import from_slots, split_evenly
from imbrex.router.router import Router
from imbrex.testing import wired
from imbrex.transport import AllReduce
from tests.ranks.layer_jobs import Case, coefficients, make_layer, run_layer, tokens_of
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_layer import SPLIT_SLOTS, largest_error, relative

CONFIG = imbrex.MoEConfig(hidden_size=9, intermediate_size=8, num_experts=6, top_k=3)
MIXED = {"dispatch": "int8", "combine": "bf16", "dispatch_backward": "fp16"}


def expected(case: Case, results: list[dict[str, Any]], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and input gradients of a rank, from the oracle. The gate is left out: weights are constants."""
    assert case.slots is not None
    placement = from_slots(case.slots, case.config.num_experts)
    counts = torch.stack([count_choices(r["ids"], case.config.num_experts) for r in results])
    split = split_evenly(counts, placement)
    ids = results[rank]["ids"]
    owner = owner_of_slot(placement, ids.device)[choose_slots(ids, split[rank], placement)]
    single = make_layer(Case(config=case.config, options={"experts": "loop"}), None)
    x_TD = tokens_of(case, rank).requires_grad_()
    routing = imbrex.Routing(ids_TK=ids, weights_TK=results[rank]["weights"])
    y_TD = wired(x_TD, routing, single.experts, owner, rank, make_wire(case.options["codec"]))
    (y_TD * coefficients(y_TD)).sum().backward()
    assert x_TD.grad is not None
    return y_TD.detach(), x_TD.grad


@pytest.mark.parametrize("transport", ["alltoall", "allgather"])
@pytest.mark.parametrize("codec", ["int8", "fp16", "bf16", MIXED], ids=str)
def test_replicas_and_a_codec_equal_the_rounding_oracle(pool: Pool, transport: str, codec: Any) -> None:
    case = Case(config=CONFIG, slots=SPLIT_SLOTS, options={"transport": transport, "codec": codec})
    results = pool.run(4, run_frozen_gate, case)
    for rank, result in enumerate(results):
        y_TD, x_grad = expected(case, results, rank)
        assert relative(result["y"], y_TD) < 1e-5, rank
        assert relative(result["x_grad"], x_grad) < 1e-5, rank


def run_frozen_gate(ranks: Ranks, case: Case) -> dict[str, Any]:
    """`run_layer` without the gate's part of the input gradient."""
    forward = Router.forward

    def constant(router: Router, x_TD: torch.Tensor, **rest: Any) -> imbrex.Routing:
        routing = forward(router, x_TD.detach(), **rest)
        return imbrex.Routing(ids_TK=routing.ids_TK, weights_TK=routing.weights_TK.detach())

    setattr(Router, "forward", constant)  # noqa: B010 (a method of another signature)
    try:
        return run_layer(ranks, case)
    finally:
        setattr(Router, "forward", forward)  # noqa: B010


def test_an_encoded_exchange_is_not_the_plain_one(pool: Pool) -> None:
    """The oracle above would also pass if nothing were encoded on either side; the difference is visible."""
    plain = pool.run(4, run_layer, Case(config=CONFIG, options={"transport": "alltoall"}))
    coded = pool.run(4, run_layer, Case(config=CONFIG, options={"transport": "alltoall", "codec": "int8"}))
    assert relative(coded[0]["y"], plain[0]["y"]) > 1e-4


class Sums(AllReduce):
    """A transport of a user's that only sums."""

    sums_encoded = False


def test_a_transport_that_only_sums_refuses_a_codec() -> None:
    case = Case(config=CONFIG, options={"transport": Sums(None), "codec": "int8"})
    with pytest.raises(ValueError, match="cannot carry rows written as int8; use codec='identity'"):
        make_layer(case, None)


def run_sum_encoded(ranks: Ranks, codec: str) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's partial sums, and what the transport makes of all ranks'."""
    torch.manual_seed(ranks.rank)
    coded, partial_TD = make_wire(codec).combine, torch.randn(7, 32)

    def decode(encoded: torch.Tensor) -> torch.Tensor:
        return coded.decode(encoded, 32, torch.float32)

    def encode(rows_TD: torch.Tensor) -> torch.Tensor:
        return coded.encode(rows_TD, torch.float32)

    return partial_TD, AllReduce(ranks.group).sum_encoded(partial_TD, encode, decode)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_own_sums_are_not_rounded_where_they_are_added(pool: Pool, codec: str) -> None:
    """Of seven tokens ranks 0 to 2 of four sum two each: all partial sums but their own cross encoded."""
    partials, sums = zip(*pool.run(4, run_sum_encoded, codec), strict=True)
    coded = make_wire(codec).combine
    through = [coded.decode(coded.encode(p, torch.float32), 32, torch.float32) for p in partials]
    for token in range(7):
        home, total = token // 2, torch.zeros(1, 32)
        for rank in range(4):
            total += (partials if rank == home else through)[rank][token]
        want = coded.decode(coded.encode(total, torch.float32), 32, torch.float32)
        for found in sums:
            assert torch.equal(found[token : token + 1], want)


@pytest.mark.parametrize(("world", "tensor"), [(2, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize(("codec", "most"), [("bf16", 0.01), ("int8", 0.03), ("fp8", 0.1)])
def test_a_sum_over_ranks_of_encoded_rows(
    pool: Pool, codec: str, most: float, world: int, tensor: int
) -> None:
    """Each value is rounded once a rank; every rank ends with the same bits, forward and backward."""
    case = Case(
        config=CONFIG, tokens=(5,), tensor_parallel=tensor, options={"transport": "allreduce", "codec": codec}
    )
    results = pool.run(world, run_layer, case)
    errors = largest_error(case, world, results)
    assert max(errors["y"], errors["x"]) > 1e-4
    assert max(errors.values()) < most, errors
    for result in results[1:]:
        assert torch.equal(result["y"], results[0]["y"])
        assert torch.equal(result["x_grad"], results[0]["x_grad"])
