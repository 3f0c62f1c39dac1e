"""Fused layers whose calls come from a record, on GPUs: the bits of serial layers, step after step. One rank
has nothing to bring, but makes the same launches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import imbrex
from imbrex.contracts import Roles
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.overlap import Fused, Serial, fused
from tests.gpu.gpus import worlds
from tests.ranks.pool import Pool, Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
STEPS = 6


def run_steps(
    ranks: Ranks, sizes: tuple[int, int, int, int], tokens: int, roles: Roles | None
) -> tuple[bool, int, int]:
    """Whether outputs and all gradients of steps, and outputs without gradients, have the bits of serial
    ones; launches of the exchange that were made again, of fused forwards and of fused steps."""
    width, inner, experts, choices = sizes
    config = imbrex.MoEConfig(hidden_size=width, intermediate_size=inner, num_experts=experts, top_k=choices)
    kind = {"transport": "nvlink", "experts": "kernels", "device": ranks.device, "dtype": torch.bfloat16}
    torch.manual_seed(1)
    layer = imbrex.MoELayer(config, ranks.group, **kind)
    leaves: Sequence[Tensor] = (*layer.parameters(),)
    draw = torch.Generator(ranks.device).manual_seed(ranks.rank)
    like = {"device": ranks.device, "dtype": torch.bfloat16, "generator": draw}
    batches = [torch.randn(tokens, width, **like) for _ in range(STEPS)]
    again, found = [0, 0], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "why_not_exchange", lambda exchange: None)
        launch = NvlinkExchange.launch_again
        for strategy in (Serial(), Fused(roles)):
            layer.strategy, counted = strategy, [0]

            def count(kernels: NvlinkExchange, *what: object, counted: list[int] = counted) -> None:
                counted[0] += 1
                launch(kernels, *what)  # type: ignore[arg-type]

            patch.setattr(NvlinkExchange, "launch_again", count)
            results: list[Tensor] = []
            for x in batches:
                with torch.no_grad():
                    results.append(layer(x))
            again[0] = counted[0]
            for x in batches:
                leaf = x.clone().requires_grad_()
                y = layer(leaf)
                gradients = torch.autograd.grad(y, [leaf, *leaves], x)
                results += [tensor.detach().clone() for tensor in (y, *gradients)]  # theirs comes back
                del y, gradients
            again[1] = counted[0] - again[0]
            found.append(results)
    layer.check(synchronize=True)
    same = torch.tensor(all(torch.equal(a, b) for a, b in zip(*found, strict=True)), device=ranks.device)
    dist.all_reduce(same, op=dist.ReduceOp.MIN, group=ranks.group)
    layer.close()
    return bool(same), again[0], again[1]


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
    for same, forwards, steps in nccl.run(world, run_steps, sizes, tokens, roles):
        assert same
        assert forwards >= STEPS
        assert steps >= 2 * STEPS
