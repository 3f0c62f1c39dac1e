"""Low-rank updates of experts in replaced blocks, by a stand-in for PEFT's wrapper and by PEFT itself."""

import importlib.util

import pytest
import torch
from torch import nn
from torch.func import functional_call

import imbrex
from imbrex.adapters.huggingface import replace_blocks, restore_blocks
from imbrex.placement import from_slots
from tests.tiny_models import model_of


class Wrapper(nn.Module):
    """Experts whose down_proj has a low-rank update, as PEFT wraps a module of fused parameters."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        experts, out, into = base.get_parameter("down_proj").shape
        torch.manual_seed(1)
        self.lora_A = nn.Parameter(torch.randn(experts, 2, into))
        self.lora_B = nn.Parameter(torch.randn(experts, out, 2))

    def updated(self):
        return self.base_layer.get_parameter("down_proj") + self.lora_B @ self.lora_A

    def forward(self, *arguments):
        return functional_call(self.base_layer, {"down_proj": self.updated()}, arguments)


def test_wrapped_experts_compute_and_train_as_in_the_plain_model():
    ids, plain, model = torch.randint(32, (2, 5)), model_of("qwen3_moe"), model_of("qwen3_moe")
    replace_blocks(model)
    for block in ("model.layers.0.mlp", "model.layers.1.mlp"):
        for one in (plain, model):
            parent = one.get_submodule(block)
            parent.experts = Wrapper(parent.experts)
    want, got = (one(ids, labels=ids) for one in (plain, model))
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=1e-5)
    want.loss.backward()
    got.loss.backward()
    imbrex.sync_gradients(model)
    for name, parameter in plain.named_parameters():
        if "lora" in name:
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-5)


def test_wrapped_experts_with_replicas_are_refused():
    model = model_of("qwen3_moe")
    (layer, _) = replace_blocks(model)
    layer.placement = from_slots([[0, 1, 2], [0, 3, 4, 5]], 6)
    with pytest.raises(ValueError, match="leave out replicas and tensor_parallel"):
        setattr(layer, "experts", Wrapper(layer.experts))  # noqa: B010


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_peft_on_experts_trains_merges_and_is_restored():
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]

    model, ids = model_of("qwen3_moe"), torch.randint(32, (2, 5))
    replace_blocks(model)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=False)
    wrapped = get_peft_model(model, settings)
    out = wrapped(ids, labels=ids)
    out.loss.backward()
    trained = {
        name for name, p in wrapped.named_parameters() if p.grad is not None and p.grad.abs().max() > 0
    }
    assert len(trained) == 8
    assert all("lora" in name for name in trained)
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, out.logits, rtol=1e-5, atol=1e-5)
    restore_blocks(merged)
    torch.testing.assert_close(merged(ids).logits, out.logits, rtol=1e-5, atol=1e-5)
