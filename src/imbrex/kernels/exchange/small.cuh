// Dispatch of a small batch in one kernel: routing, data and flags, for decoding.
//
// Some blocks push all own tokens to every rank at once, before anybody knows who wants them: with 4 ranks
// and 8 choices nine of ten are wanted, and the wire is idle while ranks route. The others give their share
// of the ids and weights to all ranks, and when all have, each routes all tokens by itself -- a few thousand
// choices, less than a meeting of blocks costs. Then, as the tokens of all ranks are there, their warps copy
// parts of rows to every row that takes them. What routing tells is written by two blocks that place no rows.
//
// Choices are words with the epoch above, as is each rank's number of tokens, so they need no flag and no
// fence, 3 us in which nothing else is done. Words and tokens of two calls lie side by side, by the parity of
// the epoch: whoever has begun call n has left call n - 1, and nobody leaves call n before all have begun it,
// so nothing of call n - 1 is read when call n + 1 writes, and a word has the epoch of its call or of one
// before. Replays of a graph count on.
//
// The kernel before need not have ended when this one begins: tables of experts are read meanwhile. The next
// may begin when the choices of all ranks have come, since then every rank is in this call. Which experts
// have rows, and then where rows end, is told before rows are there: the experts' first product asks for
// weights meanwhile (ffn/both.cu, gemm/follow.cu). Until then the number of such experts and the last end are
// negative, from before the next kernel may begin.
//
// Every instruction runs a few times at most, so that fetching them is much of the time: with loops unrolled,
// 187 KB, a call of 1 to 128 tokens takes 27 us, without, 108 KB, 21 (two H200).
//
// Example: as routing/route.cu, whose positions it computes, and exchange/pull.cu, whose rows it writes.
#pragma once
#define ROUTE_LOOP _Pragma("unroll 1")
#define ROUTE_FOUR _Pragma("unroll 1")
#define SELDOM __noinline__
#ifndef IN_ONE_LAUNCH
#define IN_ONE_LAUNCH 0  // whether products are of the same launch (fused/few.cu)
#endif
#include "exchange/copy.cuh"
#include "exchange/told.cuh"
#include "ffn/hits.cuh"
#include "ptx/stamps.cuh"
#include "routing/few.cuh"

namespace exchange {

using namespace mover;
using namespace route;

struct Small {
    Route route;
    const u8* x;    // [ranks of the launch, tokens, row_bytes]
    u8* out;        // [.., rows, row_bytes], expert-major
    i64 staged_at;  // offset in a heap of the two buffers of tokens, [W, max_tokens, row_bytes]
    i64 buffer_bytes;
    i64 x_stride;
    i64 out_stride;
    i64 out_bytes;  // of one rank's rows, all that there is room for
    int row_bytes;
    int parts;    // in which a row is cut
    int pushers;  // blocks that push; the last ones
    float* row_weights;  // [.., rows], or null: the gate weight of every row; unset without a choice
    i64* slot_counts;    // [.., slots]: rows of every slot of this rank
    int* plan;           // [.., counters + slots]: zeros, then where every slot's rows end
    u32* hits;           // [.., 4 + 2 slots]: which slots have rows (ffn/hits.cuh)
    int rows;
    int slots;
    int counters;
};

__device__ __forceinline__ u32* hits_of(const Call& call, const Small& small) {
    return small.hits + static_cast<i64>(call.local) * ffn::hit_words(small.slots);
}

// One thread, when all that `write_groups` writes before is there; negative: it is not.
__device__ __forceinline__ void tell_last_end(const Call& call, const Small& small, int end) {
    int* plan = small.plan + static_cast<i64>(call.local) * (small.counters + small.slots);
    ptx::store_release_gpu(reinterpret_cast<u32*>(plan + small.counters + small.slots - 1),
                           static_cast<u32>(end));
}

// Before the next kernel may begin: nothing is told, and nothing drawn.
__device__ __forceinline__ void begin_groups(const Call& call, const Small& small) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) tell_last_end(call, small, -1);
    if (thread == 32) ffn::tell_no_hits(hits_of(call, small));
    if (thread < small.counters)
        small.plan[static_cast<i64>(call.local) * (small.counters + small.slots) + thread] = 0;
}

