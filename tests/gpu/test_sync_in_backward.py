"""Gradients summed on a stream of their own during the backward have the bits of those summed after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.gpus import RANKS
from tests.gpu.test_layer_nvlink import NVLINK
from tests.ranks.pool import Pool
from tests.ranks.test_sync_in_backward import CASE, run_both

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.skipif(RANKS < 2, reason="ranks need two GPUs")
@pytest.mark.parametrize("transport", ["nvlink", "alltoall"])
def test_two_gpus(nccl: Pool, transport: str) -> None:
    config = NVLINK.config if transport == "nvlink" else CASE.config
    dtype = torch.bfloat16 if transport == "nvlink" else torch.float32
    case = replace(CASE, config=config, dtype=dtype, tokens=(70, 33), options={"transport": transport})
    for same in nccl.run(2, run_both, case, None, True):
        assert all(same)
