// The producers of a cluster of two blocks: its first block draws pairs of tiles (gemm/pairs.cuh) and writes
// both blocks' slots; where the two share their columns each loads half of B for both, and its own A.
//
// A stage is filled by two blocks, so its `empty` barrier waits for the readers of both, in both. Bytes that
// the other block sent may come before this one has said how many it expects: the phase ends with its own
// arrival, so no sooner.
#pragma once
#include "gemm/load.cuh"

namespace gemm {

// Halves of B that a tile has.
__device__ __forceinline__ int halves_of(const Slot& tile) {
    return (kSwiglu && !kHalved) || tile.columns > (kSwiglu ? kBlockN / 4 : kBlockN / 2) ? 2 : 1;
}

// Half of a step of B into both blocks (`both`) or this one.
__device__ __forceinline__ void load_half(const TensorMap* map_b, u32 b, u32 full, const Slot& tile, int k,
                                          int half, bool both) {
    constexpr u16 kBoth = 3;
    b += half * (kBytesB / 2);
    if constexpr (kSwiglu && kHalved) {
        if (both)
            ptx::tma_load_4d_multicast(b, map_b, full, k, tile.column + 64 * half, 0, tile.expert, kBoth);
        else
            ptx::tma_load_4d(b, map_b, full, k, tile.column + 64 * half, 0, tile.expert);
    } else if constexpr (kForward) {
        const int column = tile.column + (kSwiglu ? 0 : half * (kBlockN / 2));
        const int matrix = kSwiglu ? 2 * tile.expert + half : tile.expert;
        if (both)
            ptx::tma_load_3d_multicast(b, map_b, full, k, column, matrix, kBoth);
        else
            ptx::tma_load_3d(b, map_b, full, k, column, matrix);
    } else {
        const int panel = tile.column / 64 + half * (kBlockN / 128);
        if (both)
            ptx::tma_load_4d_multicast(b, map_b, full, 0, k, panel, tile.expert, kBoth);
        else
            ptx::tma_load_4d(b, map_b, full, 0, k, panel, tile.expert);
    }
}

__device__ __forceinline__ void load_pair_step(const TensorMap* map_a, const TensorMap* map_b,
                                               const Shared& shared, u32 stage, const Slot& tile, int rank,
                                               int k) {
    const u32 full = shared.full + 8 * stage, a = shared.a_of(stage), b = shared.b_of(stage);
    if (tile.rows <= 0) return ptx::mbarrier_arrive(full);
    const int v = least(tile.rows, kBlockM), halves = halves_of(tile);
    ptx::mbarrier_expect(full, bytes_of_rows(v) + halves * (kBytesB / 2));
    load_rows(map_a, full, a, tile.row, v, k);
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (half < halves && (half == rank || !tile.together))
            load_half(map_b, b, full, tile, k, half, tile.together);
}

// Into this block's slot and, once it expects it, the other's.
__device__ __forceinline__ void write_slots(const Shared& shared, u32 slot, const Slot& own,
                                            const Slot& other) {
    const u32 at = ptx::smem_u32(shared.slots + slot), full = shared.slot_full + 8 * slot;
    const uint4 first{u32(other.expert), u32(other.row), u32(other.rows), u32(other.column)};
    const uint4 second{u32(other.columns), u32(other.steps), other.position, u32(other.together)};
    ptx::store_cluster_16(at, full, 1, first);
    ptx::store_cluster_16(at + 16, full, 1, second);
    shared.slots[slot] = own;
    ptx::mbarrier_arrive(full);
}

// The producer thread of either block; `counter` as in `produce`, for clusters.
__device__ __forceinline__ void produce_pairs(const TensorMap* map_a, const TensorMap* map_b,
                                              const Shared& shared, Pairs order, int k, u32* counter,
                                              u32* status) {
    const int rank = ptx::cluster_rank(), clusters = gridDim.x / 2;
    u32 patience = ptx::kPatience;
    Ring ring(0);
    // The pair of this number to slot `index` of both blocks; the second block says that it expects it.
    const auto announce = [&](u32 index, int number, u32 position) {
        const u32 slot = index % kSlots;
        if (rank > 0) return ptx::mbarrier_expect(shared.slot_full + 8 * slot, sizeof(Slot));
        Tile pair[2] = {};
        bool together = false;
        const int steps = order.seek(number, pair, together) ? (k + kBlockK - 1) / kBlockK : -1;
        const auto slot_of = [&](const Tile& of) {
            return Slot{of.expert, of.row, of.rows, of.column, of.columns, steps, position, together};
        };
        ptx::mbarrier_wait(shared.slot_empty + 8 * slot, (index / kSlots & 1) ^ 1, patience);
        write_slots(shared, slot, slot_of(pair[0]), slot_of(pair[1]));
    };
    announce(0, static_cast<int>(blockIdx.x / 2) - clusters, 0);
    for (u32 index = 0; patience != 0; ++index) {
        const u32 slot = index % kSlots;
        if (rank > 0) ptx::mbarrier_wait(shared.slot_full + 8 * slot, index / kSlots & 1, patience);
        const Slot tile = shared.slots[slot];
        if (rank > 0) release_slot(shared.slot_empty + 8 * slot);
        if (tile.steps < 0) break;
        const int next = rank > 0 ? 0 : atomicAdd(counter, 1);
        const auto load = [&](int begin, int end) {
#pragma unroll 1
            for (int step = begin; step < end; ++step, ring.next()) {
                ptx::mbarrier_wait(shared.empty + 8 * ring.stage, ring.phase ^ 1, patience);
                load_pair_step(map_a, map_b, shared, ring.stage, tile, rank, step * kBlockK);
            }
        };
        load(0, least(tile.steps, kPeek));
        announce(index + 1, next, tile.position + tile.steps);
        load(kPeek, tile.steps);
    }
    if (patience == 0) *status = 1;
    if (rank == 0 && atomicAdd(counter + 1, 1) == clusters - 1) counter[0] = counter[1] = 0;
}

}  // namespace gemm