// Where the rows of every slot end, and how many there are; null: none. One warp.
__device__ inline void write_groups(const Call& call, const Small& small, const int* slot_rows) {
    const int lane = static_cast<int>(ptx::lane_id());
    i64* counts = small.slot_counts + static_cast<i64>(call.local) * small.slots;
    int* plan = small.plan + static_cast<i64>(call.local) * (small.counters + small.slots);
    int before = 0, *ends = plan + small.counters;
#pragma unroll 1
    for (int first = 0; first < small.slots; first += 32) {
        const int slot = first + lane, rows = slot_rows && slot < small.slots ? slot_rows[slot] : 0;
        int end = rows;
#pragma unroll 1
        for (int step = 1; step < 32; step *= 2) {
            const int left = __shfl_up_sync(0xffffffffu, end, step);
            if (lane >= step) end += left;
        }
        if (slot < small.slots) counts[slot] = rows;
        if (slot < small.slots - 1) ends[slot] = before + end;
        before += __shfl_sync(0xffffffffu, end, 31);
    }
    __syncwarp();
    if (lane == 0) tell_last_end(call, small, before);
}


// Which blocks write what others read behind this call: where rows end and their weights, and where tokens
// go. The first `placing` blocks write positions, and place rows.
__device__ __forceinline__ bool tells_groups(const Call& call) { return call.block == call.blocks - 1; }
__device__ __forceinline__ bool tells_rows(const Call& call) {
    return call.block == max(0, call.blocks - 2);
}
__device__ __forceinline__ int placing(const Call& call) { return placing_of(call.blocks); }

// Which slots have rows. One warp.
template <class RowsOf>
__device__ __forceinline__ void tell_hits(const Call& call, const Small& small, RowsOf rows_of) {
    ffn::tell_hits(hits_of(call, small), small.slots,
                   [&](int slot) { return slot < small.slots ? rows_of(slot) : 0; });
    if (IN_ONE_LAUNCH && ptx::lane_id() == 0) ptx::add_acq_rel_gpu(told_of(call), kHitsTold);
    if (ptx::lane_id() == 0) ptx::stamp(ptx::kTells);
}

__device__ __forceinline__ u64 word_of(const Call& call, u32 value) {
    return static_cast<u64>(call.epoch) << 32 | value;
}

// Words of all ranks' choices at a rank: ids, [W, max_tokens, K], then weights.
__device__ __forceinline__ u64* words_at(const Call& call, const Route& route, int rank) {
    return reinterpret_cast<u64*>(call.group->heap[rank] + route.ids_at) + 2 * parity_at(call, route);
}
__device__ __forceinline__ u64* tokens_at(const Call& call, const Route& route, int rank) {
    return reinterpret_cast<u64*>(call.group->heap[rank] + route.tokens_at) +
           (call.epoch & 1) * call.group->ranks;
}

// A block's share of the own choices to every rank, and, by one block, how many tokens there are.
__device__ inline void give_words(const Call& call, const Route& route) {
    const int ranks = call.group->ranks, thread = static_cast<int>(threadIdx.x);
    const int tokens = route.tokens ? route.tokens[call.local] : route.num_tokens;
    const i64 mine = static_cast<i64>(route.max_tokens) * route.choices;
    stall(call, 4);
#pragma unroll 1
    for (int i = call.block * kRouteThreads + thread; i < tokens * route.choices;
         i += call.blocks * kRouteThreads) {
        const u64 id = word_of(call, static_cast<u32>(short_id(route.ids[call.local * mine + i]))),
                  weight = word_of(call, __float_as_uint(route.weights[call.local * mine + i]));
#pragma unroll 1
        for (int p = 0; p < ranks; ++p) {
            u64* there = words_at(call, route, p) + call.me * mine + i;
            ptx::store_relaxed_sys(there, id);
            ptx::store_relaxed_sys(there + ranks * mine, weight);
        }
    }
    if (call.block == 0 && thread < ranks)
        ptx::store_relaxed_sys(tokens_at(call, route, thread) + call.me,
                               word_of(call, static_cast<u32>(tokens)));
}

