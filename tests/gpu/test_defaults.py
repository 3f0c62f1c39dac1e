"""Whatever torch's default dtype and device are, and where only deterministic operators may run, the kernels'
results are the same to the bit."""

from __future__ import annotations

import pytest
import torch

import imbrex
from tests.gpu.gpus import RANKS
from tests.gpu.test_layer_alone import ALONE, CASES, LIMIT, SHAPE
from tests.gpu.test_layer_nvlink import NVLINK
from tests.ranks.layer_jobs import Case, run_layer
from tests.ranks.pool import Pool
from tests.ranks.test_defaults import Under, defaults, same
from tests.ranks.test_layer import largest_error

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
KINDS = ["bfloat16", "float64", "cuda", "deterministic"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(CASES))
def test_a_rank_alone(kind: str, name: str) -> None:
    shape, options = CASES[name]
    config = imbrex.MoEConfig(**{**SHAPE, **shape})
    case = Case(config=config, dtype=torch.bfloat16, tokens=(37,), options=options)
    truth = run_layer(ALONE, case)
    with defaults(kind):
        found = run_layer(ALONE, case)
    assert same(truth, found)
    assert max(largest_error(case, 1, [found]).values()) < LIMIT


@pytest.mark.skipif(RANKS < 2, reason="ranks need two GPUs")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["nvlink", "alltoall"])
def test_ranks(nccl: Pool, kind: str, transport: str) -> None:
    case = Case(config=NVLINK.config, dtype=torch.bfloat16, tokens=(70, 33), options={"transport": transport})
    truth, found = nccl.run(2, run_layer, case), Under(nccl, kind).run(2, run_layer, case)
    for first, second in zip(truth, found, strict=True):
        assert same(first, second)
