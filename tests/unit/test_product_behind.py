"""The second product of experts beside the last tiles of the first: it takes no row before it is there."""

from __future__ import annotations

import pytest
import torch

from imbrex.kernels import arguments, jit
from imbrex.kernels.gemm import gemm
from imbrex.kernels.gemm.tiling import SHARED
from tests.emulated.gemm import Edits, EmulatedKernel, pack_map
from tests.emulated.kernel import available
from tests.emulated.ragged import draw, ends_of, poisoned, reference_ffn

pytestmark = pytest.mark.skipif(not available(), reason="needs g++")

KERNEL = """
#include "gemm/parts.cuh"
#include "gemm/run.cuh"
namespace gemm {
template <Epilogue kOf>
struct Cut {
    static constexpr Layout kLayout = Layout::kForward;
    static constexpr Epilogue kEpilogue = kOf;
    static constexpr bool kFp8 = false, kPingpong = false, kWide = false;
    static constexpr int kGroups = 2, kBlocksM = 1, kBlockN = 256, kStages = 4;
    static constexpr int kPanels = 2, kGroupM = 8, kCluster = 1, kWave = 128, kGather = 0, kBox = 128;
    static constexpr bool kBeside = false, kQuantises = false;
};
using C = Config<Cut<KEEPS ? Epilogue::kSwigluKeep : Epilogue::kSwiglu>>;
using Down = Config<Cut<Epilogue::kPlain>>;
// The first half of the blocks, or the second.
struct Half {
    static constexpr bool kEvery = false;
    int begin;
    __device__ int first(u32*, bool) const { return static_cast<int>(blockIdx.x) - begin - all(); }
    template <class Walk>
    __device__ int next(u32* counter, const Walk&) const { return atomicAdd(counter, 1); }
    __device__ u32 reserved() const { return all(); }
    __device__ u32 all() const { return gridDim.x / 2; }
};
extern "C" __global__ void __launch_bounds__(C::kThreads, 1)
    both(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_up,
         const __grid_constant__ TensorMap map_act, const __grid_constant__ TensorMap map_a,
         const __grid_constant__ TensorMap map_down, const __grid_constant__ TensorMap map_out,
         const __grid_constant__ TensorMap map_kept,
         const int* ends, int count, int width, int inner, u32* counter, u32* status, u32* progress) {
    extern __shared__ u8 memory[];
    __shared__ Slot slots[kSlots];
    __shared__ u64 barriers[2 * C::kStages + 2 * kSlots + 2];
    __shared__ Done done;
    const Shared<C> shared = lay_out<C>(memory, slots, barriers, nullptr);
    if (threadIdx.x == 0) make_barriers(shared);
    clear(done);
    meet<C>();
    const Scales scales{};
    const Slopes slopes{};
    const Half half{blockIdx.x < gridDim.x / 2 ? 0 : static_cast<int>(gridDim.x) / 2};
    if (half.begin == 0)
        return run<C>({&map_x, &map_up, ends, nullptr, count, 0, inner, width, nullptr, counter, status,
                       scales, slopes, nullptr},
                      shared, Always{}, NoteTiles<C>{&map_act, &map_kept, done, count}, half,
                      TellParts<C>{done, progress});
    const Shared<Down> same = lay_out<Down>(memory, slots, barriers, nullptr);
    run<Down>({&map_a, &map_down, ends, nullptr, count, 0, width, inner, nullptr, counter + 2, status, scales,
               slopes, nullptr},
              same, PartMade{progress, ends, count, 2, status}, StoreTiles{&map_out, &map_out}, half);
}
}  // namespace gemm
"""
WIDTH, INNER = 264, 136  # two tiles of columns of the first product, two of the second


def both(
    monkeypatch: pytest.MonkeyPatch,
    counts: list[int],
    edits: Edits = (),
    seed: int = 0,
    keeps: bool = False,
    late: int = 0,
) -> float:
    """How far the result is from the experts' in float64, over their largest value; NaN where a row was taken
    too early. late: what the status says then."""
    monkeypatch.setitem(arguments.HEADERS, "both_behind.cu", KERNEL)
    monkeypatch.setattr(gemm, "tensor_map", pack_map)
    torch.manual_seed(4)
    x, gate_up = draw(sum(counts), WIDTH), draw(len(counts), 2 * INNER, WIDTH)
    down, act, out = draw(len(counts), WIDTH, INNER), poisoned(len(x), INNER), poisoned(len(x), WIDTH)
    kept = poisoned(len(x), 2 * INNER)
    maps = (
        *(gemm.ragged_map(x, 64, SHARED.box_m), gemm.gate_and_up_map(gate_up), gemm.ragged_map(act, 64, 64)),
        *(gemm.ragged_map(act, 64, SHARED.box_m), gemm.stacked_map(down, 64, 256)),
        *(gemm.ragged_map(out, 64, 64), gemm.halves_map(kept)),
    )
    counter, status, progress = (torch.zeros(size, dtype=torch.int32) for size in (4, 1, 9))
    launch = EmulatedKernel(
        jit.Variant(source="both_behind.cu", entry="both", defines=(("KEEPS", int(keeps)),)),
        SHARED.smem,
        None,
        edits,
    )
    launch.seed = seed
    args = [*maps, ends_of(counts), len(counts), WIDTH, INNER, counter, status, progress]
    launch.launch(grid=4, block=128 * (SHARED.groups + 1), smem=SHARED.smem, args=args)
    assert (counter.tolist(), status.tolist()) == ([0] * 4, [late])
    assert int(progress.sum()) == 2 * sum(counts)
    assert bool(kept[: sum(counts)].isfinite().all()) is keeps
    exact = (t.double() for t in (x, gate_up, down, torch.ones(len(x))))
    wanted = reference_ffn(counts, *exact)
    return float((out.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("counts", [[70, 0, 200], [9, 0, 1, 64, 130] * 2, [129]], ids=["few", "many", "one"])
def test_the_second_product_waits_for_the_rows_of_each_part(
    monkeypatch: pytest.MonkeyPatch, counts: list[int]
) -> None:
    for seed in range(3):
        assert both(monkeypatch, counts, seed=seed) < 0.02


def test_gate_and_up_that_are_kept_are_stores_of_a_tile_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three commits for every 64 columns: with six, a tile would be told of while it is stored."""
    for seed in range(3):
        assert both(monkeypatch, [70, 0, 200], seed=seed, keeps=True) < 0.02


def test_a_part_that_is_never_full_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the product ends."""
    wait = "while (ptx::load_acquire_gpu(progress + part) != full && --patience)"
    fault = f"u32 patience = kPatience;\n        {wait}", "u32 patience = 64;\n        while (--patience)"
    both(monkeypatch, [70, 0, 200], (fault,), late=1)


NOTE = "        note<kCommits>();\n        part = part_of(tile.expert, experts), rows_sent = rows;\n"
FAULTS: dict[str, tuple[str, str]] = {
    "a tile does not wait": (
        "while (ptx::load_acquire_gpu(progress",
        "while (0 && ptx::load_acquire_gpu(progress",
    ),
    "a part is told before it is stored": (NOTE, "\n".join(reversed(NOTE.splitlines())) + "\n"),
    "a tile is told while it is stored": (NOTE, NOTE + "        note<kCommits>();\n"),
    "half of a part is enough": ("tiles);\n    }", "tiles / 2);\n    }"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_faults_show(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    for seed in range(8):
        if not both(monkeypatch, [70, 0, 200], (FAULTS[fault],), seed) < 0.02:
            return
    pytest.fail("nobody notices")
