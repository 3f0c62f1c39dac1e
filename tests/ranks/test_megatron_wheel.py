"""Megatron-Core's own MoE layer, from its released wheel, over the deep_ep door, and imbrex's by its spec:
the losses of its allgather.

`pip install --no-deps -r requirements-doors.txt` brings the wheel; without it these tests are skipped. Its
layer asks for the current GPU and its stream in a few places, which are stubs here. On two GPUs:
tests/gpu/test_megatron_wheel.py.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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


def layer_of(ranks: Ranks, dispatcher: dict[str, str], ours: dict[str, Any] | None = None) -> Any:
    """Their MoE layer with `E` experts over all ranks, the same weights whatever moves the tokens. ours: the
    settings with which imbrex's takes its place in their spec."""
    from megatron.core.models.gpt.gpt_layer_specs import (  # pyright: ignore[reportMissingImports]
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer.spec_utils import build_module  # pyright: ignore[reportMissingImports]
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
    if ours is not None:
        from imbrex.adapters.megatron import with_imbrex

        assert with_imbrex(spec) is not spec
        spec = with_imbrex(spec, **ours)
    layer = build_module(spec.submodules.mlp, config, layer_number=1)
    for number, (name, weights) in enumerate(weights_of(layer).items()):
        drawn = torch.Generator().manual_seed(number + 100 * ranks.rank * ("experts" in name))
        for weight in weights:
            weight.data.copy_(torch.randn(weight.shape, generator=drawn) * 0.3 * (16 / width) ** 0.5)
    return layer.to(ranks.device)


def weights_of(layer: Any) -> dict[str, list[Tensor]]:
    """The router's, and those of the first and the second products of this rank's experts, one by one."""
    if hasattr(layer.experts, "local_experts"):
        theirs = layer.experts.local_experts
        pair = [[getattr(e, name).weight for e in theirs] for name in ("linear_fc1", "linear_fc2")]
    else:
        ours = layer.experts.experts
        pair = [list(weight.detach().unbind()) for weight in (ours.gate_up_proj, ours.down_proj)]
    return {"router": [layer.router.weight], "experts' first": pair[0], "experts' second": pair[1]}


def trained(
    ranks: Ranks, dispatcher: dict[str, str], ours: dict[str, Any] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """The losses of a few steps, and the gradient of the tokens and the weights after them."""
    layer = layer_of(ranks, dispatcher, ours)
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
    return losses, [x.grad, *(w.detach() for weights in weights_of(layer).values() for w in weights)]


@contextmanager
def megatron(ranks: Ranks) -> Iterator[None]:
    """Its groups over all ranks, and stubs of what it asks of a GPU."""
    warnings.simplefilter("ignore")
    patch = pytest.MonkeyPatch()
    if on_cpu(ranks):
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(torch.cuda, "current_stream", lambda *_: None)
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
    # Its checkpoints are written by processes of their own.
    patch.setitem(vars(multiprocessing.current_process())["_config"], "daemon", False)
    deep_ep.install()
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
    from megatron.core.tensor_parallel.random import (  # pyright: ignore[reportMissingImports]
        CudaRNGStatesTracker,
    )
    from megatron.core.transformer.moe import moe_utils  # pyright: ignore[reportMissingImports]

    patch.setattr(CudaRNGStatesTracker, "fork", lambda *_, **__: nullcontext())
    # 0.16.1 asks for it without Transformer Engine, and leaves it undefined there.
    patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks.world_size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        patch.undo()


ALLGATHER = {"moe_token_dispatcher_type": "allgather"}


def dispatchers(ranks: Ranks) -> tuple[list[float], list[bool], list[bool]]:
    """Losses over allgather; whether both back ends of the flex dispatcher have its losses and weights."""
    with megatron(ranks):
        from megatron.core.transformer.moe import fused_a2a  # pyright: ignore[reportMissingImports]

        assert fused_a2a.HAVE_DEEP_EP
        assert fused_a2a.HAVE_HYBRIDEP
        losses, weights = trained(ranks, ALLGATHER)
        same_losses, same_weights = [], []
        for backend in ("deepep", "hybridep"):
            flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
            of_steps, after = trained(ranks, flex)
            same_losses.append(all(map(torch.equal, losses, of_steps)))
            same_weights.append(len(after) == len(weights) and all(map(torch.equal, weights, after)))
    return [float(loss) for loss in losses], same_losses, same_weights


def by_spec(ranks: Ranks, ours: dict[str, Any]) -> tuple[float, float]:
    """How far imbrex's layer in their spec is from allgather: losses in parts of them, and the tokens'
    gradient and all weights after the steps."""
    with megatron(ranks):
        losses, weights = trained(ranks, ALLGATHER)
        of_steps, after = trained(ranks, ALLGATHER, ours)
    assert len(after) == len(weights)
    off = max(float((a - b).abs() / b) for a, b in zip(of_steps, losses, strict=True))
    return off, max(float((a - b).abs().max()) for a, b in zip(after, weights, strict=True))


def both_ways(ranks: Ranks, folder: str) -> list[bool]:
    """Whether their experts read the checkpoint of ours, and ours that of theirs, bit for bit."""
    from megatron.core import dist_checkpointing  # pyright: ignore[reportMissingImports]

    same = []
    with megatron(ranks):
        for number, (saves, loads) in enumerate([({}, None), (None, {})]):
            source, target = layer_of(ranks, ALLGATHER, saves), layer_of(ranks, ALLGATHER, loads)
            for weight in target.parameters():
                weight.data.zero_()
            place = Path(folder, str(number))
            if ranks.rank == 0:
                place.mkdir()
            dist.barrier()
            dist_checkpointing.save(source.sharded_state_dict(), str(place))
            target.load_state_dict(dist_checkpointing.load(target.sharded_state_dict(), str(place)))
            pairs = zip(weights_of(source).values(), weights_of(target).values(), strict=True)
            same.append(all(torch.equal(a, b) for them in pairs for a, b in zip(*them, strict=True)))
    return same


def test_steps_over_both_back_ends_have_the_bits_of_allgather(pair: Pool) -> None:
    for losses, same_losses, same_weights in pair.run(2, dispatchers):
        assert losses[0] > 1.1 * losses[-1] > 0
        assert same_losses == [True, True]
        assert same_weights == [True, True]


@pytest.mark.parametrize("ours", [{}, {"experts": "megatron", "schedule": "optsche-2"}])
def test_imbrex_in_their_spec_makes_the_steps_of_allgather(pair: Pool, ours: dict[str, Any]) -> None:
    for losses, weights in pair.run(2, by_spec, ours):
        assert losses < 1e-6
        assert weights < 1e-6


@pytest.mark.skipif(importlib.util.find_spec("psutil") is None, reason="their checkpoints want psutil")
def test_checkpoints_are_those_of_their_experts(pair: Pool, tmp_path: Path) -> None:
    assert pair.run(2, both_ways, str(tmp_path)) == [[True, True], [True, True]]