// Looks until `word` is of this call, or after the time-out or any failure; what it is then.
__device__ inline u64 look_again(const Call& call, const u64* word, int peer) {
    const u64 start = ptx::global_timer();
    for (u32 polls = 1;; ++polls) {
        const u64 held = ptx::load_relaxed_sys(word);
        if (held >> 32 == call.epoch || stop_waiting(call, kIdsArrived, peer, start, polls)) return held;
    }
}

// Whether `word`, which was `held`, is of this call, or has become so.
__device__ __forceinline__ bool wait_word(const Call& call, const u64* word, u64& held, int peer) {
    if (held >> 32 == call.epoch) return true;
    held = look_again(call, word, peer);
    return held >> 32 == call.epoch;
}

// Every rank's number of tokens, and the chunks that they are. All threads; false on failure.
__device__ inline bool take_counts(const Call& call, const Route& route, const Scratch& s, int* tokens) {
    bool fine = true;
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x); c < s.chunks; c += kRouteThreads) {
        const int source = c / s.per_source, first = (c - source * s.per_source) * kChunk;
        const u64* word = tokens_at(call, route, call.me) + source;
        u64 held = ptx::load_relaxed_sys(word);
        fine = fine && wait_word(call, word, held, source);
        const int count = fine ? static_cast<int>(held) : 0;
        s.chunk[c] = {source, first, max(0, min(kChunk, count - first)), source * route.max_tokens + first};
        if (first == 0) tokens[source] = count;
    }
    return __syncthreads_and(fine) != 0;
}

// Every rank's choices, told to `also(chunk, token, id)`, and its weights where this block tells them. All
// threads; false on failure.
template <class Also>
__device__ inline bool take_words(const Call& call, const Small& small, const Scratch& s, Also also) {
    const Route& route = small.route;
    const int ranks = call.group->ranks, thread = static_cast<int>(threadIdx.x),
              per = kChunk * route.choices;
    const i64 all = static_cast<i64>(ranks) * route.max_tokens * route.choices;
    float* weights = route.all_weights + call.local * all;
    bool fine = true;
    const u64* words = words_at(call, route, call.me);
#pragma unroll 1
    for (int first = thread; first < s.chunks * per; first += 2 * kRouteThreads) {
        u64 id[2], weight[2];
#pragma unroll
        for (int u = 0; u < 2; ++u) {  // no branch around a load: they all leave before the first comes back
            const int i = min(first + u * kRouteThreads, s.chunks * per - 1), c = i / per;
            const i64 at = static_cast<i64>(s.chunk[c].at) * route.choices +
                           min(i - c * per, max(1, s.chunk[c].tokens) * route.choices - 1);
            id[u] = ptx::load_relaxed_sys(words + at);
            weight[u] = ptx::load_relaxed_sys(words + all + at);
        }
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            const int i = first + u * kRouteThreads, c = i / per, in_chunk = i - c * per;
            if (i >= s.chunks * per) continue;
            const int token = in_chunk / route.choices, source = s.chunk[c].source;
            const bool here = token < s.chunk[c].tokens;
            const i64 at = static_cast<i64>(s.chunk[c].at) * route.choices + in_chunk;
            fine = fine && (!here || wait_word(call, words + at, id[u], source));
            const u16 expert =
                fine && here ? known_id(call, route, s, c, static_cast<int>(id[u])) : kNone;
            s.ids[i] = expert;
            if (expert != kNone) also(c, token, expert);
            if (!writes(s, c) && !tells_groups(call)) continue;
            fine = fine && (!here || wait_word(call, words + all + at, weight[u], source));
            if (writes(s, c) && s.chunk[c].first + token < route.max_tokens)
                weights[at] = here ? __uint_as_float(static_cast<u32>(weight[u])) : 0.0f;
        }
    }
    return __syncthreads_and(fine) != 0;
}

