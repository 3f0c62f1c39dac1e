"""What autograd offers besides a plain backward, over NVLink's kernels."""

from __future__ import annotations

import pytest

from tests.gpu.gpus import RANKS
from tests.ranks.pool import Pool
from tests.ranks.test_autograd import (
    SCHEDULES,
    checkpointed,
    run_steps,
    run_watched,
    with_another_graph,
    with_hooks_of_modules,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(RANKS < 2, reason="NVLink needs two GPUs"),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("experts", ["kernels", "grouped"])
def test_memory_that_nobody_writes_is_no_anomaly(nccl: Pool, experts: str, schedule: str) -> None:
    assert nccl.run(2, run_watched, "nvlink", schedule, experts) == [True] * 2


@pytest.mark.parametrize("tokens", [5, 600])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_those_of_a_plain_backward(nccl: Pool, schedule: str, tokens: int) -> None:
    """Of few tokens, which come in one kernel, and of more, whose rows fused kernels bring."""
    ways = [checkpointed, with_hooks_of_modules, with_another_graph]
    assert nccl.run(2, run_steps, "nvlink", schedule, ways, tokens) == [[]] * 2
