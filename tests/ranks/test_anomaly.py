"""Training under autograd's anomaly detection, which raises where a function returns NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import imbrex
from imbrex.overlap import Events
from tests.emulated import kernel
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.layer_jobs import Case, make_layer
from tests.ranks.pool import Pool, Ranks

CONFIG = imbrex.MoEConfig(hidden_size=64, intermediate_size=24, num_experts=8, top_k=3)
NEEDS_GPP = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
SCHEDULES = {
    "serial": "serial",
    "chunks": "optsche-2",
    "fused": "fused",
    "events": Events(),
    "patient": Events(5.0, 1),
}


def run_step(ranks: Ranks, transport: str, schedule: str, experts: str = "auto") -> bool:
    """Whether the step of a training has finite gradients, with rows to spare that hold NaN."""
    emulated = ranks.device == "cpu" and transport == "nvlink"
    over = EmulatedNvlink(ranks.group, timeout=60.0) if emulated else transport
    options = {"transport": over, "schedule": SCHEDULES[schedule], "experts": experts}
    layer: Any = make_layer(
        Case(config=CONFIG, dtype=torch.bfloat16, options=options), ranks.group, ranks.device
    )
    x_TD = torch.randn(5 + 4 * ranks.rank, 64, dtype=torch.bfloat16, device=ranks.device).requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        layer(x_TD).float().square().sum().backward()
    return all(bool(p.grad.isfinite().all()) for p in layer.parameters())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("transport", ["alltoall", pytest.param("nvlink", marks=NEEDS_GPP)])
def test_nobody_returns_nan(pool: Pool, transport: str, schedule: str) -> None:
    assert pool.run(2, run_step, transport, schedule) == [True] * 2
