"""Codecs x transports x schedules x tensor ranks, forward and backward, against the dense oracle in float64.

Every codec meets every transport with one and with two tensor ranks, and over these every schedule; without a
codec every transport meets every schedule, to 1e-5, and on integers exactly.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import imbrex
from imbrex import overlap
from imbrex.codec import CODECS, make
from imbrex.codec.int8 import Int8
from imbrex.contracts import Codec
from imbrex.placement import contiguous
from imbrex.transport import TRANSPORTS, TWO_TIERS
from tests.ranks.layer_jobs import Case, run_layer
from tests.ranks.pool import Pool, Ranks
from tests.ranks.reference import run_reference
from tests.ranks.test_layer import errors_beside
from tests.ranks.test_pipelined import Double

CONFIG = imbrex.MoEConfig(hidden_size=144, intermediate_size=8, num_experts=6, top_k=3)
MOVING = ["alltoall", "allgather", "allreduce", *TWO_TIERS]
SCHEDULES = ["serial", "optsche-3", "stage-major-2", "exact-2", "sequential-3", "fastermoe"]
LOSSY = [name for name in CODECS if name != "identity" and not name.startswith("zfp")]
LOSSY += ["zfp1d-16", "zfp2d-8", "zfp2d-12", "zfp2d-16"]
RAGGED = (5, 0, 3, 8)
WORLD = 4
EIGHT = [("identity", "optsche-11"), ("fp8", "stage-major-11")]


def tolerance(codec: str | Codec) -> float:
    """Of a relative L2 error. A value is rounded at most three times on its way, by no more than the bound
    times the largest of its row, which is about twice their root mean square. A bound that says less than a
    half (4 bits, ZFP at low rates) must still tell right rows from wrong ones."""
    codec = make(codec)
    return 1e-5 if codec.name == "identity" else min(3 * 2 * codec.error_bound(1.0, torch.float32), 0.5)


def schedules_of(transport: str, tensor: int) -> list[tuple[str, str]]:
    """Codec and schedule of every run: without a codec all, and each codec with the next in turn."""
    turn = 2 * MOVING.index(transport) + tensor
    rotated = [(codec, SCHEDULES[(turn + i) % len(SCHEDULES)]) for i, codec in enumerate(LOSSY)]
    return [*itertools.product(["identity"], SCHEDULES), *rotated]


def make_transport(ranks: Ranks, transport: str) -> Any:
    more = {"ranks_per_node": ranks.world_size // 2} if transport in TWO_TIERS else {}
    return TRANSPORTS[transport](ranks.group, **more)


def run(ranks: Ranks, transport: str, codec: str | Codec, schedule: str, tensor: int) -> dict[str, Any]:
    options = {"transport": make_transport(ranks, transport), "codec": codec, "schedule": schedule}
    return run_layer(ranks, Case(config=CONFIG, tensor_parallel=tensor, tokens=RAGGED, options=options))


def run_all(ranks: Ranks, transport: str, tensor: int) -> list[dict[str, Any]]:
    return [run(ranks, transport, *pair, tensor) for pair in schedules_of(transport, tensor)]


def errors_of(transport: str, tensor: int, runs: list[list[dict[str, Any]]]) -> list[float]:
    """The largest relative error of outputs and all gradients of each run; `runs` by rank."""
    case = Case(config=CONFIG, tensor_parallel=tensor, tokens=RAGGED)
    by_run = [list(results) for results in zip(*runs, strict=True)]
    truth = run_reference(case, len(runs), replicated=transport == "allreduce", routing=by_run[0])
    return [max(errors_beside(truth, case, results).values()) for results in by_run]


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("transport", MOVING)
def test_every_codec_and_schedule(pool: Pool, transport: str, tensor: int) -> None:
    errors = errors_of(transport, tensor, pool.run(WORLD, run_all, transport, tensor))
    for (codec, schedule), error in zip(schedules_of(transport, tensor), errors, strict=True):
        assert error < tolerance(codec), (codec, schedule)
        assert (error > 1e-5) == (codec != "identity"), f"{codec} was not used"


class OneScaleTooLarge(Int8):
    """Reads back a tenth too much."""

    def decode(self, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return super().decode(encoded_NB, width, dtype) * 1.1


class NextRow(Int8):
    """Reads back the row before."""

    def decode(self, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return super().decode(encoded_NB, width, dtype).roll(1, 0)


@pytest.mark.parametrize("codec", [OneScaleTooLarge(), NextRow()], ids=lambda codec: type(codec).__name__)
def test_a_codec_that_is_wrong_is_seen(pool: Pool, codec: Codec) -> None:
    runs = [[result] for result in pool.run(WORLD, run, "alltoall", codec, "optsche-3", 1)]
    assert errors_of("alltoall", 1, runs)[0] > 2 * tolerance(codec)


def test_every_pair_meets() -> None:
    """Codec and schedule over all transports; codec, transport and tensor ranks in every run."""
    met = {pair for transport in MOVING for tensor in (1, 2) for pair in schedules_of(transport, tensor)}
    assert met == set(itertools.product(["identity", *LOSSY], SCHEDULES))
    assert {*MOVING, "nvlink"} == {*TRANSPORTS}


def run_integers(ranks: Ranks, transport: str) -> list[bool]:
    """On integers no order of sums can differ: y and the gradient of x, to the bit, by schedule."""
    drawn = torch.Generator().manual_seed(0 if transport == "allreduce" else ranks.rank)
    num_tokens = 3 if transport == "allreduce" else (7, 0, 1, 17)[ranks.rank]
    x_TD = torch.randint(-9, 9, (num_tokens, 8), generator=drawn).float()
    ids_TK = torch.rand(num_tokens, 6, generator=drawn).argsort(1)[:, :3]
    weights_TK = torch.randint(1, 5, (num_tokens, 3), generator=drawn).float()
    routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK)
    twice = 2 * weights_TK.sum(1, keepdim=True)
    exact = []
    for schedule in SCHEDULES:
        made = make_transport(ranks, transport)
        exchange = imbrex.Exchange(contiguous(6, ranks.world_size), 8, 3, group=ranks.group, transport=made)
        x = x_TD.clone().requires_grad_()
        y_TD = overlap.make(schedule).run(x, routing, exchange, Double(), None)
        y_TD.backward(torch.ones_like(y_TD))
        assert x.grad is not None
        exact.append(torch.equal(y_TD, x_TD * twice) and torch.equal(x.grad, twice.expand_as(x)))
        exchange.close()
    return exact


@pytest.mark.parametrize("transport", MOVING)
def test_integers_come_out_exactly(pool: Pool, transport: str) -> None:
    for exact in pool.run(WORLD, run_integers, transport):
        assert exact == [True] * len(SCHEDULES), SCHEDULES


def run_eight(ranks: Ranks, transport: str) -> list[dict[str, Any]]:
    return [run(ranks, transport, *pair, 1) for pair in EIGHT]


@pytest.mark.parametrize("transport", MOVING)
def test_eight_ranks_with_more_chunks_than_tokens(pool: Pool, transport: str) -> None:
    errors = errors_of(transport, 1, pool.run(8, run_eight, transport))
    for (codec, schedule), error in zip(EIGHT, errors, strict=True):
        assert error < tolerance(codec), (codec, schedule)
