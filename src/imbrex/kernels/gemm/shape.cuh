// What the parts of the grouped GEMM share: sizes from the defines (see gemm.cu), shared memory, the ring of
// stages.
#pragma once
#include "ptx/wgmma.cuh"
#include "gemm/height.cuh"
#include "gemm/pairs.cuh"

namespace gemm {

constexpr int kTileBlocks = PINGPONG ? BLOCKS_M : GROUPS;  // 64-row blocks of a tile
constexpr int kBlockM = 64 * kTileBlocks;
constexpr int kBlockN = BLOCK_N;
constexpr int kBlockK = FP8 ? 128 : 64;  // 128 bytes
constexpr bool kForward = LAYOUT == 0, kDgrad = LAYOUT == 1, kWgrad = LAYOUT == 2;
constexpr bool kSwiglu = EPILOGUE == 1 || EPILOGUE == 2;
constexpr u32 kBytesA = kBlockM * 128, kBytesB = kBlockN * 128;
// The second 64 rows of a tile may have no rows, or the tile none: they come in boxes of their own. With 128
// columns a step is too short for a second instruction (3 to 7 % slower), and fp8 pays for it, too (1 to 2
// %).
constexpr bool kTwoHeights = !FP8 && !PINGPONG && !kWgrad && kBlockM == 128 && kBlockN == 256;
constexpr int kBoxM = kTwoHeights ? 64 : kBlockM;
constexpr u32 kPanel = 64 * 64 * 2;  // 64 rows of 128 bytes
constexpr int kOutputs = (kSwiglu ? kBlockN / 2 : kBlockN) / 64;
constexpr bool kManyRegisters = (FP8 && !GATHER && CLUSTER == 1) || EPILOGUE == 4;
constexpr int kProducerRegisters = kManyRegisters ? 40 : 56;
constexpr int kConsumerRegisters = GROUPS > 1 ? (kManyRegisters ? 232 : 224) : 240;
constexpr int kSlots = 4;
// bf16 tiles of 256 columns are two halves, of which one is stored while the other is multiplied
// (gemm/halves.cuh). With SwiGLU a half has gate and up of the same 64 columns, next to each other.
constexpr bool kHalved = !FP8 && !PINGPONG && !GATHER && kBlockN == 256 && EPILOGUE != 4;
constexpr int kUp = kHalved ? 64 : kBlockN / 2;        // columns of the tile from gate to up, SwiGLU
constexpr int kApart = kSwiglu && kHalved ? 128 : 64;  // from one panel of results to the next
static_assert(!FP8 || (kForward && !PINGPONG && kBlockN % 128 == 0),
              "fp8: forward, tiles shared by the groups");
static_assert(CLUSTER == 1 || (!PINGPONG && (kForward || (kDgrad && WIDE))),
              "clusters: see gemm/load_pairs.cuh");
static_assert(PINGPONG || BLOCKS_M == 1, "groups that share a tile have one block of rows each");

using Order = Schedule<kBlockM, kSwiglu ? kBlockN / 2 : kBlockN, GROUP_M, kWgrad>;
using Pairs = PairSchedule<kBlockM, kSwiglu ? kBlockN / 2 : kBlockN, GROUP_M>;

// With tiles of 64 rows where the product ends sooner in those. All lanes of a warp: nothing is loaded before
// the ends are, and one after the other they took 1.5 us of 16 experts, 4 of 64.
template <typename Any>
__device__ __forceinline__ Any with_height(Any order) {
    constexpr int kWidth = kSwiglu ? kBlockN / 2 : kBlockN;
    if constexpr (kTwoHeights)
        if (order.segments == nullptr) {
            RowTiles rows = count_row_tiles(order.ends, order.count, threadIdx.x % 32, 32);
#pragma unroll
            for (int step = 16; step > 0; step /= 2) {
                rows.high += static_cast<int>(__shfl_xor_sync(~0u, static_cast<u32>(rows.high), step));
                rows.low += static_cast<int>(__shfl_xor_sync(~0u, static_cast<u32>(rows.low), step));
            }
            order.height = tile_height(rows, (order.columns + kWidth - 1) / kWidth, gridDim.x);
        }
    return order;
}

// What consumers know of a tile; `position` counts the load steps before it. steps < 0: no more tiles. rows
// 0: none for this block; `together`: the cluster's two tiles share their columns.
struct __align__(16) Slot {
    int expert, row, rows, column, columns, steps;
    u32 position;
    int together;
};

struct Shared {
    u32 a, b, staging, full, empty, slot_full, slot_empty, order;
    Slot* slots;
    __device__ __forceinline__ u32 a_of(u32 stage) const { return a + stage * kBytesA; }
    __device__ __forceinline__ u32 b_of(u32 stage) const { return b + stage * kBytesB; }
};

struct Ring {
    u32 stage, phase;
    __device__ __forceinline__ explicit Ring(u32 position)
        : stage(position % STAGES), phase(position / STAGES & 1) {}
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// A warp has read a stage: whoever fills it may do so, which are all blocks of the cluster.
__device__ __forceinline__ void release_stage(u32 barrier) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (CLUSTER > 1) {
        if (lane < CLUSTER) ptx::mbarrier_arrive_cluster(barrier, lane);
    } else if (lane == 0) {
        ptx::mbarrier_arrive(barrier);
    }
}

// A thread (of a warp) has read a slot: the block that writes it may do so, which is the first of the
// cluster.
__device__ __forceinline__ void release_slot(u32 barrier) {
    if constexpr (CLUSTER > 1)
        ptx::mbarrier_arrive_cluster(barrier, 0);
    else
        ptx::mbarrier_arrive(barrier);
}

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }

// The value of lane 0, where all have the same, and the compiler has to know.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// Tile number `index` of the block, and its slot free again.
__device__ __forceinline__ Slot take_slot(const Shared& shared, u32 index, u32& patience) {
    const u32 slot = index % kSlots;
    ptx::mbarrier_wait(shared.slot_full + 8 * slot, index / kSlots & 1, patience);
    const Slot tile = shared.slots[slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) release_slot(shared.slot_empty + 8 * slot);
    return tile;
}

}  // namespace gemm
