"""The ranks that the tests of a file share: one a GPU, over NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.gpu.gpus import RANKS
from tests.gpu.sanitizer import compile_for_racecheck
from tests.ranks.pool import Pool

compile_for_racecheck()
# Without it torch refuses products where a test asks for deterministic operators.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="module")
def nccl() -> Iterator[Pool]:
    ranks = Pool(RANKS, timeout_s=120.0, backend="nccl")
    yield ranks
    ranks.close()
