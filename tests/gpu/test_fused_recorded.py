"""Fused layers whose calls come from a record, on GPUs: the bits of serial layers, step after step. One rank
has nothing to bring, but makes the same launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import imbrex
from imbrex.contracts import Roles
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.overlap import Fused, fused
from tests.gpu.gpus import worlds
from tests.ranks.pool import Pool, Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
STEPS = 6


def run_steps(
    ranks: Ranks, sizes: tuple[int, int, int, int], tokens: int, roles: Roles | None
) -> tuple[bool, int]:
    """Whether outputs without gradients, outputs, and all gradients have the bits of serial ones; launches of
    the exchange that were made again."""
    width, inner, experts, choices = sizes
    config = imbrex.MoEConfig(hidden_size=width, intermediate_size=inner, num_experts=experts, top_k=choices)
    kind = {"transport": "nvlink", "experts": "kernels", "device": ranks.device, "dtype": torch.bfloat16}
    torch.manual_seed(1)
    layer = imbrex.MoELayer(config, ranks.group, **kind)
    leaves: Sequence[Tensor] = (*layer.parameters(),)
    draw = torch.Generator(ranks.device).manual_seed(ranks.rank)
    like = {"device": ranks.device, "dtype": torch.bfloat16, "generator": draw}
    batches = [torch.randn(tokens, width, **like) for _ in range(STEPS)]
    same, again, launch = [], [0, 0], NvlinkExchange.launch_again

    def count(kernels: NvlinkExchange, *what: Any) -> None:
        again[0] += 1
        launch(kernels, *what)

    def step(x: Tensor) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        with torch.no_grad():
            first = layer(x)
        y = layer(leaf)
        return [first, y.detach(), *torch.autograd.grad(y, [leaf, *leaves], x)]

    wanted = [[tensor.clone() for tensor in step(x)] for x in batches]
    layer.strategy = Fused(roles)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "why_not_exchange", lambda exchange: None)
        patch.setattr(NvlinkExchange, "launch_again", count)
        for x, serial in zip(batches, wanted, strict=True):
            same += [torch.equal(a, b) for a, b in zip(step(x), serial, strict=True)]
    layer.check(synchronize=True)
    layer.close()
    return all(same), again[0]


@pytest.mark.parametrize("world", [1, *worlds()])
@pytest.mark.parametrize(
    ("sizes", "tokens", "roles"),
    [
        ((512, 256, 16, 4), 700, None),
        ((2048, 1408, 64, 4), 2048, None),
        ((2048, 1408, 64, 4), 2048, Roles(first=24)),
        ((4608, 512, 8, 2), 600, Roles(dy=0)),
        ((4096, 4096, 4, 2), 4096, None),
        ((512, 256, 16, 4), 128, None),
    ],
)
def test_steps_from_a_record_have_the_bits_of_serial_ones(
    nccl: Pool, world: int, sizes: tuple[int, int, int, int], tokens: int, roles: Roles | None
) -> None:
    """Wide experts' sums go home beside down, of narrow ones others' rows come first where roles say so; of
    few tokens all rows come in one kernel."""
    for same, again in nccl.run(world, run_steps, sizes, tokens, roles):
        assert same
        assert again >= STEPS  # the wide ones keep too much for a backward
