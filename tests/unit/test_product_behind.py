"""The second product of experts beside the last tiles of the first: it takes no row, and in fp8 no scale,
before it is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from imbrex.kernels import arguments, jit
from imbrex.kernels.ffn.fp8 import quantise_experts, quantise_weight
from imbrex.kernels.gemm import gemm
from imbrex.kernels.gemm.gemm import Epilogue, Layout, Tiling
from imbrex.kernels.gemm.tiling import SHARED, STAGED
from tests.emulated.gemm import Edits, EmulatedKernel, pack_map
from tests.emulated.kernel import available
from tests.emulated.ragged import dequantise, draw, ends_of, fp8_ffn, poisoned, reference_ffn

pytestmark = pytest.mark.skipif(not available(), reason="needs g++")

KERNEL = """
#include "gemm/parts.cuh"
#include "gemm/run.cuh"
namespace gemm {
template <Epilogue kOf>
struct Cut {
    static constexpr Layout kLayout = Layout::kForward;
    static constexpr Epilogue kEpilogue = kOf;
    static constexpr bool kFp8 = FP8, kPingpong = false, kWide = false;
    static constexpr int kGroups = 2, kBlocksM = 1, kBlockN = 256, kStages = STAGES;
    static constexpr int kPanels = PANELS, kGroupM = 8, kCluster = CLUSTER;
    static constexpr int kWave = 128, kGather = 0, kBox = 128;
    static constexpr bool kBeside = false, kQuantises = false, kWaits = false;
};
using C = Config<Cut<KEEPS ? Epilogue::kSwigluKeep : Epilogue::kSwiglu>>;
using Down = Config<Cut<Epilogue::kPlain>>;
// The first half of the blocks, or the second.
struct Half {
    static constexpr bool kEvery = false;
    int begin;
    __device__ int first(u32*, bool) const {
        return (static_cast<int>(blockIdx.x) - begin) / CLUSTER - static_cast<int>(all());
    }
    template <class Walk>
    __device__ int next(u32* counter, const Walk&) const { return atomicAdd(counter, 1); }
    __device__ u32 reserved() const { return all(); }
    __device__ u32 all() const { return gridDim.x / 2 / CLUSTER; }
};
extern "C" __global__ void __launch_bounds__(C::kThreads, 1)
    both(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_up,
         const __grid_constant__ TensorMap map_act, const __grid_constant__ TensorMap map_a,
         const __grid_constant__ TensorMap map_down, const __grid_constant__ TensorMap map_out,
         const __grid_constant__ TensorMap map_kept,
         const int* ends, int count, int width, int inner, u32* counter, u32* status, u32* progress,
         Scales up, Scales down) {
    extern __shared__ u8 memory[];
    __shared__ Slot slots[kSlots];
    __shared__ u64 barriers[2 * C::kStages + 2 * kSlots + 2];
    __shared__ Done done;
    const Shared<C> shared = lay_out<C>(memory, slots, barriers, nullptr);
    if (threadIdx.x == 0) make_barriers(shared);
    clear(done);
    meet<C>();
    const Slopes slopes{};
    const Half half{blockIdx.x < gridDim.x / 2 ? 0 : static_cast<int>(gridDim.x) / 2};
    if (half.begin == 0)
        return run<C>({&map_x, &map_up, ends, nullptr, count, 0, inner, width, nullptr, counter, status,
                       up, slopes, nullptr},
                      shared, Always{}, NoteTiles<C>{&map_act, &map_kept, done, count}, half,
                      TellParts<C>{done, progress});
    const Shared<Down> same = lay_out<Down>(memory, slots, barriers, nullptr);
    run<Down>({&map_a, &map_down, ends, nullptr, count, 0, width, inner, nullptr, counter + 2, status, down,
               slopes, nullptr},
              same, PartMade{progress, ends, count, 2, status}, StoreTiles{&map_out, &map_out}, half);
}
}  // namespace gemm
"""
WIDTH, INNER = 264, 136  # two tiles of columns of the first product, two of the second
IN_FP8 = 256, 256  # two, and one of two steps


def launch(
    counts: list[int],
    maps: Sequence[jit.ByValue],
    sizes: tuple[int, int],
    tiling: Tiling,
    scales: Sequence[gemm.Scales],
    edits: Edits,
    seed: int,
    late: int = 0,
    *,
    keeps: bool = False,
) -> None:
    """Both products. sizes: D and F. late: what the status says then."""
    counter, status, progress = (torch.zeros(size, dtype=torch.int32) for size in (4, 1, 9))
    fp8 = scales[0].rows.numel() > 0
    variant = gemm.gemm_variant(Layout.FORWARD, Epilogue.PLAIN, tiling, fp8=fp8)
    defines = (*variant.defines, ("KEEPS", int(keeps)))
    kernel = EmulatedKernel(
        jit.Variant(source="both_behind.cu", entry="both", defines=defines), tiling.smem, None, edits
    )
    kernel.seed = seed
    args = [*maps, ends_of(counts), len(counts), *sizes, counter, status, progress]
    kernel.launch(
        grid=4,
        block=tiling.threads,
        smem=tiling.smem,
        args=[*args, *(one.argument() for one in scales)],
    )
    assert (counter.tolist(), status.tolist()) == ([0] * 4, [late])
    assert int(progress.sum()) == 2 * sum(counts)


def far(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arguments.HEADERS, "both_behind.cu", KERNEL)
    monkeypatch.setattr(gemm, "tensor_map", pack_map)


def both(counts: list[int], edits: Edits = (), seed: int = 0, *, keeps: bool = False, late: int = 0) -> float:
    """How far the result is from the experts' in float64, over their largest value; NaN where a row was taken
    too early."""
    torch.manual_seed(4)
    x, gate_up = draw(sum(counts), WIDTH), draw(len(counts), 2 * INNER, WIDTH)
    down, act, out = draw(len(counts), WIDTH, INNER), poisoned(len(x), INNER), poisoned(len(x), WIDTH)
    kept, none = poisoned(len(x), 2 * INNER), torch.empty(0, 0)
    maps = (
        *(gemm.ragged_map(x, 64, SHARED.box_m), gemm.gate_and_up_map(gate_up), gemm.ragged_map(act, 64, 64)),
        *(gemm.ragged_map(act, 64, SHARED.box_m), gemm.stacked_map(down, 64, 256)),
        *(gemm.ragged_map(out, 64, 64), gemm.halves_map(kept)),
    )
    scales = [gemm.Scales(rows=none, weights=none)] * 2
    launch(counts, maps, (WIDTH, INNER), SHARED, scales, edits, seed, late, keeps=keeps)
    assert bool(kept[: sum(counts)].isfinite().all()) is keeps
    exact = (t.double() for t in (x, gate_up, down, torch.ones(len(x))))
    return far(out, reference_ffn(counts, *exact))


def both_in_fp8(counts: list[int], edits: Edits = (), seed: int = 0, *, late: int = 0) -> float:
    """The same in fp8, whose activation is rounded as the kernel rounds it, or next to that."""
    torch.manual_seed(5)
    (width, inner), experts = IN_FP8, len(counts)
    weights = quantise_experts(draw(experts, 2 * inner, width) / 16, draw(experts, width, inner) / 16)
    x, x_scales = quantise_weight(draw(1, 128 * len(range(0, sum(counts), 128)), width))
    x, x_scales = x[0, : sum(counts)], x_scales[0].repeat_interleave(128, 0)[: sum(counts)].contiguous()
    act, out = poisoned(len(x), inner).to(x.dtype), poisoned(len(x), width)
    act_scales = torch.full((len(x), inner // 128), float("nan"))
    ups = gemm.stacked_map(weights.gate_up_eGD, 128, 128, 2)
    maps = (
        *(gemm.ragged_map(x, 128, 128), ups, gemm.ragged_map(act, 128, 64), gemm.ragged_map(act, 128, 128)),
        *(gemm.stacked_map(weights.down_eDF, 128, 256), *[gemm.ragged_map(out, 64, 64)] * 2),
    )
    scales = (
        gemm.Scales(rows=x_scales, weights=weights.gate_up_scales, out=act_scales),
        gemm.Scales(rows=act_scales, weights=weights.down_scales),
    )
    launch(counts, maps, IN_FP8, STAGED, scales, edits, seed, late)
    exact = (
        dequantise(x, x_scales, 1),
        dequantise(weights.gate_up_eGD, weights.gate_up_scales, 128),
        dequantise(weights.down_eDF, weights.down_scales, 128),
    )
    return far(out, fp8_ffn(counts, *exact))


FEW, MANY = [70, 0, 200], [9, 0, 1, 64, 130] * 2
IDS = ["few", "many", "one"]


@pytest.mark.parametrize("counts", [FEW, MANY, [129]], ids=IDS)
def test_the_second_product_waits_for_the_rows_of_each_part(counts: list[int]) -> None:
    for seed in range(3):
        assert both(counts, seed=seed) < 0.02


@pytest.mark.parametrize("counts", [FEW, MANY, [129]], ids=IDS)
def test_in_fp8_it_waits_for_their_scales_too(counts: list[int]) -> None:
    for seed in range(2):
        assert both_in_fp8(counts, seed=seed) < 0.02


def test_gate_and_up_that_are_kept_are_stores_of_a_tile_too() -> None:
    """Three commits for every 64 columns: with six, a tile would be told of while it is stored."""
    for seed in range(3):
        assert both(FEW, seed=seed, keeps=True) < 0.02


@pytest.mark.parametrize("computes", [both, both_in_fp8])
def test_a_part_that_is_never_full_is_reported(computes: Callable[..., float]) -> None:
    """And the product ends."""
    wait = "while (ptx::load_acquire_gpu(progress + part) != full && --patience)"
    fault = f"u32 patience = kPatience;\n        {wait}", "u32 patience = 64;\n        while (--patience)"
    computes(FEW, (fault,), late=1)


NOTE = "        note<kCommits>();\n        part = part_of(tile.expert, experts), rows_sent = rows;\n"
TOLD = (
    "            shared.slots[slot] = told;  // so that consumers may ask for the rows' scales\n"
    "            ptx::mbarrier_arrive(shared.slot_full + 8 * slot);\n"
)
FAULTS: dict[str, tuple[str, str]] = {
    "a tile does not wait": (
        "while (ptx::load_acquire_gpu(progress",
        "while (0 && ptx::load_acquire_gpu(progress",
    ),
    "a part is told before it is stored": (NOTE, "\n".join(reversed(NOTE.splitlines())) + "\n"),
    "a tile is told while it is stored": (NOTE, NOTE + "        note<kCommits>();\n"),
    "half of a part is enough": ("tiles);\n    }", "tiles / 2);\n    }"),
}
IN_FP8_FAULTS: dict[str, tuple[str, str]] = {
    "a tile's one store is taken for two": ("C::kFp8 ? 1 : C::kOutputs", "C::kOutputs"),
    "scales are asked for before the wait": (
        f"            ready(tile);\n{TOLD}",
        f"{TOLD}            ready(tile);\n",
    ),
    "scales are read as memory that nobody writes": ("kMade ? ptx::load_told", "false ? ptx::load_told"),
}


def shows(computes: Callable[..., float], fault: tuple[str, str], counts: list[int] = FEW) -> None:
    for seed in range(8):
        if not computes(counts, (fault,), seed) < 0.02:
            return
    pytest.fail("nobody notices")


@pytest.mark.parametrize("fault", list(FAULTS))
def test_faults_show(fault: str) -> None:
    shows(both, FAULTS[fault])


@pytest.mark.parametrize("fault", list(IN_FP8_FAULTS))
def test_faults_in_fp8_show(fault: str) -> None:
    shows(both_in_fp8, IN_FP8_FAULTS[fault], MANY if "nobody" in fault else FEW)