// All threads: where rows of every slot begin and every position of this rank, by this block alone;
// `position` and `columns` in shared memory.
__device__ inline void route_alone(const Call& call, const Small& small, const Scratch& s, int* position,
                                   int* columns) {
    const Route& route = small.route;
    const int ranks = call.group->ranks, thread = static_cast<int>(threadIdx.x);
    mark_experts(call, route, s);
#pragma unroll 1
    for (int i = thread; i < s.chunks * route.experts; i += kRouteThreads) columns[i] = held(&s.mask[4 * i]);
    __syncthreads();
    scan_chunks<4>(s, columns, route.experts, ranks, s.before, s.total);
    __syncthreads();
    if (route.room) balance(call, route, s);
    place_slots(call, route, s);
    if (small.row_weights && tells_groups(call) && thread >= kRouteThreads - 32) {
        tell_hits(call, small, [&](int slot) { return s.slot_rows[slot]; });
        write_groups(call, small, s.slot_rows);
    }
    if (call.block >= placing(call) && !tells_groups(call)) return;
    place_choices(call, route, s, [&](int c, int token, int k, int row) {
        position[(c * kChunk + token) * route.choices + k] = row;
    });
    __syncthreads();
}

// The weight of every row. All threads. `row_of(chunk, token, choice)`: the row here, or negative.
template <class RowOf>
__device__ inline void write_weights(const Call& call, const Small& small, const Scratch& s, RowOf row_of) {
    const Route& route = small.route;
    const i64 all = static_cast<i64>(call.group->ranks) * route.max_tokens * route.choices;
    const u64* given = words_at(call, route, call.me) + all;
    float* weights = small.row_weights + static_cast<i64>(call.local) * small.rows;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < s.chunks * kChunk * route.choices; i += kRouteThreads) {
        const int c = i / (kChunk * route.choices), in_chunk = i - c * kChunk * route.choices,
                  token = in_chunk / route.choices, row = row_of(c, token, in_chunk - token * route.choices);
        if (row >= 0 && row < small.rows)
            weights[row] = __uint_as_float(
                static_cast<u32>(ptx::load_relaxed_sys(given + s.chunk[c].at * route.choices + in_chunk)));
    }
}

// What the exchange's combine reads: where tokens go, and how many. All threads, when owners are counted.
__device__ inline void write_results(const Call& call, const Small& small, Scratch s, const int* tokens) {
    place_sources(small.route, s, call.group->ranks);
    s.sharers = 1;  // nobody else writes them
    write_rows(call, small.route, s, true);
    write_totals(call, small.route, s, tokens);
}

__device__ __forceinline__ u8* staged_of(const Call& call, const Small& small, int at, int from) {
    const i64 token = static_cast<i64>(from) * small.route.max_tokens;
    return call.group->heap[at] + small.staged_at + (call.epoch & 1) * small.buffer_bytes +
           token * small.row_bytes;
}

