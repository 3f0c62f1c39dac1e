// Gate and up, and down, of a small batch in one launch: one stream of tiles, first all of gate and up, then
// all of down, drawn in order by blocks that stay.
//
// Where reading weights is all that takes time, two launches leave memory idle between them: a block ends,
// the next one begins, finds its tile and asks, and a last wave has no tile for every block. Here a block's
// ring goes on over the border: columns of down are asked for while its last tile of gate and up is on its
// way, as many steps as there are stages, and only then does it wait for the rows. In place of two
// gemm/follow.cu; the same bits.
//
//   producer   | gate and up, tile i | columns of down | wait for the part | rows | columns and rows ...
//   consumers  |      multiply, activate, store | in memory? fence, count | multiply, store
//
// Rows of 64, of an expert each, are numbered through: units. Units are cut into kParts parts, each with a
// counter: its tiles of gate and up that are in memory. A tile of down waits for its part alone.
//
// Invariants:
//   A tile waits for tiles of lower numbers only. Those are of blocks that run, or that begin without this
//     one's help: the host launches no more than the device holds at once.
//   Nobody waits with a tile of gate and up in hand: consumers count it before they look at their next one,
//     and a producer tells consumers of a tile before it waits for the tile's rows.
//   A counter is looked at behind an acquire, and rows are asked for behind a fence for the copy engine; who
//     counts has waited for the copy engine and fenced.
//   The last block whose producer is done sets counters back: it has then seen every part that is used.
//   A wait that fails sets the status; the tile is computed all the same, so that nobody waits for it.
//
// What is read before the launch right before has ended is told by it (ffn/hits.cuh): which experts have
// rows, and with it that the counters are zeros. A word that says that rows are placed gained nothing: loads
// by tensor maps bring nothing before the launch before has ended (docs/LOG.md).
//
// Code comes from memory, some 30 instructions a microsecond, as each runs for the first time: so loops that
// few turns take are not unrolled, and which tile a block has is found from a list that the dispatch makes
// once: listing 64 experts here took 5.7 us, in which no weight was asked for.
//
// In fp8 (FP8) three warps beside the one that asks for columns quantise rows into its stages
// (ffn/quantised.cuh), and wait for a part in its place; activations lie in float32 until then.
//
// Example: experts of 3, 0 and 70 rows have units 0, then 1 and 2. With F = 128 and D = 256 tiles 0 to 5 are
// of gate and up, two a unit, and 6 to 11 of down; parts 0, 2 and 5 get two tiles each.
#pragma once
#if FP8
#define QUANTISES 1
#endif
#include "ffn/hits.cuh"
#include "ffn/quantised.cuh"
#include "gemm/cut.cuh"
#include "gemm/run.cuh"
#include "ptx/stamps.cuh"

namespace ffn {

using namespace gemm;

constexpr int kParts = 8;
constexpr int kFirstPart = 4;  // of the counters
constexpr u64 kLongest = 10'000'000'000;  // ns

struct DownCut : Cut {
    static constexpr Epilogue kEpilogue = WEIGHTED ? Epilogue::kWeighted : Epilogue::kPlain;
};
using Up = C;
using Down = Config<DownCut>;
static_assert(Up::kGroups == 1 && Up::kBytesA == Down::kBytesA && Up::kBytesB == Down::kBytesB, "one ring");
static_assert(!Up::kHalved, "a half that is stored beside the next tile's products would wait for itself");

// A, B and the result, of gate and up, then of down. In fp8 A and the first result have none.
struct BothMaps {
    TensorMap of[2][3];
};

// By value. The host reads it: `kernels.structs`.
struct Both {
    const u32* hits;       // which experts have rows (ffn/hits.cuh)
    const float* weights;  // of rows (Epilogue::kWeighted)
    u32* counter;          // zeros: tiles drawn, producers that are done, two of others, kParts parts
    u32* status;           // as in gemm::Problem
    int experts;
    int width;  // D
    int inner;  // F
    // In fp8: rows [R, D] bf16, SwiGLU's result [R, F], and scales [e, N/128, K/128] of both weights.
    const uint4* rows;
    float* act;
    const float *up_scales, *down_scales;
};

__device__ __forceinline__ int part_of(int unit, int units) { return unit * kParts / units; }
__device__ __forceinline__ int first_of_part(int part, int units) {
    return (part * units + kParts - 1) / kParts;
}

// Experts that have rows, in order: number, first unit, first row; behind them how many units and rows.
struct Units {
    int *expert, *unit, *row;
    int hits;

