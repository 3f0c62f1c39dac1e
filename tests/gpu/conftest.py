"""The ranks that the tests of a file share: one a GPU, over NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ranks.pool import Pool


@pytest.fixture(scope="module")
def nccl() -> Iterator[Pool]:
    ranks = Pool(torch.cuda.device_count(), timeout_s=120.0, backend="nccl")
    yield ranks
    ranks.close()
