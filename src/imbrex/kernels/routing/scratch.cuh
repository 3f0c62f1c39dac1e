// What the routing kernel takes, and its shared memory.
#pragma once
#include "peers/protocol.cuh"
#include "routing/split.cuh"

#ifndef ROUTE_THREADS
#define ROUTE_THREADS 1024
#define ROUTE_FIRST 0
#endif

namespace route {

using namespace exchange;

constexpr int kChunk = 128;
constexpr int kRouteThreads = ROUTE_THREADS;  // that route, in warps of their own where a block does more
constexpr int kRouteFirst = ROUTE_FIRST;
constexpr int kRouteBarrier = 9;
constexpr int kPerToken = kRouteThreads / kChunk;  // threads that share a token's choices
constexpr u16 kNone = 0xffff;

// Bits of owners in a register, and in shared memory.
#if defined(MOST_OWNERS) && MOST_OWNERS > 16
constexpr bool kManyOwners = true;
using Owners = u64;
using Wanted = u64;
#else
constexpr bool kManyOwners = false;
using Owners = u32;
using Wanted = u16;
#endif

__device__ __forceinline__ int route_thread() { return static_cast<int>(threadIdx.x) - kRouteFirst; }

// All threads that route.
__device__ __forceinline__ void route_sync() {
    if (kRouteFirst == 0)
        __syncthreads();
    else
        ptx::named_barrier(kRouteBarrier, kRouteThreads);
}

__device__ __forceinline__ bool route_all(bool fine) {
    return kRouteFirst == 0 ? __syncthreads_and(fine) != 0
                            : ptx::named_barrier_and(kRouteBarrier, kRouteThreads, fine);
}

struct Route {
    const i64* ids;            // [ranks of the launch, max_tokens, K]
    const float* weights;      // the same
    const int* tokens;         // [..] or null
    const int* first_replica;  // [E + 1]; an expert's slots are replica_slots[first .. next), ascending
    const int* replica_slots;
    const int* rank_offsets;  // [owners + 1]
    int* position;            // [.., W, max_tokens, K]
    float* all_weights;       // [.., W, max_tokens, K]
    int* recv_row;            // [.., W, max_tokens]
    int* send_row;            // [.., max_tokens, W]
    int* counts;              // [.., most_slots]; rows of every local slot, padding included
    int* totals;              // [.., 4]: expert-major rows, rows received, overflow, 0
    int* all_tokens;          // [.., W]; tokens of every rank
    int* tally;               // [.., W, S] or null; choices of every rank for every slot are added to it
    int* traffic;   // [.., W, W] or null; tokens of rank `row` that rank `column` wants, its own included
    i64 ids_at;     // offset in a heap: int32 [2, W, max_tokens * K], then as many floats
    i64 counts_at;  // offset in a heap: this rank's scratch, int32 [chunks, E], [chunks, W], [chunks, E]
    i64 tokens_at;  // offset in a heap: int32 [2, W]
    int num_tokens;
    int max_tokens;
    int choices;
    int experts;
    int most_slots;
    int alignment;
    int row_capacity;
    int token_capacity;
    int tensor;      // ranks that share every expert: rank p holds a part of the experts of owner p / tensor
    int replicated;  // whether some expert may have more than one slot
    int slots;       // S
    int room;        // S - E where replicas are chosen by this batch's loads (split.cuh), 0: in equal parts
};

struct Chunk {
    int source, first, tokens;  // rank, first token, valid tokens (0..128)
    int at;                     // (source * max_tokens + first)
};

// Of all chunks of a block at once, or of a window of them where shared memory is short; `..` are the chunks
// of the window.
struct Scratch {
    Chunk* chunk;      // [..]
    u32* mask;         // [.., E, 4]
    u32* rank_mask;    // [chunks of the block, owners, 4]
    int* before;       // [.., E]; choices of the expert in earlier chunks of the source
    int* total;        // [W, E]
    int* rank_before;  // [chunks of the block, owners]
    int* rank_total;   // [W, owners]
    int* base;         // [W, W]; first compact row on rank `column` of the tokens of rank `row`
    int* slot_base;    // [W, most_slots]; row of the first choice of a source in a local slot
    int* slot_rows;    // [most_slots]
    int* home;  // [E]; rank << 16 | slot of an expert that has one slot, else -1 - its first slot in `flow`
    Flow flow;
    u16* ids;        // [.., kChunk, K]
    int* staged;     // [W, chunks of a source, owners]
    Wanted* wanted;  // [.., kChunk]; bits of the owners that a token wants
    int owners;      // W / tensor
    int sharers;     // blocks that know the same chunks; chunk c is written by number c % sharers
    int share;       // which of them this block is
    int chunks;      // of this block
    int first;       // its first chunk
    int per_source;  // chunks of a source
};

// Of block `block` among `blocks` that share the chunks, from `from` on in shared memory; `window` chunks at
// once, 0: all.
__device__ inline Scratch carve(const Call& call, const Route& route, int block, int blocks, int from = 0,
                                int window = 0) {
    const int ranks = call.group->ranks, experts = route.experts;
    Scratch s;
    s.owners = ranks / route.tensor;
    s.sharers = call.blocks / blocks;
    s.share = call.block / blocks;
    s.per_source = (route.max_tokens + kChunk - 1) / kChunk;
    const int all = s.per_source * ranks;
    const int per_block = (all + blocks - 1) / blocks;
    s.first = block * per_block;
    s.chunks = max(0, min(per_block, all - s.first));
    const int most = window ? window : per_block;
    u8* at = ptx::shared_memory() + from;
    const auto take = [&at](int words) {
        u8* start = at;
        at += 4 * words;
        return start;
    };
    s.chunk = reinterpret_cast<Chunk*>(take(4 * most));
    if (kManyOwners)
        // Of 8 bytes: before words may shift it.
        s.wanted = reinterpret_cast<Wanted*>(take(most * kChunk * 2));
    s.mask = reinterpret_cast<u32*>(take(most * experts * 4));
    s.rank_mask = reinterpret_cast<u32*>(take(per_block * s.owners * 4));
    s.before = reinterpret_cast<int*>(take(most * experts));
    s.total = reinterpret_cast<int*>(take(ranks * experts));
    s.rank_before = reinterpret_cast<int*>(take(per_block * s.owners));
    s.rank_total = reinterpret_cast<int*>(take(ranks * s.owners));
    s.base = reinterpret_cast<int*>(take(ranks * ranks));
    s.slot_base = reinterpret_cast<int*>(take(ranks * route.most_slots));
    s.slot_rows = reinterpret_cast<int*>(take(route.most_slots));
    s.home = reinterpret_cast<int*>(take(experts));
    s.flow = carve_flow(take(route.room ? s.owners * (s.owners + 2) + route.room * (5 + 2 * ranks) + 1 : 0),
                        s.owners, ranks, route.room);
    s.staged = reinterpret_cast<int*>(take(all * s.owners));
    if (!kManyOwners) s.wanted = reinterpret_cast<Wanted*>(take(most * kChunk / 2));
    s.ids = reinterpret_cast<u16*>(at);
    return s;
}

// Bits of a mask before `token`.
__device__ __forceinline__ int below(const u32* mask, int token) {
    const uint4 words = *reinterpret_cast<const uint4*>(mask);
    const u32 word = token >> 5, part = (1u << (token & 31)) - 1;
    return __popc(words.x & (word == 0 ? part : ~0u)) +
           __popc(words.y & (word == 1  ? part
                             : word > 1 ? ~0u
                                        : 0u)) +
           __popc(words.z & (word == 2  ? part
                             : word > 2 ? ~0u
                                        : 0u)) +
           __popc(words.w & (word == 3 ? part : 0u));
}

__device__ __forceinline__ int held(const u32* mask) {
    const uint4 words = *reinterpret_cast<const uint4*>(mask);
    return __popc(words.x) + __popc(words.y) + __popc(words.z) + __popc(words.w);
}

__device__ __forceinline__ bool writes(const Scratch& s, int chunk) {
    return s.sharers == 1 || chunk % s.sharers == s.share;
}

__device__ __forceinline__ i64 parity_at(const Call& call, const Route& route) {
    return static_cast<i64>(call.epoch & 1) * call.group->ranks * route.max_tokens * route.choices;
}

}  // namespace route