    // All lanes of a warp. `count`: of what is told.
    __device__ __forceinline__ void take(const u32* told, int count) {
        const uint2* entry = reinterpret_cast<const uint2*>(told + kFirstHit);
#pragma unroll 1
        for (int i = static_cast<int>(ptx::lane_id()); i <= count; i += 32) {
            const uint2 held = entry[i];
            expert[i] = static_cast<int>(held.x & 0xffff);
            unit[i] = static_cast<int>(held.x >> 16);
            row[i] = static_cast<int>(held.y);
        }
        hits = count;
        __syncwarp();
    }

    __device__ __forceinline__ int count() const { return unit[hits]; }
};

struct Work {
    Tile tile;
    bool down;
    int part;
};

// The tile of a number; false: there are no more. The row tiles of an expert read the same columns one after
// the other.
__device__ __forceinline__ bool seek(const Both& both, const Units& units, int number, Work& work) {
    const int ups = (both.inner + Up::kColumns - 1) / Up::kColumns,
              downs = (both.width + Down::kColumns - 1) / Down::kColumns, all = units.count();
    if (number >= all * (ups + downs)) return false;
    work.down = number >= all * ups;
    const int local = work.down ? number - all * ups : number, columns = work.down ? downs : ups;
    int low = 0, high = units.hits;
#pragma unroll 1
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (units.unit[middle] * columns <= local)
            low = middle;
        else
            high = middle;
    }
    const int begin = units.unit[low], side = units.unit[low + 1] - begin, inside = local - begin * columns;
    const int across = side == 1 ? inside : inside / side, down = inside - across * side;
    work.part = part_of(begin + down, all);
    work.tile.expert = units.expert[low];
    work.tile.row = units.row[low] + down * Up::kBlockM;
    work.tile.rows = units.row[low + 1] - work.tile.row;
    work.tile.column = across * (work.down ? Down::kColumns : Up::kColumns);
    work.tile.columns = (work.down ? both.width : both.inner) - work.tile.column;
    return true;
}

// Parts whose rows of down are there, and the wait for one. One thread.
struct Written {
    const Both& both;
    int all;  // units
    u32 known = 0;

    __device__ __forceinline__ bool is(int part) {
        if (known >> part & 1) return true;
        const int due = first_of_part(part + 1, all) - first_of_part(part, all),
                  ups = (both.inner + Up::kColumns - 1) / Up::kColumns;
        if (static_cast<int>(ptx::load_acquire_gpu(both.counter + kFirstPart + part)) < due * ups)
            return false;
        if (!Up::kQuantises) ptx::fence_async();
        known |= 1u << part;
        return true;
    }
    __device__ __forceinline__ void wait(int part) {
        const u64 begin = ptx::global_timer();
#pragma unroll 1
        while (!is(part)) {
            if (ptx::global_timer() - begin > kLongest) {
                *both.status = 1;
                break;
            }
            ptx::pause();
        }
    }
};

// A step of a tile, or, in two calls, its columns and then its rows.
template <bool kColumns, bool kRows>
__device__ __forceinline__ void load_work(const BothMaps& maps, const Shared<Up>& shared, u32 stage,
                                          const Work& work, int k) {
    const u32 full = shared.full + 8 * stage;
    const int live = least(work.tile.rows, Up::kBlockM);
    const TensorMap* map = maps.of[work.down];
    if (kColumns) ptx::mbarrier_expect(full, (Up::kQuantises ? 0 : bytes_of_rows<Up>(live)) + Up::kBytesB);
    if (kRows && !Up::kQuantises) load_rows<Up>(map, full, shared.a_of(stage), work.tile.row, live, k);
    if (!kColumns) return;
    if (work.down)
        load_columns<Down, true>(map + 1, full, shared.b_of(stage), work.tile.expert, work.tile.column, k);
    else
        load_columns<Up, true>(map + 1, full, shared.b_of(stage), work.tile.expert, work.tile.column, k);
}

// Who takes tiles: all blocks of the launch. `first`: the number of this block's first one; `reserved`: how
// many such tiles nobody draws, those of the lowest numbers; `all`: how many blocks look at counters;
// `early`: steps of its first tile whose columns a block asks for before `begin`; `late_draws`: see below.
struct WholeLaunch {
    __device__ __forceinline__ static constexpr int early() { return Up::kStages; }
    __device__ __forceinline__ static constexpr bool late_draws() { return false; }
    __device__ __forceinline__ int first() const { return static_cast<int>(blockIdx.x); }
    __device__ __forceinline__ u32 reserved() const { return gridDim.x; }
    __device__ __forceinline__ u32 all() const { return gridDim.x; }
};

