"""Codecs x transports x schedules x tensor ranks, forward and backward, against the plain serial layer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import imbrex
from imbrex.transport import TRANSPORTS
from tests.ranks.layer_jobs import Case, run_layer
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_layer import relative

CONFIG = imbrex.MoEConfig(hidden_size=32, intermediate_size=8, num_experts=6, top_k=3)
TWO_TIERS = ("1dh", "2dh", "pipe", "sequential", "hierarchical")
MOVING = ["alltoall", "allgather", "allreduce", *TWO_TIERS]
SCHEDULES = ("serial", "optsche-3")
# The largest relative error of outputs and gradients: a value is rounded at most three times on its way.
CODECS = {"identity": 1e-5, "bf16": 0.012, "int8": 0.03, "fp8": 0.12, "nvfp4": 0.4}
RAGGED = (5, 0, 3, 8)


def run_all(ranks: Ranks, transport: str, tensor: int) -> dict[tuple[str, str], float]:
    """The largest relative difference of every codec and schedule, on this rank."""
    found = {}
    # Where tokens are the same on every rank the sums differ: compare with the same.
    plain = run(ranks, "allreduce" if transport == "allreduce" else "alltoall", "identity", "serial", tensor)
    for codec, schedule in [*itertools.product(CODECS, SCHEDULES), ("identity", "stage-major-2")]:
        ours = run(ranks, transport, codec, schedule, tensor)
        pairs = [(ours[k], plain[k]) for k in ("y", "x_grad")]
        pairs += [(grad, plain["grads"][name]) for name, grad in ours["grads"].items()]
        found[codec, schedule] = max(relative(a, b) for a, b in pairs)
    return found


def run(ranks: Ranks, transport: str, codec: str, schedule: str, tensor: int) -> dict[str, Any]:
    more = {"ranks_per_node": ranks.world_size // 2} if transport in TWO_TIERS else {}
    made = TRANSPORTS[transport](ranks.group, **more)
    options = {"transport": made, "codec": codec, "schedule": schedule}
    return run_layer(ranks, Case(config=CONFIG, tensor_parallel=tensor, tokens=RAGGED, options=options))


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("transport", MOVING)
def test_every_combination(pool: Pool, transport: str, tensor: int) -> None:
    for found in pool.run(4, run_all, transport, tensor):
        for (codec, schedule), error in found.items():
            assert error < CODECS[codec], (codec, schedule)


def run_eight(ranks: Ranks, transport: str, schedule: str) -> float:
    plain = run(ranks, "alltoall", "identity", "serial", 1)
    ours = run(ranks, transport, "identity", schedule, 1)
    return max(relative(ours[k], plain[k]) for k in ("y", "x_grad"))


@pytest.mark.parametrize("transport", TWO_TIERS)
def test_eight_ranks_with_more_chunks_than_tokens(pool: Pool, transport: str) -> None:
    assert max(pool.run(8, run_eight, transport, "optsche-11")) < 1e-5


def test_no_transport_is_left_out() -> None:
    assert set(MOVING) | {"nvlink"} == set(TRANSPORTS)
