"""A layer of a rank alone in code for compute capability 8.0, which a Hopper GPU runs, too: no GPU of another
kind is at hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import imbrex
from imbrex.kernels import jit
from imbrex.kernels.ffn import glue
from imbrex.kernels.gate import choose
from imbrex.kernels.gemm.portable import portable_products
from imbrex.kernels.rows import choices

pytestmark = pytest.mark.gpu
LOADED: set[tuple[str, str]] = set()


@pytest.fixture
def code_for_older_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of `PORTABLE` are compiled for 8.0 and loaded through the driver's compiler."""
    real = jit._load

    def load(variant: jit.Variant, device: int) -> jit.Kernel:
        if variant.source in jit.PORTABLE:
            variant = replace(variant, arch="compute_80")
        LOADED.add((variant.source, variant.arch))
        return real(variant, device)

    monkeypatch.setattr(jit, "_load", load)
    for module in (glue, choose, choices):
        module._kernel.cache_clear()
    LOADED.clear()
    with portable_products("compute_80"):
        yield
    for module in (glue, choose, choices):
        module._kernel.cache_clear()


def step(tokens: int) -> list[torch.Tensor]:
    """Output, losses and gradients of a training step, and the output without gradients."""
    torch.manual_seed(0)
    config = imbrex.MoEConfig(hidden_size=128, intermediate_size=64, num_experts=16, top_k=4)
    losses = imbrex.AuxLosses(load_balance=0.1, sequence_balance=0.1, z=0.1)
    layer = imbrex.MoELayer(config, losses=losses, dtype=torch.bfloat16, device="cuda")
    x_TD = torch.randn(tokens, 128, dtype=torch.bfloat16, device="cuda").requires_grad_()
    y_TD = layer(x_TD)
    (y_TD.float().square().sum() + imbrex.aux_loss(layer)).backward()
    assert layer.routing is not None
    with torch.no_grad():
        alone = layer(x_TD)
    gradients = [p.grad for p in (x_TD, *layer.parameters()) if p.grad is not None]
    return [y_TD.detach(), alone, *(loss.detach() for loss in layer.routing.losses.values()), *gradients]


@pytest.mark.parametrize("tokens", [1, 40, 3000])
def test_a_layer_of_a_rank_alone(tokens: int, request: pytest.FixtureRequest) -> None:
    wanted = step(tokens)
    request.getfixturevalue("code_for_older_gpus")
    found, again = step(tokens), step(tokens)
    sources = {source for source, arch in LOADED if arch == "compute_80"}
    assert {source for source, _ in LOADED} <= jit.PORTABLE
    assert sources | {"gemm/portable.cu"} == jit.PORTABLE  # of which another test may have loaded that
    for one, other, twice in zip(found, wanted, again, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-9)
        assert error.item() < 1e-2
        assert torch.equal(one, twice)
