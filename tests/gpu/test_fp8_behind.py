"""Experts in fp8 whose down begins beside the last tiles of gate and up: the bits of one behind the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from imbrex.kernels.ffn.fp8 import BLOCK, Fp8Experts, quantise_experts, quantise_rows, run_fp8_rows
from imbrex.kernels.ffn.glue import Groups
from imbrex.kernels.gemm.gemm import Epilogue, Extras, Layout, Scales, Tiling, begins_behind, launch_gemm
from imbrex.kernels.gemm.tiling import FP8_DOWN_TILINGS, FP8_UP_TILINGS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CUDA = torch.device("cuda")
TURNS, TAIL = 30, 5
CASES = {
    "few experts": ([130, 0, 700], 512, 256),
    "more than parts": ([9, 0, 300, 64, 65] * 7, 768, 1408),
    "one step": ([1, 1, 0, 2500], 1024, 128),
    "one expert has all": ([0] * 11 + [3000] + [0] * 4, 2048, 768),
}
SINGLE = [
    [tiling for tiling in tilings if tiling.cluster == 1] for tilings in (FP8_UP_TILINGS, FP8_DOWN_TILINGS)
]
IDS = ["shared or staged", "low"]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA).bfloat16()


def experts_of(count: int, width: int, inner: int) -> Fp8Experts:
    return quantise_experts(
        draw(count, 2 * inner, width) / width**0.5, draw(count, width, inner) / inner**0.5
    )


class Products:
    """Both products of rows [T, D] in e4m3, with poison where they write. index_R: where rows lie."""

    def __init__(
        self, experts: Fp8Experts, groups: Groups, weights_R: Tensor, index_R: Tensor | None
    ) -> None:
        self.experts, self.groups, self.weights_R, self.index_R = experts, groups, weights_R, index_R

    def __call__(
        self, values: Tensor, scales: Tensor, tilings: tuple[Tiling, Tiling], behind: bool
    ) -> Tensor:
        _, width, inner = self.experts.down_eDF.shape
        rows, ends = len(self.weights_R), self.groups.ends_e
        act = torch.full((rows, inner), float("nan"), device=CUDA).to(values.dtype)
        act_scales = torch.full((rows, inner // BLOCK), float("nan"), device=CUDA)
        out = torch.full((rows, width), float("nan"), device=CUDA, dtype=torch.bfloat16)
        up: Extras = {"index_R": self.index_R}
        up["scales"] = Scales(rows=scales, weights=self.experts.gate_up_scales, out=act_scales)
        down: Extras = {"weights_R": self.weights_R}
        down["scales"] = Scales(rows=act_scales, weights=self.experts.down_scales)
        if behind:
            up["progress"] = down["progress"] = self.groups.progress
            down["beside"] = begins_behind(inner // BLOCK)
        how = {"tiling": tilings[0], "epilogue": Epilogue.SWIGLU}
        gate_up = values, self.experts.gate_up_eGD, ends, act, self.groups.counter
        launch_gemm(Layout.FORWARD, *gate_up, **how, **up)
        if not behind:
            torch.cuda.synchronize()
        how = {"tiling": tilings[1], "epilogue": Epilogue.WEIGHTED}
        last = act, self.experts.down_eDF, ends, out, self.groups.other_counter
        launch_gemm(Layout.FORWARD, *last, **how, **down)
        return out


@pytest.mark.parametrize("second", SINGLE[1], ids=IDS)
@pytest.mark.parametrize("first", SINGLE[0], ids=IDS)
@pytest.mark.parametrize("gather", [False, True], ids=["in order", "gathered"])
@pytest.mark.parametrize("case", list(CASES))
def test_the_bits_of_one_behind_the_other(case: str, gather: bool, first: Tiling, second: Tiling) -> None:
    """Thirty times at the same addresses, without a wait, with rows of two kinds in turns: what another call
    has left in a cache shows."""
    counts, width, inner = CASES[case]
    torch.manual_seed(1)
    experts, rows = experts_of(len(counts), width, inner), sum(counts) + TAIL
    counts_e = torch.tensor(counts, device=CUDA)
    kinds = [quantise_rows(draw(rows, width) * scale, counts_e, every=True) for scale in (1, 30)]
    index_R = torch.randint(rows, (rows,), device=CUDA) if gather else None
    products = Products(experts, kinds[0][0], torch.rand(rows, device=CUDA), index_R)
    wanted = [products(*kind[1:], (first, second), False) for kind in kinds]
    torch.cuda.synchronize()
    found = [products(*kinds[turn % 2][1:], (first, second), True) for turn in range(TURNS)]
    for turn, out in enumerate(found):
        assert torch.equal(out.view(torch.int16), wanted[turn % 2].view(torch.int16)), turn
    assert not wanted[0][: sum(counts)].isnan().any()
    assert wanted[0][sum(counts) :].isnan().all()
    assert not products.groups.plan[: -len(counts)].any()


@pytest.mark.parametrize("rows", [300, 2048, 8192, 32768])
@pytest.mark.parametrize(
    ("count", "width", "inner"),
    [(64, 2048, 768), (32, 2048, 1408), (8, 4096, 6400)],
    ids=["qwen3", "qwen2", "phi"],
)
def test_experts_of_models(count: int, width: int, inner: int, rows: int) -> None:
    """With the tiles that the library takes, uniform draws; and rows quantised right before."""
    torch.manual_seed(rows)
    experts = experts_of(count, width, inner)
    counts_e = torch.bincount(torch.randint(count, (rows,), device=CUDA), minlength=count)
    x, weights_R = draw(rows, width), torch.rand(rows, device=CUDA)
    groups, values, scales = quantise_rows(x, counts_e)
    chosen = FP8_UP_TILINGS[0], FP8_DOWN_TILINGS[0]  # any have the same bits
    wanted = Products(experts, groups, weights_R, None)(values, scales, chosen, False)
    for turn in range(TURNS):
        groups, values, scales = quantise_rows(x, counts_e)
        found = run_fp8_rows(values, scales, experts, groups, weights_R)
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16)), turn
