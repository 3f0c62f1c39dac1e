"""Megatron-Core's own MoE layer over both back ends of its flex dispatcher, and imbrex's in its spec,
rows over NVLink."""

from __future__ import annotations

import importlib.util

import pytest

from tests.gpu.gpus import RANKS
from tests.ranks.pool import Pool
from tests.ranks.test_megatron_wheel import by_spec, dispatchers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(RANKS != 2, reason="Megatron lays its groups over all ranks, here two"),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="megatron-core is not installed: pip install --no-deps -r requirements-doors.txt",
    ),
]


def test_steps_have_the_losses_of_allgather(nccl: Pool) -> None:
    for losses, same_losses, same_weights in nccl.run(2, dispatchers):
        assert losses[0] > losses[-1] > 0
        assert same_losses == [True, True], (losses, same_weights)


def test_imbrex_in_their_spec_has_the_losses_of_allgather(nccl: Pool) -> None:
    for losses, _ in nccl.run(2, by_spec, {}):
        assert losses < 0.02
