"""The ranks that the tests of a file share: one a GPU, over NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.gpus import RANKS
from tests.gpu.sanitizer import compile_for_racecheck
from tests.ranks.pool import Pool

compile_for_racecheck()


@pytest.fixture(scope="module")
def nccl() -> Iterator[Pool]:
    ranks = Pool(RANKS, timeout_s=120.0, backend="nccl")
    yield ranks
    ranks.close()
