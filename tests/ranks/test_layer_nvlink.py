"""The layer over the NVLink kernels without a GPU: gloo ranks, shared memory, the kernels compiled by g++."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import imbrex
from tests.emulated import kernel
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.layer_jobs import Case, coefficients, make_layer, run_layer, tokens_of
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_layer import largest_error, relative

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
CONFIG = imbrex.MoEConfig(hidden_size=64, intermediate_size=24, num_experts=6, top_k=3)
CASE = Case(config=CONFIG, dtype=torch.bfloat16)
SPLIT_SLOTS = [[0, 1], [2, 3, 0], [4, 5], [1, -1]]


def run_emulated(ranks: Ranks, case: Case, options: dict[str, Any]) -> dict[str, Any]:
    nvlink = EmulatedNvlink(ranks.group)
    return run_layer(ranks, replace(case, options={**options, "transport": nvlink}))


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({}, {}),
        ({"tensor_parallel": 2}, {}),
        ({"slots": SPLIT_SLOTS}, {}),
        ({"slots": SPLIT_SLOTS}, {"split": "balanced"}),
        ({"slots": [[0, 1, 5], [2, 3, 4, 0]], "tensor_parallel": 2}, {"split": "nearest"}),
    ],
)
def test_outputs_and_all_gradients(pool: Pool, change: dict[str, Any], options: dict[str, Any]) -> None:
    case = replace(CASE, **change)
    errors = largest_error(case, 4, pool.run(4, run_emulated, case, options))
    # As over the other transports: 2^-8 a rounding, five of them.
    assert max(errors.values()) < 0.03, errors
