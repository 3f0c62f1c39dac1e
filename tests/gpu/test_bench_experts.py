"""What `imbrex bench experts` counts, and that tiles of either height give the same bits on a GPU."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from imbrex.bench.experts import timing
from imbrex.bench.experts.work import make_work
from imbrex.bench.shapes import Shape
from imbrex.kernels.gemm.gemm import Layout, launch_gemm
from imbrex.kernels.gemm.tiling import LOW, PAIRED, SHARED

pytestmark = pytest.mark.gpu
SMALL_SHAPE = Shape(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)


def test_launches_and_memory_of_a_call() -> None:
    work = make_work(SMALL_SHAPE, 1, 512, "balanced")
    call = timing.gemm_calls("down", work)["imbrex"]
    call()
    assert timing.count_launches(lambda: (call(), call())) == 2
    assert timing.count_launches(lambda: work.x_TD.clone()) == 1
    assert timing.peak_mib(lambda: torch.empty(1 << 22, device="cuda", dtype=torch.uint8)) == 4.0


def test_capturing_runs_nothing() -> None:
    counter = torch.zeros(1, device="cuda")
    assert timing.count_launches(lambda: counter.add_(1)) == 1
    assert counter.item() == 0


@pytest.mark.parametrize(
    "counts", [[520, 504], [128] * 4, [130, 0, 1, 300, 64, 65, 128], [4096, 65]], ids=str
)
def test_heights_give_the_same_bits(counts: list[int]) -> None:
    """64 rows in the second and third case, 128 in the others, tails of every kind; LOW has 64 always."""
    torch.manual_seed(0)
    a = torch.randn(sum(counts), 320, device="cuda").bfloat16()
    b = torch.randn(len(counts), 4096, 320, device="cuda").bfloat16()
    ends_e = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device="cuda")
    counter = torch.zeros(2, dtype=torch.int32, device="cuda")
    outs = [torch.full((sum(counts), 4096), torch.nan, device="cuda").bfloat16() for _ in range(3)]
    for out, tiling in zip(outs, (SHARED, PAIRED, LOW), strict=True):
        launch_gemm(Layout.FORWARD, a, b, ends_e, out, counter, tiling=tiling)
    assert not outs[0].isnan().any()
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[2])
