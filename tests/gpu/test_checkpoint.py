"""A checkpoint written from a GPU is read on the CPU, and the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import imbrex
from imbrex.parallel import checkpoint

pytestmark = pytest.mark.gpu

CONFIG = imbrex.MoEConfig(hidden_size=16, intermediate_size=32, num_experts=4, top_k=2)


@pytest.mark.parametrize(("source", "target"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_between_devices(tmp_path: Path, source: str, target: str) -> None:
    first = imbrex.MoELayer(CONFIG, device=source)
    optimizer = torch.optim.AdamW(first.parameters())
    first(torch.randn(8, 16, device=source)).sum().backward()
    optimizer.step()
    path = checkpoint.save(tmp_path, first, optimizer, 1)
    second = imbrex.MoELayer(CONFIG, device=target)
    other = torch.optim.AdamW(second.parameters())
    checkpoint.load(path, second, other)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert b.device.type == target
        assert torch.equal(a.cpu(), b.cpu())
        assert other.state[b]["exp_avg"].device.type == target
        assert torch.equal(optimizer.state[a]["exp_avg"].cpu(), other.state[b]["exp_avg"].cpu())
