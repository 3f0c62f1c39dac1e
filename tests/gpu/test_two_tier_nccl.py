"""Transports for two tiers over NCCL: the tests of tests/ranks/test_hierarchical.py on GPUs.

Four GPUs are two nodes of two; two are two nodes of one, or one node of two, and some steps move nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from imbrex.testing import ConformityError, check_transport
from tests.gpu.gpus import RANKS
from tests.ranks.layer_jobs import Case
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_hierarchical import KINDS, run_on_nodes
from tests.ranks.test_layer import SMALL, largest_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(RANKS < 2, reason="nodes need two GPUs"),
]
SHAPES = [(world, per_node) for world, per_node in ((2, 1), (2, 2), (4, 2)) if world <= RANKS]
"""Ranks, and ranks of a node."""


@pytest.fixture(scope="module")
def nccl() -> Iterator[Pool]:
    ranks = Pool(4 if RANKS >= 4 else 2, timeout_s=100.0, backend="nccl")
    yield ranks
    ranks.close()


def run_check(ranks: Ranks, name: str, per_node: int) -> str:
    try:
        check_transport(KINDS[name](ranks.group, ranks_per_node=per_node), ranks.group, device=ranks.device)
    except ConformityError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("world", "per_node"), SHAPES)
@pytest.mark.parametrize("name", KINDS)
def test_contract(nccl: Pool, name: str, world: int, per_node: int) -> None:
    assert nccl.run(world, run_check, name, per_node) == [""] * world


@pytest.mark.parametrize("schedule", ["serial", "optsche-3"])
@pytest.mark.parametrize(("world", "per_node"), SHAPES)
@pytest.mark.parametrize("name", KINDS)
def test_oracle(nccl: Pool, name: str, world: int, per_node: int, schedule: str) -> None:
    case = Case(config=SMALL, options={"schedule": schedule})
    errors = largest_error(case, world, nccl.run(world, run_on_nodes, case, name, per_node))
    assert max(errors.values()) < 1e-5, errors
