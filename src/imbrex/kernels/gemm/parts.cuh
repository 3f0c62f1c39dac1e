// From the first product of experts to the second, whose rows it makes: the second begins in the first one's
// last wave of tiles, on multiprocessors that have none left.
//
//   gate and up  |== tile ==|== tile ==|== tile ==|
//                |== tile ==|== tile ==|
//   down                               |== tile ==|== tile ==| ...
//
// The experts are kParts parts. The first product counts rows of a part that are in memory, once for every
// tile of columns; a tile of the second waits until its expert's part is full. Both take experts in their
// order, so parts have been full for long when the second begins, but the last ones, which it takes last.
//
// Example, 12 experts: 8 parts of 2 experts and 1 in turn. 3 experts of 5, 0 and 7 rows and two tiles of
// columns: parts 0, 2 and 5 are full at 10, 0 and 14, and nobody asks for the others.
//
// Nobody waits in a circle: the second launch begins when all blocks of the first are there, and these wait
// for nothing of it.
//
// In fp8 the first product stores scales of its rows as well, by all threads of a group, before the group
// meets to send the rows: who notes the tile has met them, who tells has seen the note, and its fence covers
// whatever it has seen. Who loads has acquired the count before the block's consumers, which are told of the
// tile behind that, ask for scales (`load_told`). Consumers of pairs would ask before: they do not follow.
#pragma once
#include "gemm/load.cuh"
#include "gemm/store.cuh"
#include "ptx/exchange.cuh"

namespace gemm {

constexpr int kParts = 8;

__device__ __forceinline__ int part_of(int expert, int experts) { return expert * kParts / experts; }

// The first expert of a part; of part kParts one behind the last expert.
__device__ __forceinline__ int first_expert(int part, int experts) {
    return (part * experts + kParts - 1) / kParts;
}

// Of a block of the first product, in shared memory: rows of each group's tiles that are in memory and that
// nobody has told of, by part, and groups that have ended.
struct Done {
    u32 rows[2][kParts];
    u32 ended;
};

// All threads, before the block meets.
__device__ __forceinline__ void clear(Done& done) {
    if (threadIdx.x < 2 * kParts) done.rows[threadIdx.x / kParts][threadIdx.x % kParts] = 0;
    if (threadIdx.x == 0) done.ended = 0;
}

// The first product's sink. A group notes a tile one tile later, when its stores have ended anyway, or at the
// end; an idle warp tells of it, since the fences that this takes cost whoever multiplies a microsecond.
template <class C>
struct NoteTiles : StoreTiles {
    static constexpr int kCommits = C::kFp8 ? 1 : C::kOutputs * (C::kKeep ? 3 : 1);  // of a tile
    Done& done;
    int experts;
    mutable int part = 0;
    mutable u32 rows_sent = 0;  // of the tile before

    __device__ __forceinline__ NoteTiles(const TensorMap* map_d, const TensorMap* map_h, Done& done,
                                         int experts)
        : StoreTiles{map_d, map_h}, done(done), experts(experts) {}

    // One thread of a group: of the tile before, when all but the last kPending stores are written.
    template <int kPending>
    __device__ __forceinline__ void note() const {
        ptx::bulk_wait<kPending>();
        if (rows_sent > 0) ptx::add_release_cta(&done.rows[threadIdx.x / 128][part], rows_sent);
        rows_sent = 0;
    }
    __device__ __forceinline__ void sent(const Slot& tile, int, int rows, int thread) const {
        if (thread != 0) return;
        note<kCommits>();
        part = part_of(tile.expert, experts), rows_sent = rows;
    }
    __device__ __forceinline__ void passed(int thread) const {
        if (thread == 0) note<0>();
    }
    __device__ __forceinline__ void ended(int thread) const {
        if (thread != 0) return;
        note<0>();
        ptx::add_release_cta(&done.ended, 1);
    }
};

// `run`'s `beside` in the first product: the last warp of the producer's group tells. `progress`: a zero for
// every part, or null, where nobody waits.
template <class C>
struct TellParts {
    Done& done;
    u32* progress;

    __device__ __forceinline__ void operator()() const {
        if (threadIdx.x % 128 < 96) return;
        const int lane = static_cast<int>(ptx::lane_id());
        if (progress == nullptr) return;
        int ended = 0;
#pragma unroll 1
        for (bool last = false; !last; ptx::rest()) {
            if (lane == 0) ended += static_cast<int>(ptx::take_acquire_cta(&done.ended));
            last = __shfl_sync(~0u, ended, 0) == C::kGroups;  // before what is left is taken
            __syncwarp();
            u32* word = &done.rows[lane / kParts % 2][lane % kParts];
            const u32 rows = lane < C::kGroups * kParts ? ptx::take_acquire_cta(word) : 0;
            if (rows > 0) {
                ptx::fence_async();
                ptx::fence_gpu();
                ptx::add_relaxed_gpu(progress + lane % kParts, rows);
            }
        }
    }
};

// What the second product waits for: `run`'s `ready`. `tiles`: of columns, of the first product.
struct PartMade {
    static constexpr bool kWaits = true;
    static constexpr int kAhead = kPeek;
    static constexpr u32 kPatience = 1u << 28;  // the first product may wait for rows of peers
    const u32* progress;
    const int* ends;
    int experts, tiles;
    u32* status;
    mutable int seen = -1;  // the part that was full last

    __device__ __forceinline__ u32 due(int part) const {
        const int first = first_expert(part, experts), behind = first_expert(part + 1, experts);
        return static_cast<u32>((ends[behind - 1] - (first > 0 ? ends[first - 1] : 0)) * tiles);
    }
    __device__ __forceinline__ void operator()(const Tile& tile) const {
        const int part = part_of(tile.expert, experts);
        if (part == seen) return;
        const u32 full = due(part);
        u32 patience = kPatience;
        while (ptx::load_acquire_gpu(progress + part) != full && --patience) ptx::pause();
        if (patience == 0) *status = 1;
        ptx::fence_async();
        seen = part;
    }
};

}  // namespace gemm
