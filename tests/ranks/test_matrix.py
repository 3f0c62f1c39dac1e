"""Codecs x transports x schedules x tensor ranks, forward and backward, against the oracle in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import imbrex
from imbrex import overlap
from imbrex.codec.int8 import Int8
from imbrex.contracts import Codec
from imbrex.placement import contiguous
from imbrex.transport import TRANSPORTS
from tests.emulated import kernel
from tests.ranks.matrix import (
    LOSSY,
    MOVING,
    NODES,
    OFTEN,
    SCHEDULES,
    TENSOR,
    Cell,
    codecs_of,
    errors_of,
    make_transport,
    product,
    share,
)
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_pipelined import Double

pytestmark = [pytest.mark.timeout(600), pytest.mark.untraced]
EMULATED = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
EVERY = [*MOVING, "nvlink"]
MARKED = [*MOVING, pytest.param("nvlink", marks=EMULATED)]


@pytest.mark.parametrize("world", SCHEDULES)
@pytest.mark.parametrize("transport", MARKED)
def test_every_cell_is_the_oracle(
    pool: Pool, transport: str, world: int, request: pytest.FixtureRequest, record_property: Any
) -> None:
    cells = (product if request.config.getoption("--matrix") == "full" else share)(transport, world)
    errors = errors_of(pool, cells)
    for cell, error in zip(cells, errors, strict=True):
        assert error < cell.tolerance, cell
        if transport != "nvlink":
            assert (error > 1e-5) == (cell.codec != "identity"), f"{cell.codec} was not used"
        record_property("cell", [str(cell.codec), transport, error, cell.tolerance])


def test_any_two_meet() -> None:
    """In the share that is run by itself; nvlink writes rows as they are or as fp8 only."""
    cells = [cell for transport in EVERY for cell in share(transport, 4)]
    names = {"codec": ["identity", *OFTEN], "transport": EVERY, "schedule": SCHEDULES[4], "tensor": TENSOR}
    for (one, firsts), (other, seconds) in itertools.combinations(names.items(), 2):
        met = {(getattr(cell, one), getattr(cell, other)) for cell in cells}
        missed = set(itertools.product(firsts, seconds)) - met
        assert all(second == "nvlink" and first not in codecs_of("nvlink") for first, second in missed)
    assert {*EVERY} == {*TRANSPORTS, "auto", NODES}
    whole = [cell for transport in EVERY for cell in product(transport, 4)]
    assert len(whole) == len(set(whole)) == ((len(LOSSY) + 1) * len(MOVING) + 2) * 6 * 2


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
    cell = Cell(codec=codec, transport="alltoall", schedule="optsche-3")
    assert errors_of(pool, [cell])[0] > 2 * cell.tolerance


def run_integers(ranks: Ranks, transport: str, pairs: Sequence[tuple[str, int]]) -> list[bool]:
    """On integers no order of sums can differ: y and the gradient of x, to the bit, by schedule and tensor
    ranks. Each of these doubles its rows, and all of their rows are summed. bfloat16 holds all the sums."""
    width, dtype = (64, torch.bfloat16) if transport == "nvlink" else (8, torch.float32)
    drawn = torch.Generator().manual_seed(0 if transport == "allreduce" else ranks.rank)
    num_tokens = 3 if transport == "allreduce" else (7, 0, 1, 17)[ranks.rank % 4]
    x_TD = torch.randint(-9, 9, (num_tokens, width), generator=drawn).to(dtype)
    ids_TK = torch.rand(num_tokens, 6, generator=drawn).argsort(1)[:, :3]
    weights_TK = torch.randint(1, 5, (num_tokens, 3), generator=drawn).float()
    routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK)
    exact = []
    for schedule, tensor in pairs:
        placement, made = contiguous(6, ranks.world_size // tensor), make_transport(ranks, transport)
        more: Any = {"group": ranks.group, "transport": made, "tensor_parallel": tensor}
        exchange = imbrex.Exchange(placement, width, 3, **more)
        times = (2 * tensor * weights_TK.sum(1, keepdim=True)).to(dtype)
        x = x_TD.clone().requires_grad_()
        y_TD = overlap.make(schedule).run(x, routing, exchange, Double(), None).y_TD
        y_TD.backward(torch.ones_like(y_TD))
        assert x.grad is not None
        exact.append(torch.equal(y_TD, x_TD * times) and torch.equal(x.grad, times.expand_as(x)))
        exchange.close()
    return exact


@pytest.mark.parametrize("world", SCHEDULES)
@pytest.mark.parametrize("transport", MARKED)
def test_integers_come_out_exactly(
    pool: Pool, transport: str, world: int, request: pytest.FixtureRequest
) -> None:
    full = request.config.getoption("--matrix") == "full"
    if world == 8 and not full:
        pytest.skip("run with --matrix full")
    pairs = list(itertools.product(SCHEDULES[world], TENSOR))
    if not full:
        pairs = [pair for i, pair in enumerate(pairs) if (i // 2 + i + EVERY.index(transport)) % 2 == 0]
    for exact in pool.run(world, run_integers, transport, pairs):
        assert exact == [True] * len(pairs), pairs
