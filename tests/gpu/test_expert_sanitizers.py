"""The expert kernels under compute-sanitizer, on small ragged shapes: no bad access, no race."""

from __future__ import annotations

import pytest

from tests.gpu.sanitizer import check_code

pytestmark = pytest.mark.gpu

STEP = """
import torch
from imbrex.kernels.ffn import slopes
from imbrex.kernels.ffn.ffn import ffn
from imbrex.kernels.ffn.fp8 import ffn_fp8, quantise_experts, quantise_rows, run_fp8_rows
from imbrex.kernels.ffn.tokens import TILINGS
from imbrex.kernels.ffn.glue import plan_groups
from imbrex.kernels.gemm.gemm import Epilogue, Layout, launch_gemm
from imbrex.kernels.gemm.tiling import OWN, PAIRED, TALL
from imbrex import MoEConfig, MoELayer
BF16 = {"device": "cuda", "dtype": torch.bfloat16}
torch.manual_seed(0)
for counts, width, inner in (([70, 0, 1, 130], 256, 128), ([3, 2], 1024, 136), ([150, 140], 1024, 256)):
    rows, experts = sum(counts), len(counts)
    shapes = (rows, width), (experts, 2 * inner, width), (experts, width, inner)
    leaves = [(0.1 * torch.randn(s, device="cuda")).bfloat16().requires_grad_() for s in shapes]
    counts = torch.tensor(counts, device="cuda")
    weights = torch.rand(rows, device="cuda", requires_grad=True)
    d_y = torch.randn(rows, width, device="cuda").bfloat16()
    for recompute in (False, True):
        y = ffn(*leaves, counts, weights_R=weights, recompute=recompute)
        torch.autograd.grad(y, [*leaves, weights], d_y)
    for dtype in (torch.float32, torch.bfloat16):
        sums = tuple(torch.zeros(s, device="cuda", dtype=dtype) for s in shapes[1:])
        torch.autograd.grad(ffn(*leaves, counts, gradients=sums), leaves[0], d_y)
    slopes.FUSED_WIDTH = 0
    torch.autograd.grad(ffn(*leaves, counts, weights_R=weights), [*leaves, weights], d_y)
    slopes.FUSED_WIDTH = 4096
    if inner % 128 == 0:
        weights8, index = quantise_experts(*leaves[1:]), torch.randint(rows, (rows,), device="cuda")
        ffn_fp8(leaves[0].detach(), weights8, counts)
        groups, values, scales = quantise_rows(leaves[0].detach(), counts, every=True)
        run_fp8_rows(values, scales, weights8, groups, index_R=index)
groups = plan_groups(torch.tensor([200, 0, 1, 330], device="cuda"))
a, down = torch.randn(531, 256, device="cuda").bfloat16(), torch.randn(4, 256, 640, device="cuda").bfloat16()
for layout, epilogue, columns, b in (
    (Layout.FORWARD, Epilogue.PLAIN, 640, down.mT.contiguous()),
    (Layout.FORWARD, Epilogue.SWIGLU, 320, down.mT.contiguous()),
    (Layout.DGRAD, Epilogue.PLAIN, 640, down),
):
    for tiling in (PAIRED, TALL):
        out = a.new_empty(531, columns)
        launch_gemm(layout, a, b, groups.ends_e, out, groups.counter, tiling=tiling, epilogue=epilogue)
d_out, whole = torch.randn(531, 320, device="cuda").bfloat16(), down.new_empty(4, 320, 256)
launch_gemm(Layout.WGRAD, d_out, a, groups.ends_e, whole, groups.counter, tiling=OWN)
index = torch.randint(90, (531,), device="cuda")
for tiling in TILINGS:
    act, kept = a.new_empty(531, 320), a.new_empty(531, 640)
    how = {"tiling": tiling, "epilogue": Epilogue.SWIGLU_KEEP, "gate_up": kept, "index_R": index}
    launch_gemm(Layout.FORWARD, a[:90], down.mT.contiguous(), groups.ends_e, act, groups.counter, **how)
layer = MoELayer(MoEConfig(hidden_size=64, intermediate_size=64, num_experts=5, top_k=3), **BF16)
x = torch.randn(700, 64, **BF16).requires_grad_()
layer(x).float().square().sum().backward()
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.timeout(300)
def test_sanitizers_find_nothing(tool: str) -> None:
    check_code(tool, STEP)
