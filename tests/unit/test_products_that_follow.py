"""The grouped GEMM as a part of a kernel: rows come while it runs, and somebody is told of its tiles."""

from __future__ import annotations

import pytest
import torch

from imbrex.kernels import arguments, jit
from imbrex.kernels.gemm import gemm
from imbrex.kernels.gemm.tiling import SHARED
from tests.emulated.gemm import Edits, EmulatedKernel, pack_map
from tests.emulated.kernel import available

pytestmark = pytest.mark.skipif(not available(), reason="needs g++")

KERNEL = """
#include "gemm/run.cuh"
#include "ptx/exchange.cuh"
namespace gemm {
struct Cut {
    static constexpr Layout kLayout = Layout::kForward;
    static constexpr Epilogue kEpilogue = Epilogue::kPlain;
    static constexpr bool kFp8 = false, kPingpong = false, kWide = false;
    static constexpr int kGroups = 2, kBlocksM = 1, kBlockN = 256, kStages = 4;
    static constexpr int kPanels = 2, kGroupM = 8, kCluster = 1, kWave = 128, kGather = 0, kBox = 128;
    static constexpr bool kBeside = false, kQuantises = false, kWaits = false;
};
using C = Config<Cut>;
// All but the last block, which brings the rows.
struct Team {
    static constexpr bool kEvery = false;
    __device__ int first(u32*, bool) const { return blockIdx.x - all(); }
    template <class Walk>
    __device__ int next(u32* counter, const Walk&) const { return atomicAdd(counter, 1); }
    __device__ u32 reserved() const { return all(); }
    __device__ u32 all() const { return gridDim.x - 1; }
};
struct Follow {
    static constexpr bool kWaits = true;
    static constexpr int kAhead = kPeek;
    static constexpr u32 kPatience = ptx::kPatience;
    const u32* arrived;  // of every 64 rows
    __device__ void operator()(const Tile& tile) const {
        for (int row = tile.row; row < tile.row + least(tile.rows, C::kBlockM); row += 64)
            while (ptx::load_acquire_gpu(arrived + row / 64) == 0) ptx::pause();
        ptx::fence_async();
    }
};
struct Tell : StoreTiles {
    u32* written;  // columns of every 64 rows, by 256
    __device__ void sent(const Slot& tile, int row, int, int thread) const {
        if (thread != 0) return;
        ptx::bulk_wait<0>();
        ptx::add_acq_rel_gpu(written + row / 64, 1);
    }
};
extern "C" __global__ void __launch_bounds__(C::kThreads, 1)
    follow(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
           const __grid_constant__ TensorMap map_d, const int* ends, int count, int columns, int k, int rows,
           const u32* from, u32* to, u32* counter, u32* status, u32* arrived, u32* written) {
    extern __shared__ u8 memory[];
    __shared__ Slot slots[kSlots];
    __shared__ u64 barriers[2 * C::kStages + 2 * kSlots + 2];
    const Shared<C> shared = lay_out<C>(memory, slots, barriers, nullptr);
    if (threadIdx.x == 0) make_barriers(shared);
    meet<C>();
    if (blockIdx.x + 1 == gridDim.x) {
        for (int block = (rows - 1) / 64; block >= 0; --block) {
            for (int i = 0; i < 100; ++i) ptx::pause();
            for (int i = threadIdx.x; i < least(64, rows - 64 * block) * k / 2; i += C::kThreads)
                to[32 * block * k + i] = from[32 * block * k + i];
            __syncthreads();
            if (threadIdx.x == 0) ptx::add_acq_rel_gpu(arrived + block, 1);
        }
        return;
    }
    const Scales scales{};
    const Slopes slopes{};
    run<C>({&map_a, &map_b, ends, nullptr, count, 0, columns, k, nullptr, counter, status, scales, slopes,
            nullptr},
           shared, Follow{arrived}, Tell{{&map_d, &map_d}, written}, Team{});
}
}  // namespace gemm
"""
COUNTS, DEPTH, COLUMNS = (192, 0, 70), 320, 264


def follow(
    monkeypatch: pytest.MonkeyPatch, edits: Edits = ()
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """What a product gives whose rows come while it runs, what it should, and what was told of every 64."""
    monkeypatch.setitem(arguments.HEADERS, "follow.cu", KERNEL)
    monkeypatch.setattr(gemm, "tensor_map", pack_map)
    torch.manual_seed(4)
    rows, blocks = sum(COUNTS), -(-sum(COUNTS) // 64)
    x, weight = torch.randn(rows, DEPTH).bfloat16(), torch.randn(len(COUNTS), COLUMNS, DEPTH).bfloat16()
    a, out = torch.full_like(x, float("nan")), torch.full((rows, COLUMNS), float("nan")).bfloat16()
    ends = torch.tensor(COUNTS).cumsum(0).int()
    counter, status = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    arrived, written = torch.zeros(blocks, dtype=torch.int32), torch.zeros(blocks, dtype=torch.int32)
    maps = (
        gemm.ragged_map(a, 64, SHARED.box_m),
        gemm.stacked_map(weight, 64, 256),
        gemm.ragged_map(out, 64, 64),
    )
    launch = EmulatedKernel(jit.Variant(source="follow.cu", entry="follow"), SHARED.smem, None, edits)
    sizes = len(COUNTS), COLUMNS, DEPTH, rows
    args = [*maps, ends, *sizes, x, a, counter, status, arrived, written]
    launch.launch(grid=3, block=128 * (SHARED.groups + 1), smem=SHARED.smem, args=args)
    assert (counter.tolist(), status.tolist()) == ([0, 0], [0])
    wanted = [part.double() @ w.double().T for part, w in zip(x.split(COUNTS), weight, strict=True)]
    return out.double(), torch.cat(wanted), written.tolist()


def test_a_tile_waits_for_its_rows_and_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    out, wanted, written = follow(monkeypatch)
    assert (out - wanted).abs().max() <= 0.01 * wanted.abs().max()
    assert written == [2] * len(written), "two column tiles, of which each group tells its 64 rows"


def test_a_tile_that_does_not_wait_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = ("while (ptx::load_acquire_gpu", "while (0 && ptx::load_acquire_gpu")
    out, _, _ = follow(monkeypatch, (at_once,))
    assert out.isnan().any()
