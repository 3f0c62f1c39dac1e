"""Events over NVLink on ranks that are processes: bits of serial, also of what a late rank left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import imbrex
from tests.gpu.gpus import RANKS, worlds
from tests.ranks.layer_jobs import Case
from tests.ranks.pool import Pool
from tests.ranks.test_events_nvlink import STEPS, SUMS_FP8, run_late

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(RANKS < 2, reason="NVLink needs two GPUs"),
]
CONFIG = imbrex.MoEConfig(hidden_size=256, intermediate_size=128, num_experts=12, top_k=3)
CASE = Case(config=CONFIG, dtype=torch.bfloat16, tokens=(700, 600, 300, 520), options={"experts": "kernels"})


@pytest.mark.parametrize("experts", ["kernels", "grouped"])
@pytest.mark.parametrize("world", worlds())
@pytest.mark.parametrize("epsilon", [0, 1])
def test_where_nobody_is_late_the_bits_are_those_of_serial(
    nccl: Pool, tmp_path: Path, world: int, experts: str, epsilon: int
) -> None:
    """Those of fused, or of serial where experts are torch's; and of patience without an end."""
    case = replace(CASE, options={"experts": experts})
    for answer in nccl.run(world, run_late, case, "", epsilon, True, tmp_path):
        assert answer["differ"] == []
        assert answer["dropped"] == [0] * STEPS


@pytest.mark.parametrize("world", worlds())
def test_sums_in_fp8_have_the_bits_of_serial(nccl: Pool, tmp_path: Path, world: int) -> None:
    case = replace(CASE, options=CASE.options | SUMS_FP8)
    for answer in nccl.run(world, run_late, case, "", 1, True, tmp_path):
        assert answer["differ"] == []


@pytest.mark.parametrize("late", ["before", "experts"])
@pytest.mark.parametrize("world", worlds())
def test_a_late_rank_is_done_without_and_its_mask_replays_to_the_bit(
    nccl: Pool, tmp_path: Path, world: int, late: str
) -> None:
    """Outputs and all gradients."""
    answers = nccl.run(world, run_late, CASE, late, 1, True, tmp_path)
    for rank, answer in enumerate(answers):
        assert answer["differ"] == [], rank
        assert answer["dropped"][1] > 0 or (late == "experts" and rank == world - 1), (rank, answer)
