"""Training over NVLink under autograd's anomaly detection, which raises where a function returns NaN."""

from __future__ import annotations

import pytest

from tests.gpu.gpus import RANKS
from tests.ranks.pool import Pool
from tests.ranks.test_anomaly import SCHEDULES, run_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(RANKS < 2, reason="NVLink needs two GPUs"),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("experts", ["kernels", "grouped"])
def test_nobody_returns_nan(nccl: Pool, experts: str, schedule: str) -> None:
    assert nccl.run(2, run_step, "nvlink", schedule, experts) == [True] * 2