// A pushing block's share of the own tokens to every other rank, and a flag at each.
__device__ inline void push_tokens(const Call& call, const Small& small, int tokens) {
    const int ranks = call.group->ranks, thread = static_cast<int>(threadIdx.x),
              pusher = call.block - call.blocks;
    const u8* x = small.x + call.local * small.x_stride;
    const int words = ranks > 1 ? tokens * (small.row_bytes / 16) : 0, step = small.pushers * kRouteThreads;
    Words<4> held;
#pragma unroll 1
    for (int first = pusher * kRouteThreads + thread; first < words; first += 4 * step) {
        held.load(x, first, step, words);
#pragma unroll 1
        for (int i = 1; i < ranks; ++i) {
            const int p = call.me + i < ranks ? call.me + i : call.me + i - ranks;
            held.store(staged_of(call, small, p, call.me), first, step, words);
        }
    }
    __syncthreads();
    if (thread < ranks && thread != call.me) {
        ptx::fence_sys();
        ptx::store_relaxed_sys(&control_of(*call.group, thread)->arrived[kSmallRows][call.me][pusher],
                               call.epoch);
    }
}

__device__ inline bool take_tokens(const Call& call, const Small& small) {
    bool fine = true;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < call.group->ranks * small.pushers; i += kRouteThreads) {
        const int p = i / small.pushers;
        if (p != call.me)
            fine = fine && wait_flag(call, &call.own->arrived[kSmallRows][p][i % small.pushers], call.epoch,
                                     kRowsArrived, p);
    }
    return __syncthreads_and(fine) != 0;
}

// Each warp a part of a token's row, from where it was pushed to every row here that takes it: tokens of
// `sources` ranks from `nearest` on, 0: this one. `row_of` as above.
template <class RowOf>
__device__ inline void place_parts(const Call& call, const Small& small, const Scratch& s, int nearest,
                                   int sources, RowOf row_of) {
    const int lane = static_cast<int>(ptx::lane_id()), ranks = call.group->ranks, blocks = placing(call),
              choices = small.route.choices, warps = kRouteThreads / 32;
    const int columns = small.row_bytes / 16,
              wide = (columns + 32 * small.parts - 1) / (32 * small.parts) * 32;
    const int units = sources * s.per_source * kChunk * small.parts;
    u8* out = small.out + call.local * small.out_stride;
#pragma unroll 1
    for (int u = static_cast<int>(threadIdx.x) / 32 * blocks + call.block; u < units;
         u += blocks * warps) {  // evenly over the SMs, which stores bound
        const int pair = u / small.parts, first = u % small.parts * wide, token = pair / sources;
        const int source = (call.me + nearest + pair % sources) % ranks,
                  c = source * s.per_source + token / kChunk;
        if (token % kChunk >= s.chunk[c].tokens) continue;
        const int row = lane < choices ? row_of(c, token % kChunk, lane) : -1;
        const u32 taken = __ballot_sync(0xffffffffu, row >= 0);
        if (taken == 0) continue;
        const u8* x = source == call.me ? small.x + call.local * small.x_stride
                                        : staged_of(call, small, call.me, source);
        Words<4> words;
#pragma unroll 1
        for (int column = first; column < min(first + wide, columns); column += 32 * 4) {
            words.load(x + static_cast<i64>(token) * small.row_bytes, column + lane, 32,
                       min(first + wide, columns));
#pragma unroll 1
            for (u32 left = taken; left; left &= left - 1) {
                const int target = __shfl_sync(0xffffffffu, row, __ffs(left) - 1);
                words.store(out + static_cast<i64>(target) * small.row_bytes, column + lane, 32,
                            min(first + wide, columns));
            }
        }
    }
}

