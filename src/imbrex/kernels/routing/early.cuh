// Compact rows of the own tokens before anything else is known; see exchange/dispatch.cu.
//
// A rank's tokens are cut into segments of 32, which its blocks take in turn. A row at a rank is the tokens
// that lower ranks send there, and those of this rank before: so each block tells how many tokens of each of
// its segments every owner gets, to its own rank, and how many in all, to every rank. Counts are words with
// the epoch above, so they need no flag and no fence; those of two calls lie side by side, by parity, as the
// choices do, which everybody waits for later in the call.
//
// Example, 2 ranks, one expert each: rank 0 sends tokens 1 and 2 to rank 1, rank 1 its token 4 to rank 0.
// Rank 0's rows are 0 and 1, with nobody before it. Of 3 ranks, tokens of rank 1 to rank 2 begin at the
// number that rank 0 sends there.
#pragma once
#include "routing/steps.cuh"

#ifndef IN_FLIGHT
#define IN_FLIGHT 2
#endif

namespace route {

constexpr int kSegment = 32;
constexpr int kAhead = IN_FLIGHT;  // segments whose ids a warp has in flight

struct Early {
    u32* mask;    // [segments of the block, owners]: tokens that the owner gets
    int* before;  // the same: how many of the rank's earlier tokens
    int* total;   // [W, owners]: tokens of lower ranks that the owner gets
    int* fine;    // whether rows are known; one word
    u8* held;     // [segments of the rank, owners]: how many
    i64 at;       // offset in a heap: u64 [2][W][kMaxBlocks][W], then [2][segments][W]
    int segments;
    int owners;
};

__device__ inline Early carve_early(const Call& call, const Route& route, i64 at, int from) {
    Early early;
    early.at = at;
    early.owners = call.group->ranks / route.tensor;
    early.segments = (route.max_tokens + kSegment - 1) / kSegment;
    const int mine = (early.segments + call.blocks - 1) / call.blocks;
    early.fine = reinterpret_cast<int*>(ptx::shared_memory() + from);
    early.total = early.fine + 1;
    early.mask = reinterpret_cast<u32*>(early.total + call.group->ranks * early.owners);
    early.before = reinterpret_cast<int*>(early.mask + mine * early.owners);
    early.held = reinterpret_cast<u8*>(early.before + mine * early.owners);
    return early;
}

__device__ __forceinline__ u64* total_word(const Call& call, const Early& early, int at, int from, int block,
                                           int owner) {
    const i64 ranks = call.group->ranks, parity = call.epoch & 1;
    return reinterpret_cast<u64*>(call.group->heap[at] + early.at) +
           ((parity * ranks + from) * kMaxBlocks + block) * ranks + owner;
}

__device__ __forceinline__ u64* segment_word(const Call& call, const Early& early, int segment, int owner) {
    const i64 ranks = call.group->ranks, parity = call.epoch & 1;
    u64* words =
        reinterpret_cast<u64*>(call.group->heap[call.me] + early.at) + 2 * ranks * kMaxBlocks * ranks;
    return words + (parity * early.segments + segment) * ranks + owner;
}

__device__ __forceinline__ u64 counted(const Call& call, int count) {
    return static_cast<u64>(call.epoch) << 32 | static_cast<u32>(count);
}

// The low words: an id of more bits fails the call later (`short_id`), wherever its token goes.
__device__ __forceinline__ void load_ids(int (&id)[kBatch], const i64* ids, int k, int choices) {
#pragma unroll
    for (int u = 0; u < kBatch; ++u) id[u] = reinterpret_cast<const int*>(ids)[2 * min(k + u, choices - 1)];
}

// The owners that a token wants; `id`: its first choices. Ids out of range are told later.
__device__ __forceinline__ u32 owners_of(const Route& route, const Scratch& s, const i64* ids,
                                         int (&id)[kBatch]) {
    u32 wanted = 0;
    for (int k = 0;;) {
#pragma unroll
        for (int u = 0; u < kBatch; ++u)
            if (id[u] >= 0 && id[u] < route.experts) wanted |= 1u << (s.home[id[u]] >> 16);
        if ((k += kBatch) >= route.choices) return wanted;
        load_ids(id, ids, k, route.choices);
    }
}

// Masks of the block's segments, and its counts told. A warp has the ids of kAhead segments in flight, the
// first while homes are looked up.
__device__ inline void count_segments(const Call& call, const Route& route, const Scratch& s,
                                      const Early& early, int tokens) {
    constexpr int kWarps = kRouteThreads / 32;
    const int warp = route_thread() / 32, lane = static_cast<int>(ptx::lane_id()), ranks = call.group->ranks;
    const i64* ids = route.ids + static_cast<i64>(call.local) * route.max_tokens * route.choices;
    int id[kAhead][kBatch];
    const auto token_of = [&](int i) { return (call.block + i * call.blocks) * kSegment + lane; };
    const auto fetch = [&](int i, int (&to)[kBatch]) {
        if (token_of(i) < tokens)
            load_ids(to, ids + static_cast<i64>(token_of(i)) * route.choices, 0, route.choices);
    };
    const auto count = [&](int i, int (&of)[kBatch]) {
        const int segment = call.block + i * call.blocks;
        if (segment >= early.segments) return;
        const u32 wanted = token_of(i) < tokens
                               ? owners_of(route, s, ids + static_cast<i64>(token_of(i)) * route.choices, of)
                               : 0;
        for (int o = 0; o < early.owners; ++o) {
            const u32 mask = __ballot_sync(0xffffffffu, wanted >> o & 1);
            if (lane != o) continue;
            early.mask[i * early.owners + o] = mask;
            ptx::store_relaxed_sys(segment_word(call, early, segment, o), counted(call, __popc(mask)));
        }
    };
#pragma unroll
    for (int u = 0; u < kAhead; ++u) fetch(warp + u * kWarps, id[u]);
    find_homes(route, s);
    route_sync();
    for (int i = warp; call.block + i * call.blocks < early.segments; i += kAhead * kWarps) {
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
            count(i + u * kWarps, id[u]);
            fetch(i + (u + kAhead) * kWarps, id[u]);
        }
    }
    route_sync();
    for (int x = route_thread(); x < early.owners * ranks; x += kRouteThreads) {
        const int to = x / early.owners, o = x - to * early.owners;
        int sum = 0;
        for (int i = 0; call.block + i * call.blocks < early.segments; ++i)
            sum += __popc(early.mask[i * early.owners + o]);
        ptx::store_relaxed_sys(total_word(call, early, to, call.me, call.block, o), counted(call, sum));
    }
}

