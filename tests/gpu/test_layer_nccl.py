"""The layer over NCCL, one process a GPU: the tests of tests/ranks/test_layer.py on another device."""

from __future__ import annotations

import pytest
import torch

import imbrex
from imbrex.router.capacity import Capacity
from tests.ranks.layer_jobs import Case, run_layer
from tests.ranks.pool import Pool
from tests.ranks.test_layer import SMALL, SPLIT_SLOTS, TRANSPORTS, largest_error

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def worlds() -> list[int]:
    return [w for w in (1, 2, 4, 8) if w <= max(1, torch.cuda.device_count())]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", worlds())
def test_outputs_and_all_gradients_twice_the_same_bits(nccl: Pool, world: int, transport: str) -> None:
    for tensor in [t for t in (1, 2, 4) if world % t == 0]:
        case = Case(config=SMALL, tensor_parallel=tensor, options={"transport": transport})
        results, again = (nccl.run(world, run_layer, case) for _ in range(2))
        errors = largest_error(case, world, results)
        assert max(errors.values()) < 1e-5, (tensor, errors)
        for first, second in zip(results, again, strict=True):
            assert torch.equal(first["y"], second["y"])
            for name, grad in first["grads"].items():
                assert torch.equal(grad, second["grads"][name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_on_odd_widths(nccl: Pool, dtype: torch.dtype) -> None:
    config = imbrex.MoEConfig(
        hidden_size=13, intermediate_size=24, num_experts=6, top_k=3, activation="gelu", bias=True
    )
    case = Case(config=config, dtype=dtype, options={"transport": "alltoall", "experts": "grouped"})
    world = worlds()[-1]
    errors = largest_error(case, world, nccl.run(world, run_layer, case))
    assert max(errors.values()) < (1e-5 if dtype == torch.float32 else 0.03), errors


def test_fused_experts_in_chunks(nccl: Pool) -> None:
    """Their weights' gradients are a task of their own in the pipelined backward."""
    config = imbrex.MoEConfig(hidden_size=64, intermediate_size=128, num_experts=6, top_k=3)
    options = {"transport": "alltoall", "experts": "kernels", "schedule": "optsche-3"}
    case, world = Case(config=config, dtype=torch.bfloat16, options=options), worlds()[-1]
    errors = largest_error(case, world, nccl.run(world, run_layer, case))
    assert max(errors.values()) < 0.03, errors


def test_replicas_and_capacity(nccl: Pool) -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip("replicas on four ranks need four GPUs")
    case = Case(config=SMALL, slots=SPLIT_SLOTS, options={"transport": "alltoall"})
    assert max(largest_error(case, 4, nccl.run(4, run_layer, case)).values()) < 1e-5
    gate = imbrex.Gate(capacity=Capacity(factor=0.7, pad=True))
    config = imbrex.MoEConfig(hidden_size=13, intermediate_size=24, num_experts=6, top_k=3, gate=gate)
    case = Case(config=config, options={"transport": "alltoall"})
    results = nccl.run(4, run_layer, case)
    assert sum(int((~r["kept"]).sum()) for r in results) > 0
    assert max(largest_error(case, 4, results).values()) < 1e-5
