"""Megatron-Core's own MoE layer, from its released wheel, over the deep_ep door: the bits of its allgather.

`pip install --no-deps -r requirements-doors.txt` brings the wheel; without it these tests are skipped. Its
layer asks for the current GPU and its stream in a few places, which are stubs here. On two GPUs:
tests/gpu/test_megatron_wheel.py.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from imbrex.adapters import deep_ep
from tests.ranks.pool import Pool, Ranks

E, K, WIDTH, STEPS = 8, 2, 24, 3
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: pip install --no-deps -r requirements-doors.txt",
)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """A world of two: Megatron lays its groups over all ranks there are, and deep_ep stays installed."""
    pool = Pool(2)
    yield pool
    pool.close(20)


def on_cpu(ranks: Ranks) -> bool:
    return ranks.device == "cpu"


def kind_of(ranks: Ranks) -> tuple[torch.dtype, int]:
    """Of the tokens: dtype and width. On GPUs what crosses by kernels."""
    return (torch.float32, 16) if on_cpu(ranks) else (torch.bfloat16, 256)


def layer_of(ranks: Ranks, dispatcher: dict[str, str]) -> Any:
    """Their MoE layer with `E` experts over all ranks, the same weights whatever moves the tokens."""
    from megatron.core.models.gpt.gpt_layer_specs import (  # pyright: ignore[reportMissingImports]
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer.moe.moe_layer import MoELayer  # pyright: ignore[reportMissingImports]
    from megatron.core.transformer.transformer_config import (  # pyright: ignore[reportMissingImports]
        TransformerConfig,
    )

    dtype, width = kind_of(ranks)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=width,
        num_attention_heads=2,
        moe_ffn_hidden_size=WIDTH,
        num_moe_experts=E,
        moe_router_topk=K,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        expert_model_parallel_size=ranks.world_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **dispatcher,
    )
    spec = get_gpt_layer_local_spec(num_experts=E, moe_grouped_gemm=False)
    layer = MoELayer(config, spec.submodules.mlp.submodules, layer_number=1)
    for number, (name, parameter) in enumerate(layer.named_parameters()):
        drawn = torch.Generator().manual_seed(number + 100 * ranks.rank * ("experts" in name))
        parameter.data.normal_(generator=drawn).mul_(0.3 * (16 / width) ** 0.5)
    return layer.to(ranks.device)


def trained(ranks: Ranks, dispatcher: dict[str, str]) -> tuple[list[Tensor], list[Tensor]]:
    """The losses of a few steps, and the weights and the gradient of the tokens after them."""
    layer = layer_of(ranks, dispatcher)
    dtype, width = kind_of(ranks)
    x = torch.randn(5, 2, width, generator=torch.Generator().manual_seed(50 + ranks.rank))
    x = x.to(ranks.device, dtype).requires_grad_()
    losses = []
    for _ in range(STEPS):
        y, _ = layer(x)
        loss = y.float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter in layer.parameters():
                assert parameter.grad is not None
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
    assert x.grad is not None
    return losses, [x.grad, *(parameter.detach() for parameter in layer.parameters())]


def dispatchers(ranks: Ranks) -> tuple[list[float], list[bool], list[bool]]:
    """Losses over allgather; whether both back ends of the flex dispatcher have its losses and weights."""
    warnings.simplefilter("ignore")
    deep_ep.install()
    patch = pytest.MonkeyPatch()
    if on_cpu(ranks):
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(torch.cuda, "current_stream", lambda *_: None)
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
    from megatron.core.tensor_parallel.random import (  # pyright: ignore[reportMissingImports]
        CudaRNGStatesTracker,
    )
    from megatron.core.transformer.moe import fused_a2a, moe_utils  # pyright: ignore[reportMissingImports]

    assert fused_a2a.HAVE_DEEP_EP
    assert fused_a2a.HAVE_HYBRIDEP
    patch.setattr(CudaRNGStatesTracker, "fork", lambda *_, **__: nullcontext())
    # 0.16.1 asks for it without Transformer Engine, and leaves it undefined there.
    patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks.world_size)
    try:
        losses, weights = trained(ranks, {"moe_token_dispatcher_type": "allgather"})
        same_losses, same_weights = [], []
        for backend in ("deepep", "hybridep"):
            flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
            of_steps, after = trained(ranks, flex)
            same_losses.append(all(map(torch.equal, losses, of_steps)))
            same_weights.append(len(after) == len(weights) and all(map(torch.equal, weights, after)))
    finally:
        parallel_state.destroy_model_parallel()
        patch.undo()
    return [float(loss) for loss in losses], same_losses, same_weights


def test_steps_over_both_back_ends_have_the_bits_of_allgather(pair: Pool) -> None:
    for losses, same_losses, same_weights in pair.run(2, dispatchers):
        assert losses[0] > 1.1 * losses[-1] > 0
        assert same_losses == [True, True]
        assert same_weights == [True, True]