// Wait for a count of this call; false after the time-out or any failure.
__device__ inline bool wait_count(const Call& call, const u64* word, Phase phase, int peer, int& count) {
    const u64 start = ptx::global_timer();
    for (u32 polls = 1;; ++polls) {
        const u64 seen = ptx::load_relaxed_sys(word);
        count = static_cast<int>(static_cast<u32>(seen));
        if (reached(static_cast<u32>(seen >> 32), call.epoch)) return true;
        if (stop_waiting(call, phase, peer, start, polls)) return false;
    }
}

// Counts of this rank's segments and of lower ranks. All threads that route; false where one did not come.
__device__ inline bool take_counts(const Call& call, const Early& early) {
    const int owners = early.owners, thread = route_thread();
    bool fine = true;
    int count = 0;
    for (int x = thread; x < call.me * call.blocks * owners; x += kRouteThreads) {
        const int from = x / (call.blocks * owners), block = x / owners % call.blocks, o = x % owners;
        fine = fine &&
               wait_count(call, total_word(call, early, call.me, from, block, o), kIdsArrived, from, count);
        if (fine) atomicAdd(&early.total[from * owners + o], count);
    }
    for (int x = thread; x < early.segments * owners; x += kRouteThreads) {
        fine = fine && wait_count(call, segment_word(call, early, x / owners, x % owners), kOwnBlocks,
                                  call.me, count);
        early.held[x] = static_cast<u8>(count);
    }
    return route_all(fine);
}

// Tokens of the rank before each of the block's segments that every owner gets. A warp an owner, a lane some
// segments in a row.
__device__ inline void count_before(const Call& call, const Early& early) {
    const int warp = route_thread() / 32, lane = static_cast<int>(ptx::lane_id()),
              each = (early.segments + 31) / 32;
    for (int o = warp; o < early.owners; o += kRouteThreads / 32) {
        const int first = lane * each, last = min(first + each, early.segments);
        int sum = 0;
#pragma unroll 4
        for (int j = first; j < last; ++j) sum += early.held[j * early.owners + o];
        int before = 0;  // of lower lanes: a lane adds what each lower bit's half of the warp below it holds
        for (int step = 1, all = sum; step < 32; step *= 2) {
            const int other = static_cast<int>(__shfl_xor_sync(0xffffffffu, static_cast<u32>(all), step));
            if (lane & step) before += other;
            all += other;
        }
        for (int j = first; j < last; ++j) {
            if (j % call.blocks == call.block) early.before[j / call.blocks * early.owners + o] = before;
            before += early.held[j * early.owners + o];
        }
    }
    route_sync();
}

// Rows of the block's segments at every rank.
__device__ inline void write_sent(const Call& call, const Route& route, const Early& early) {
    const int warp = route_thread() / 32, lane = static_cast<int>(ptx::lane_id()), ranks = call.group->ranks,
              owners = early.owners;
    int* send_row = route.send_row + static_cast<i64>(call.local) * ranks * route.max_tokens;
    int lower = 0;  // lane p: tokens of lower ranks at rank p
    for (int q = 0; q < call.me && lane < ranks; ++q)
        lower += q == lane ? 0 : early.total[q * owners + lane / route.tensor];
    for (int i = warp; call.block + i * call.blocks < early.segments; i += kRouteThreads / 32) {
        const int segment = call.block + i * call.blocks, token = segment * kSegment + lane;
        for (int p = 0; p < ranks; ++p) {
            const u32 mask = early.mask[i * owners + p / route.tensor];
            const int first = static_cast<int>(__shfl_sync(0xffffffffu, static_cast<u32>(lower), p)) +
                              early.before[i * owners + p / route.tensor];
            int row = p == call.me ? 0 : first + __popc(mask & ((1u << lane) - 1));
            if (!(mask >> lane & 1) || row >= route.token_capacity) row = -1;
            if (token < route.max_tokens) send_row[static_cast<i64>(token) * ranks + p] = row;
        }
    }
}

// All threads that route; `early.fine` says whether the rows are there.
__device__ inline void find_rows(const Call& call, const Route& route, const Scratch& s, const Early& early,
                                 int tokens) {
    for (int x = route_thread(); x < call.group->ranks * early.owners; x += kRouteThreads) early.total[x] = 0;
    count_segments(call, route, s, early, tokens);
    const bool fine = take_counts(call, early);
    count_before(call, early);
    if (fine) write_sent(call, route, early);
    if (route_thread() == 0) *early.fine = fine;
}

}  // namespace route
