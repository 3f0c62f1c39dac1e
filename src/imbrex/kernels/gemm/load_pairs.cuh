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
template <class C>
__device__ __forceinline__ int halves_of(const Slot& tile) {
    constexpr int kHalf = C::kColumns / 2;
    return (C::kSwiglu && !C::kHalved) || tile.columns > kHalf ? 2 : 1;
}

// Half of a step of B into both blocks (`both`) or this one.
template <class C>
__device__ __forceinline__ void load_half(const TensorMap* map_b, u32 b, u32 full, const Slot& tile, int k,
                                          int half, bool both) {
    constexpr u16 kBoth = 3;
    b += half * (C::kBytesB / 2);
    if constexpr (C::kSwiglu && C::kHalved) {
        if (both)
            ptx::tma_load_4d_multicast(b, map_b, full, k, tile.column + 64 * half, 0, tile.expert, kBoth);
        else
            ptx::tma_load_4d(b, map_b, full, k, tile.column + 64 * half, 0, tile.expert);
    } else if constexpr (C::kForward) {
        const int column = tile.column + (C::kSwiglu ? 0 : half * (C::kBlockN / 2));
        const int matrix = C::kSwiglu ? 2 * tile.expert + half : tile.expert;
        if (both)
            ptx::tma_load_3d_multicast(b, map_b, full, k, column, matrix, kBoth);
        else
            ptx::tma_load_3d(b, map_b, full, k, column, matrix);
    } else {
        const int panel = tile.column / 64 + half * (C::kBlockN / 128);
        if (both)
            ptx::tma_load_4d_multicast(b, map_b, full, 0, k, panel, tile.expert, kBoth);
        else
            ptx::tma_load_4d(b, map_b, full, 0, k, panel, tile.expert);
    }
}

// As `load_step`.
template <class C, bool kColumns = true, bool kRows = true>
__device__ __forceinline__ void load_pair_step(const Problem& problem, const Shared<C>& shared, u32 stage,
                                               const Slot& tile, int rank, int k) {
    const u32 full = shared.full + 8 * stage, a = shared.a_of(stage), b = shared.b_of(stage);
    if (tile.rows <= 0) {
        if (kColumns) ptx::mbarrier_arrive(full);
        return;
    }
    const int v = least(tile.rows, C::kBlockM), halves = halves_of<C>(tile);
    if (kColumns) ptx::mbarrier_expect(full, bytes_of_rows<C>(v) + halves * (C::kBytesB / 2));
    if (kRows) load_rows<C>(problem.map_a, full, a, tile.row, v, k);
    if constexpr (kColumns)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (half < halves && (half == rank || !tile.together))
                load_half<C>(problem.map_b, b, full, tile, k, half, tile.together);
}

// Into this block's slot and, once it expects it, the other's.
template <class C>
__device__ __forceinline__ void write_slots(const Shared<C>& shared, u32 slot, const Slot& own,
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
template <class C, class Walk, class Team, class Ready>
__device__ __forceinline__ void produce_pairs(const Problem& problem, const Shared<C>& shared, Walk order,
                                              const Team& team, Ready& ready) {
    static_assert(!Ready::kWaits || !C::kFp8, "consumers ask for scales before rows are there");
    const int k = problem.k;
    u32* counter = problem.counter;
    const int rank = ptx::cluster_rank(), clusters = team.all();
    static_assert(!Ready::kWaits || kPeek < C::kStages, "as in `produce`");
    u32 patience = Ready::kPatience;
    Ring<C> ring(0);
    // The pair of this number to slot `index` of both blocks; the second block says that it expects it.
    const auto announce = [&](u32 index, int number, u32 position) {
        const u32 slot = index % kSlots;
        if (rank > 0) return ptx::mbarrier_expect(shared.slot_full + 8 * slot, sizeof(Slot));
        Tile pair[2] = {};
        bool together = false;
        const int steps = order.seek(number, pair, together) ? (k + C::kBlockK - 1) / C::kBlockK : -1;
        const auto slot_of = [&](const Tile& of) {
            return Slot{of.expert, of.row, of.rows, of.column, of.columns, steps, position, together};
        };
        ptx::mbarrier_wait(shared.slot_empty + 8 * slot, (index / kSlots & 1) ^ 1, patience);
        write_slots<C>(shared, slot, slot_of(pair[0]), slot_of(pair[1]));
    };
    announce(0, team.first(counter, rank == 0), 0);
    for (u32 index = 0; patience != 0; ++index) {
        const u32 slot = index % kSlots;
        if (rank > 0) ptx::mbarrier_wait(shared.slot_full + 8 * slot, index / kSlots & 1, patience);
        const Slot tile = shared.slots[slot];
        if (rank > 0) release_slot<C>(shared.slot_empty + 8 * slot);
        if (tile.steps < 0) break;
        const int next = rank > 0 ? 0 : atomicAdd(counter, 1);
        const auto load = [&](int begin, int end) {
#pragma unroll 1
            for (int step = begin; step < end; ++step, ring.next()) {
                ptx::mbarrier_wait(shared.empty + 8 * ring.stage, ring.phase ^ 1, patience);
                load_pair_step<C>(problem, shared, ring.stage, tile, rank, step * C::kBlockK);
            }
        };
        const int few = least(tile.steps, kPeek);
        if constexpr (Ready::kWaits) {
            Ring<C> rows = ring;
#pragma unroll 1
            for (int step = 0; step < few; ++step, ring.next()) {
                ptx::mbarrier_wait(shared.empty + 8 * ring.stage, ring.phase ^ 1, patience);
                load_pair_step<C, true, false>(problem, shared, ring.stage, tile, rank, step * C::kBlockK);
            }
            if (tile.rows > 0)
                ready(Tile{tile.expert, tile.row, tile.rows, tile.column, tile.columns});
#pragma unroll 1
            for (int step = 0; step < few; ++step, rows.next())
                load_pair_step<C, false, true>(problem, shared, rows.stage, tile, rank, step * C::kBlockK);
        } else {
            load(0, few);
        }
        announce(index + 1, next, tile.position + tile.steps);
        load(kPeek, tile.steps);
    }
    if (patience == 0) *problem.status = 1;
    if (rank == 0 && atomicAdd(counter + 1, 1) == clusters - 1) counter[0] = counter[1] = 0;
}

}  // namespace gemm