// Where every expert has one slot: what this block tells, and the rows that it places, the own tokens' while
// the others' cross. False where a peer's did not come.
__device__ inline bool place_few(const Call& call, const Small& small, const Scratch& s, const Few& few,
                                 const int* tokens) {
    const Route& route = small.route;
    const auto row_of = [&](int c, int token, int k) {
        return few_row(route, s, few, c, token, s.ids[(c * kChunk + token) * route.choices + k]);
    };
    // By a warp that has no slots to count, before the block meets: the experts wait for it.
    if (small.row_weights && tells_groups(call) && threadIdx.x >= kRouteThreads - 32)
        tell_hits(call, small, [&](int slot) { return rows_of_slot(route, s, few, slot, [](int, int) {}); });
    count_slots(route, s, few);
    if (tells_rows(call)) mask_owners(route, s);
    __syncthreads();
    if (small.row_weights && tells_groups(call)) {
        if (threadIdx.x >= kRouteThreads - 32) write_groups(call, small, s.slot_rows);
        write_weights(call, small, s, row_of);
    }
    if (tells_rows(call)) {
        if (route.tally) count_experts(call, route, s);
        count_owners(s, call.group->ranks);
        __syncthreads();
        write_results(call, small, s, tokens);
    }
    if (call.block >= placing(call)) return true;
    place_parts(call, small, s, 0, 1, row_of);
    if (threadIdx.x == 0) ptx::stamp(ptx::kPlaced);
    write_positions(call, route, s, few);
    if (call.group->ranks == 1) return true;
    if (!take_tokens(call, small)) return false;
    place_parts(call, small, s, 1, call.group->ranks - 1, row_of);
    return true;
}

// The same where experts may have replicas; `position` and `columns` in shared memory.
__device__ inline bool place_many(const Call& call, const Small& small, const Scratch& s, int* position,
                                  int* columns, const int* tokens, int* rank_columns) {
    const int choices = small.route.choices;
    const auto row_of = [&](int c, int token, int k) {
        return position[(c * kChunk + token) * choices + k];
    };
    route_alone(call, small, s, position, columns);
    if (small.row_weights && tells_groups(call)) write_weights(call, small, s, row_of);
    if (tells_rows(call)) {
        mark_owners(small.route, s);
        give_owners(s, rank_columns);
        __syncthreads();
        scan_owners(s, rank_columns, call.group->ranks);
        __syncthreads();
        write_results(call, small, s, tokens);
    }
    if (call.block >= placing(call)) return true;
    if (!take_tokens(call, small)) return false;
    place_parts(call, small, s, 0, call.group->ranks, row_of);
    return true;
}

// False where ids or tokens of a peer did not come.
__device__ inline bool route_and_place(Call& call, const Small& small) {
    const Route& route = small.route;
    Scratch s = carve(call, route, 0, 1);
    s.sharers = placing(call), s.share = call.block < s.sharers ? call.block : -1;
    int* position = reinterpret_cast<int*>(s.ids + s.chunks * kChunk * route.choices);
    int* columns = position + s.chunks * kChunk * route.choices;
    int* rank_columns = columns + s.chunks * route.experts;
    int* tokens = rank_columns + s.chunks * s.owners;
    clear_masks(route, s);
    find_homes(route, s);
    Few few;
    if (!route.replicated) few = find_slots(call, route, s, columns, tokens + call.group->ranks);
    ptx::wait_for_launches();
    if (threadIdx.x == 0) ptx::stamp(ptx::kReleased);
    count_call(call);
    if (small.row_weights && tells_groups(call)) begin_groups(call, small);
    give_words(call, route);
    bool repeated = false, fine = take_counts(call, route, s, tokens);
    fine = fine && take_words(call, small, s, [&](int c, int token, int expert) {
               if (!route.replicated) repeated |= !mark_choice(route, s, c, token, expert);
           });
    if (threadIdx.x == 0) ptx::stamp(ptx::kChoices);
    if (repeated) give_up(call, kBadIds, kIdsArrived, call.me);
    ptx::launch_dependents();
    if (!fine) {
        leave_nothing(call, route);
        if (small.row_weights && tells_groups(call) && threadIdx.x < 32) {
            tell_hits(call, small, [](int) { return 0; });
            write_groups(call, small, nullptr);
        }
        return false;
    }
    if (!route.replicated) return place_few(call, small, s, few, tokens);
    return place_many(call, small, s, position, columns, tokens, rank_columns);
}

}  // namespace exchange
