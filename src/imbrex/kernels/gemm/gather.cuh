// The producer of a grouped GEMM that reads its rows from an index: GATHER warps of the producer warpgroup,
// no permuted copy.
//
// A row of a stage is 128 bytes, and the 128-byte swizzle goes by bits of the address in shared memory: a box
// of one row, copied to where the row belongs in its stage, lands there as the wide box would put it. So the
// tile's rows come one by one, by as many instructions as the tile has rows (rounded up to four), and
// consumers know nothing of it. Rows past the last are what the stage held before: products of other rows do
// not see them, and they are not stored.
//
// The limit is how fast a warp asks: an instruction takes its operands from uniform registers, so that lanes
// would take turns anyway, 17 cycles each, and a step costs 400 more before the first. Four warps ask from
// four schedulers; kTurns crews of them take the steps in turn, so that a crew has the time of kTurns steps.
// One lane of a warp issues all of its copies. Every warp arrives at a stage with the bytes that it asks for.
//
// Design record, H200, us of the first product, uniform counts. Qwen3, 16384 rows:
//   rows copied before it              170, and 25 for the copy
//   one warp asks, two, four           358, 246, 195
//   and indices read in batches        187; also in two crews 184
//   in pairs of blocks                 176 (each asks for half of the weights' lines)
//   half of the rows left out, all     169, 164
//   cp.async by four warps             222, with the fence in the consumers or without any
// Others in pairs:                     copied before (the copy), gathered
//   Qwen2                              279 (29), 286
//   DeepSeek-V3                        1603 (101), 1711; 64 rows an expert 910 (24), 895
//   Phi-3.5, 8192 rows                 1173 (34), 1206; cp.async 1749
//   Mixtral, 4096 rows                 1280 (18), 1374
// Lanes that each ask for their own: 20 cycles a row and no gain.
//
// A step is filled by one crew, which has filled the step kTurns before it: so the wait for a stage, which
// tells a fill from the one before by a bit, is never a turn of the ring ahead or behind (STAGES >= kTurns).
#pragma once
#include "gemm/load.cuh"
#include "gemm/load_pairs.cuh"