// One thread, which looks at no counter any more; as do so many of all blocks. The last one sets them back.
__device__ __forceinline__ void leave(const Both& both, u32 of_all) {
    if (atomicAdd(both.counter + 1, 1u) == of_all - 1) {
        both.counter[0] = both.counter[1] = 0;
        for (int part = 0; part < kParts; ++part) both.counter[kFirstPart + part] = 0;
    }
}

// The producer thread. `begin(tile, ring, ahead)` waits until rows of gate and up may be asked for, once;
// columns of the first tile have been asked for up to step `ahead`, and then up to that which it returns.
//
// A tile that is drawn as the one before begins has its number in time, and waits for that one: a block that
// comes later, and has none yet, would have begun it sooner. `late_draws`: it is drawn when all of the
// one before has been asked for.
template <class Team, class Begin>
__device__ __forceinline__ void produce_both(const Both& both, const BothMaps& maps,
                                             const Shared<Up>& shared, const Units& units, const Team& team,
                                             Begin begin) {
    constexpr bool kLate = Team::late_draws();
    u32 patience = ptx::kPatience, position = 0;
    Written written{both, units.count()};
    Work work;
    bool more = seek(both, units, team.first(), work), down = false;
    ptx::stamp(ptx::kTile);
    Ring<Up> ring(0);
#pragma unroll 1
    for (u32 index = 0;; ++index) {
        const u32 slot = index % kSlots;
        ptx::mbarrier_wait(shared.slot_empty + 8 * slot, (index / kSlots & 1) ^ 1, patience);
        if (!more) {
            shared.slots[slot].steps = -1;
            ptx::mbarrier_arrive(shared.slot_full + 8 * slot);
            break;
        }
        u32 drawn = 0;
        if (!kLate) drawn = atomicAdd(both.counter, 1u);  // nothing may wait for it yet, not even an addition
        const int k = work.down ? both.inner : both.width, steps = (k + Up::kBlockK - 1) / Up::kBlockK;
        const Tile& tile = work.tile;
        shared.slots[slot] = {tile.expert, tile.row,  tile.rows, tile.column,
                              tile.columns, steps, position,  work.down ? -1 - work.part : work.part};
        ptx::mbarrier_arrive(shared.slot_full + 8 * slot);
        // The rows of gate and up are waited for once: they all come with the launch's before.
        const bool there = index > 0 && (Up::kQuantises || !work.down || written.is(work.part));
        int ahead = there ? 0 : least(steps, index == 0 ? Team::early() : Up::kStages);
        Ring<Up> rows = ring;
#pragma unroll 1
        for (int step = 0; step < ahead; ++step, ring.next()) {
            ptx::mbarrier_wait(shared.empty + 8 * ring.stage, ring.phase ^ 1, patience);
            load_work<true, false>(maps, shared, ring.stage, work, step * Up::kBlockK);
        }
        if (index == 0) ptx::stamp(ptx::kAsked);
        if (index == 0) ahead = begin(work, ring, ahead);
        if (work.down && !down) ptx::stamp(ptx::kDownAsked);
        if (!Up::kQuantises && work.down) written.wait(work.part);
        if (work.down && !down) ptx::stamp(ptx::kDownRows);
        down = work.down;
#pragma unroll 1
        for (int step = 0; step < ahead; ++step, rows.next())
            load_work<false, true>(maps, shared, rows.stage, work, step * Up::kBlockK);
        if (index == 0) ptx::stamp(ptx::kRows);
        const auto load = [&](int begin, int end) {
#pragma unroll 1
            for (int step = begin; step < end; ++step, ring.next()) {
                ptx::mbarrier_wait(shared.empty + 8 * ring.stage, ring.phase ^ 1, patience);
                load_work<true, true>(maps, shared, ring.stage, work, step * Up::kBlockK);
            }
        };
        const int few = kLate ? steps : ahead > 0 ? ahead : least(steps, kPeek);
        if (kLate || ahead == 0) load(ahead, few);
        if (kLate) drawn = atomicAdd(both.counter, 1u);
        Work then;
        more = seek(both, units, static_cast<int>(drawn + team.reserved()), then);
        load(few, steps);
        position += steps;
        work = then;
    }
    if (patience == 0) *both.status = 1;
    if (!Up::kQuantises) leave(both, team.all());
}

