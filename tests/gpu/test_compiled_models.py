"""Whole models through torch's own compiler on a GPU: default arguments, dynamic shapes, block by block."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import imbrex
from tests.unit.test_compiled_models import gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
D = 128


class Block(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D, dtype=torch.bfloat16, device="cuda")
        config = imbrex.MoEConfig(hidden_size=D, intermediate_size=64, num_experts=num_experts, top_k=2)
        self.moe = imbrex.MoELayer(config, dtype=torch.bfloat16, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


@pytest.mark.parametrize("how", ["default", "dynamic", "regional"])
@torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True)
def test_a_model_of_several_layers(how: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(experts) for experts in (4, 8)))
    inputs = [torch.randn(tokens, D, dtype=torch.bfloat16, device="cuda") for tokens in (48, 80)]
    truths = [gradients(model, model, x) for x in inputs]
    if how == "regional":
        for block in model:
            block.compile(fullgraph=True)
        run = model
    else:
        run = torch.compile(model, dynamic=True if how == "dynamic" else None)
    for x, truth in zip(inputs, truths, strict=True):
        for ours, theirs in zip(gradients(model, run, x), truth, strict=True):
            scale = theirs.float().norm().clamp(min=1e-6)
            assert ((ours - theirs).float().norm() / scale).item() < 2e-2