namespace gemm {

// One thread of the block, or of both of a cluster: the next tile, or pair of tiles, in its slot; steps -1
// where there is none.
template <class C, typename Walk>
__device__ __forceinline__ void draw(const Shared<C>& shared, Walk& order, u32 turn, int& number,
                                     u32& position, int k, u32* counter, u32& patience) {
    const u32 slot = turn % kSlots;
    if (C::kCluster > 1 && ptx::cluster_rank() > 0)
        return ptx::mbarrier_expect(shared.slot_full + 8 * slot, sizeof(Slot));
    Tile tile[2] = {};
    bool found, together = false;
    ptx::mbarrier_wait(shared.slot_empty + 8 * slot, (turn / kSlots & 1) ^ 1, patience);
    if constexpr (C::kCluster > 1)
        found = order.seek(number, tile, together);
    else
        found = order.seek(number, tile[0]);
    const int steps = found ? (k + C::kBlockK - 1) / C::kBlockK : -1;
    if (found) number = atomicAdd(counter, 1);
    const auto slot_of = [&](const Tile& of) {
        return Slot{of.expert, of.row, of.rows, of.column, of.columns, steps, position, together};
    };
    if constexpr (C::kCluster > 1) {
        write_slots<C>(shared, slot, slot_of(tile[0]), slot_of(tile[1]));
    } else {
        shared.slots[slot] = slot_of(tile[0]);
        ptx::mbarrier_arrive(shared.slot_full + 8 * slot);
    }
    position += steps;
}

// A step of B, or this block's part of it.
template <class C>
__device__ __forceinline__ void load_part(const TensorMap* map_b, u32 full, u32 b, const Slot& tile, int k,
                                          int halves, int rank) {
    if constexpr (C::kCluster == 1) {
        load_columns<C>(map_b, full, b, tile.expert, tile.column, k);
    } else {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (half < halves && (half == rank || !tile.together))
                load_half<C>(map_b, b, full, tile, k, half, tile.together);
    }
}

// One thread: the crew's steps of a tile, this warp's rows; the crew's first warp the columns as well. from:
// of the tile's rows.
template <class C>
__device__ __forceinline__ void gather_tile(const Problem& problem, const Shared<C>& shared,
                                            const Slot& tile, const uint4* from, int quads, int crew,
                                            int member, u32& patience) {
    const TensorMap *map_a = problem.map_a, *map_b = problem.map_b;
    constexpr int kBatch = C::kQuadsEach < 4 ? C::kQuadsEach : 4;
    const int mine = (quads - member + C::kCrew - 1) / C::kCrew,
              first_step = (crew + C::kTurns - tile.position % C::kTurns) % C::kTurns;
    const int rank = C::kCluster > 1 ? ptx::cluster_rank() : 0;
    const int halves = tile.rows <= 0 ? 0 : C::kCluster == 1 ? 2 : halves_of<C>(tile);
    const u32 bytes = mine * 4 * 128 + (member == 0 ? halves * (C::kBytesB / 2) : 0);
    Ring<C> ring(tile.position + first_step);
#pragma unroll 1
    for (int step = first_step; step < tile.steps; step += C::kTurns) {
        const u32 full = shared.full + 8 * ring.stage, a = shared.a_of(ring.stage) + member * 4 * 128;
        const int k = step * C::kBlockK;
        ptx::mbarrier_wait(shared.empty + 8 * ring.stage, ring.phase ^ 1, patience);
        ptx::mbarrier_expect(full, bytes);
        if (member == 0) load_part<C>(map_b, full, shared.b_of(ring.stage), tile, k, halves, rank);
#pragma unroll
        for (int first = 0; first < C::kQuadsEach; first += kBatch) {
            uint4 rows[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) rows[i] = from[member + C::kCrew * (first + i)];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (first + i >= mine) break;
                const u32 to = a + (first + i) * (C::kCrew * 4 * 128);
                ptx::tma_load_2d(to, map_a, full, k, rows[i].x);
                ptx::tma_load_2d(to + 128, map_a, full, k, rows[i].y);
                ptx::tma_load_2d(to + 256, map_a, full, k, rows[i].z);
                ptx::tma_load_2d(to + 384, map_a, full, k, rows[i].w);
            }
        }
#pragma unroll
        for (int i = 0; i < C::kTurns; ++i) ring.next();
    }
}

// The first GATHER warps of the producer warpgroup. index[r]: where row r of the experts lies in A. from:
// kTurns * kBlockM words.
// `counter` as in `produce`.
template <class C, typename Walk>
__device__ __forceinline__ void produce_gathered(const Problem& problem, const Shared<C>& shared,
                                                 Walk order) {
    const i64* index = problem.index;
    u32 *from = shared.from, *counter = problem.counter;
    const int k = problem.k;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, crew = warp / C::kCrew,
              member = warp % C::kCrew;
    u32 patience = ptx::kPatience, position = 0;
    int number = static_cast<int>(blockIdx.x / C::kCluster) - static_cast<int>(gridDim.x / C::kCluster);
    from += crew * C::kBlockM;
    for (u32 turn = 0;; ++turn) {
        if (threadIdx.x % 128 == 0) draw<C>(shared, order, turn, number, position, k, counter, patience);
        __syncwarp();
        const Slot tile = take_slot<C>(shared, turn, patience);
        if (!__all_sync(0xffffffffu, patience != 0 && tile.steps >= 0)) break;
        const int live = tile.rows > 0 ? least(tile.rows, C::kBlockM) : 0, quads = (live + 3) / 4;
#pragma unroll
        for (int i = lane / 4; i < C::kQuadsEach; i += 8) {
            const int quad = member + C::kCrew * i, row = 4 * quad + lane % 4;
            if (quad < quads) from[row] = static_cast<u32>(index[tile.row + least(row, live - 1)]);
        }
        __syncwarp();
        if (ptx::elect_one())
            gather_tile<C>(problem, shared, tile, reinterpret_cast<const uint4*>(from), quads, crew, member,
                           patience);
        __syncwarp();
    }
    if (patience == 0) *problem.status = 1;
    const bool draws = threadIdx.x % 128 == 0 && (C::kCluster == 1 || ptx::cluster_rank() == 0);
    if (draws && atomicAdd(counter + 1, 1) == gridDim.x / C::kCluster - 1) counter[0] = counter[1] = 0;
}

}  // namespace gemm
