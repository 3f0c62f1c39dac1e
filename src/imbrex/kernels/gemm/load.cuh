// The producer of the grouped GEMM: which tile comes next, and its operands into shared memory.
#pragma once
#include "gemm/shape.cuh"

namespace gemm {

// Forward: one step of B.
__device__ __forceinline__ void load_columns(const TensorMap* map_b, u32 full, u32 b, int expert, int column,
                                             int k) {
    if constexpr (kSwiglu && kHalved) {
        ptx::tma_load_4d(b, map_b, full, k, column, 0, expert);
        ptx::tma_load_4d(b + kBytesB / 2, map_b, full, k, column + 64, 0, expert);
    } else if constexpr (kSwiglu) {
        ptx::tma_load_3d(b, map_b, full, k, column, 2 * expert);
        ptx::tma_load_3d(b + kBytesB / 2, map_b, full, k, column, 2 * expert + 1);
    } else {
        ptx::tma_load_3d(b, map_b, full, k, column, expert);
    }
}

// A step of A, of which `rows` rows are live. Boxes without any are left out: rows that are not there cost
// the copy engine more than rows that are.
__device__ __forceinline__ void load_rows(const TensorMap* map_a, u32 full, u32 a, int row, int rows, int k) {
#pragma unroll
    for (int box = 0; box < kBlockM; box += kBoxM) {
        const int live = least(rows - box, kBoxM);
        if (box == 0 || live > 0)
            ptx::tma_load_3d(a + box * 128, map_a, full, k, kBoxM - live, row + box + live);
    }
}

__device__ __forceinline__ u32 bytes_of_rows(int rows) { return (rows + kBoxM - 1) / kBoxM * kBoxM * 128; }

__device__ __forceinline__ void load_step(const TensorMap* map_a, const TensorMap* map_b,
                                          const Shared& shared, u32 stage, const Tile& tile, int k,
                                          int k_left) {
    const u32 full = shared.full + 8 * stage, a = shared.a_of(stage), b = shared.b_of(stage);
    const int v = least(kWgrad ? k_left : tile.rows, kWgrad ? kBlockK : kBlockM);
    if constexpr (!kWgrad) {
        ptx::mbarrier_expect(full, bytes_of_rows(v) + kBytesB);
        load_rows(map_a, full, a, tile.row, v, k);
    }
    if constexpr (kForward) {
        load_columns(map_b, full, b, tile.expert, tile.column, k);
    } else if constexpr (WIDE && kDgrad) {
        ptx::tma_load_4d(b, map_b, full, 0, k, tile.column / 64, tile.expert);
    } else if constexpr (WIDE) {
        ptx::mbarrier_expect(full, kBytesA + kBytesB);
        ptx::tma_load_4d(a, map_a, full, 0, kBlockK - v, k + v, tile.row / 64);
        ptx::tma_load_4d(b, map_b, full, 0, kBlockK - v, k + v, tile.column / 64);
    } else if constexpr (kDgrad) {
#pragma unroll
        for (int i = 0; i < kBlockN / 64; ++i)
            ptx::tma_load_3d(b + i * kPanel, map_b, full, tile.column + 64 * i, k, tile.expert);
    } else {
        const int panels_a = least((tile.rows + 63) / 64, kTileBlocks),
                  panels_b = least((tile.columns + 63) / 64, kBlockN / 64);
        ptx::mbarrier_expect(full, (panels_a + panels_b) * kPanel);
#pragma unroll 1
        for (int i = 0; i < panels_a; ++i)
            ptx::tma_load_3d(a + i * kPanel, map_a, full, tile.row + 64 * i, kBlockK - v, k + v);
#pragma unroll 1
        for (int i = 0; i < panels_b; ++i)
            ptx::tma_load_3d(b + i * kPanel, map_b, full, tile.column + 64 * i, kBlockK - v, k + v);
    }
}

// The next tile is sought after kPeek steps of one: its number has come by then, and there is time before the
// next step. Between two tiles that would delay the loads by 500 to 1000 cycles. Not in weight gradients and
// turns, where it gains nothing, and 3 % are lost if the outputs are what takes the time.
constexpr bool kEarly = !kWgrad && !PINGPONG;
constexpr int kPeek = 2;

// The producer thread. counter[0]: tiles drawn beyond the first of each block, whose numbers are negative;
// counter[1]: blocks that are done, the last of which sets both back to 0 for the next launch.
__device__ __forceinline__ void produce(const TensorMap* map_a, const TensorMap* map_b, const Shared& shared,
                                        Order order, const int* ends, int k, u32* counter, u32* status) {
    u32 patience = ptx::kPatience, position = 0, index = 0;
    int number = blockIdx.x - gridDim.x;
    Tile tile;
    bool found = kEarly && order.seek(number, tile);
    Ring ring(0);
    for (int stops = 0; stops < (PINGPONG ? GROUPS : 1); ++index) {
        const u32 slot = index % kSlots;
        ptx::mbarrier_wait(shared.slot_empty + 8 * slot, (index / kSlots & 1) ^ 1, patience);
        if (stops > 0 || !(kEarly ? found : order.seek(number, tile))) {
            shared.slots[slot].steps = -1;
            ptx::mbarrier_arrive(shared.slot_full + 8 * slot);
            ++stops;
            continue;
        }
        const int next = atomicAdd(counter, 1);  // nothing may wait for it yet, not even an addition
        const int k_begin = kWgrad && tile.expert > 0 ? ends[tile.expert - 1] : 0;
        const int k_count = kWgrad ? ends[tile.expert] - k_begin : k;
        const int steps = (k_count + kBlockK - 1) / kBlockK;
        shared.slots[slot] =
            Slot{tile.expert, tile.row, tile.rows, tile.column, tile.columns, steps, position, 0};
        ptx::mbarrier_arrive(shared.slot_full + 8 * slot);
        const auto load = [&](int begin, int end) {
#pragma unroll 1
            for (int step = begin; step < end; ++step, ring.next()) {
                ptx::mbarrier_wait(shared.empty + 8 * ring.stage, ring.phase ^ 1, patience);
                load_step(map_a, map_b, shared, ring.stage, tile, k_begin + step * kBlockK,
                          k_count - step * kBlockK);
            }
        };
        if constexpr (kEarly) {
            Tile then;
            load(0, least(steps, kPeek));
            found = order.seek(next, then);
            load(kPeek, steps);
            tile = then;
        } else {
            load(0, steps);
        }
        position += steps;
        number = next;
    }
    if (patience == 0) *status = 1;
    if (atomicAdd(counter + 1, 1) == gridDim.x - 1) counter[0] = counter[1] = 0;
}

}  // namespace gemm