// One of the warps that quantise, all lanes.
__device__ __forceinline__ void quantise_both(const Both& both, const Shared<Up>& shared, u8* memory) {
    const int member = static_cast<int>(threadIdx.x / 32) - 5;
    u32 patience = 2 * ptx::kPatience;  // longer than that of who asks for columns
    Written written{both, told_units(both.hits)};
    const PlainRows rows{both.rows, both.width};
    const FloatRows acts{both.act, both.inner};
#pragma unroll 1
    for (u32 index = 0;; ++index) {
        const Slot tile = take_slot<Up>(shared, index, patience);
        if (!__all_sync(~0u, tile.steps >= 0 && patience != 0)) break;
        if (index == 0) ptx::wait_for_launches();  // rows are the launch's before
        if (tile.together >= 0) {
            fill_tile<Up>(rows, shared, memory, tile, member, patience);
        } else {
            if (ptx::lane_id() == 0) written.wait(-1 - tile.together);
            __syncwarp();
            fill_tile<Up>(acts, shared, memory, tile, member, patience);
        }
    }
    if (patience == 0) *both.status = 1;
    if (ptx::lane_id() == 0) leave(both, kQuantisers * gridDim.x);
}

// One thread, when it has sent a tile of gate and up (in fp8: when all have written theirs): the tile is in
// memory, and counted.
__device__ __forceinline__ void tell_part(const Both& both, int part) {
    if (!Up::kQuantises) {
        ptx::bulk_wait<0>();
        ptx::fence_async();
    }
    ptx::fence_gpu();
    ptx::add_relaxed_gpu(both.counter + kFirstPart + part, 1);
}

// A tile of rows that were quantised here. The same code for both products, which comes from memory once.
__device__ __forceinline__ void multiply_quantised(float (&d)[Up::kBlockN / 2], const Both& both,
                                                   const Shared<Up>& shared, const Slot& tile,
                                                   u32& patience) {
    const bool down = tile.together < 0;
    const int blocks = (down ? both.width : both.inner) / kBlock, column = tile.column / kBlock;
    const Scales scales{nullptr, down ? both.down_scales : both.up_scales, nullptr, 0, 0};
    StepScales<Up> next;
    next.begin(scales, tile.steps, (down ? 1 : 2) * tile.expert * blocks + column, down ? 0 : blocks);
    multiply_tile_fp8<Up>(d, shared, 0, tile, next, scales, patience);
}

// The first step of a block's first tile, and of its first of down, is in shared memory. All threads.
__device__ __forceinline__ void stamp_step(const Shared<Up>& shared, const Slot& tile, u32 index, bool& down,
                                           u32& patience) {
    const bool first = tile.together < 0 && !down;
    if (!STAMPS || (index > 0 && !first)) return;
    down = down || first;
    const Ring<Up> ring(tile.position);
    ptx::mbarrier_wait(shared.full + 8 * ring.stage, ring.phase, patience);
    if (threadIdx.x == 0) ptx::stamp(first ? ptx::kDownFull : ptx::kFull);
}

__device__ __forceinline__ void consume_both(const Both& both, const BothMaps& maps,
                                             const Shared<Up>& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    // Longer than the producer's, who may wait for another block.
    u32 patience = 2 * ptx::kPatience, index = 0;
    Stores<Up> acts{shared.staging, 0, thread};
    Stores<Down> outs{shared.staging, 0, thread};
    const StoreTiles act{maps.of[0] + 2, maps.of[0] + 2}, out{maps.of[1] + 2, maps.of[1] + 2};
    Slot tile = take_slot<Up>(shared, index, patience);
    bool down = false;
    while (tile.steps >= 0 && patience != 0) {
        float d[1][Up::kBlockN / 2];
        stamp_step(shared, tile, index, down, patience);
        if constexpr (Up::kQuantises)
            multiply_quantised(d[0], both, shared, tile, patience);
        else
            multiply_tile<Up, 1>(d, shared, 0, tile, patience);
        if (index == 0 && thread == 0) ptx::stamp(ptx::kFirst);
        const int rows = least(tile.rows, Up::kBlockM);
        if (tile.together >= 0) {
            if constexpr (Up::kQuantises)
                store_floats<Up>(d[0], both.act, both.inner, tile, rows);
            else
                store_block<Up>(d[0], act, acts, tile, tile.row, rows, nullptr);
            if (thread == 0) tell_part(both, tile.together);
            if (thread == 0) ptx::stamp(ptx::kUps);
        } else {
            store_block<Down>(d[0], out, outs, tile, tile.row, rows, both.weights);
        }
        tile = take_slot<Up>(shared, ++index, patience);
    }
    if (thread == 0) ptx::bulk_wait<0>();
    if (thread == 0) ptx::stamp(ptx::kStored);
    if (patience == 0) *both.status = 1;
}

}  // namespace ffn
