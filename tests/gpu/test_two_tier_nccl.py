"""Transports for two tiers over NCCL: the tests of tests/ranks/test_hierarchical.py on GPUs, two a node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from imbrex.testing import ConformityError, check_transport
from tests.ranks.layer_jobs import Case
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_hierarchical import KINDS, run_on_nodes
from tests.ranks.test_layer import SMALL, largest_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="two nodes of two ranks need four GPUs"),
]


@pytest.fixture(scope="module")
def nccl() -> Iterator[Pool]:
    ranks = Pool(4, timeout_s=100.0, backend="nccl")
    yield ranks
    ranks.close()


def run_check(ranks: Ranks, name: str) -> str:
    try:
        check_transport(KINDS[name](ranks.group, ranks_per_node=2), ranks.group, device=ranks.device)
    except ConformityError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", KINDS)
def test_contract(nccl: Pool, name: str) -> None:
    assert nccl.run(4, run_check, name) == [""] * 4


@pytest.mark.parametrize("schedule", ["serial", "optsche-3"])
@pytest.mark.parametrize("name", KINDS)
def test_oracle(nccl: Pool, name: str, schedule: str) -> None:
    case = Case(config=SMALL, options={"schedule": schedule})
    errors = largest_error(case, 4, nccl.run(4, run_on_nodes, case, name, 2))
    assert max(errors.values()) < 1e-5, errors
