"""Whole models under torch.compile: its default arguments, dynamic shapes, and block by block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import imbrex
from tests.poison import real_empty

pytestmark = pytest.mark.untraced


class Block(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        config = imbrex.MoEConfig(hidden_size=8, intermediate_size=16, num_experts=num_experts, top_k=2)
        self.moe = imbrex.MoELayer(config)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


def gradients(model: nn.Module, run: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = run(x)
    y.square().sum().backward()
    return [y, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_model_of_several_layers_compiles(dynamic: bool | None) -> None:
    torch.compiler.reset()
    model = nn.Sequential(*(Block(experts) for experts in (4, 6)))
    with real_empty():
        compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic)
        for tokens in (5, 7):
            x = torch.randn(tokens, 8)
            for a, b in zip(gradients(model, compiled, x), gradients(model, model, x), strict=True):
                assert torch.equal(a, b)


def test_torchs_own_compiler_takes_it() -> None:
    """Half a minute of g++; on GPUs whole models: tests/gpu/test_compiled_models.py."""
    torch.compiler.reset()
    model, x = Block(4), torch.randn(5, 8)
    with real_empty():
        compiled = torch.compile(model)
        for a, b in zip(gradients(model, compiled, x), gradients(model, model, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True)  # pytest's own would leave it deleted
def test_one_graph_serves_the_blocks_of_a_form() -> None:
    """Ten blocks, more than torch compiles the same code for; as docs/layer.md says."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(*(Block(experts) for experts in (4, 4, 4, 4, 6, 4, 4, 4, 4, 6)))
    x = torch.randn(5, 8)
    truth = gradients(model, model, x)
    with real_empty():
        for block in model:
            block.compile(backend="aot_eager", fullgraph=True)
        for _ in range(2):
            for a, b in zip(gradients(model, model, x), truth, strict=True):
                assert torch.equal(a, b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 5
