// Dispatch of a small batch in one kernel: routing, data and flags, for decoding.
//
// Some blocks push all own tokens to every rank at once, before anybody knows who wants them: with 4 ranks
// and 8 choices nine of ten are wanted, and the wire is idle while ranks route. The others give their share
// of the ids and weights to all ranks, and when all have, each routes all tokens by itself -- a few thousand
// choices, less than a meeting of blocks costs. Then, as the tokens of all ranks are there, their warps copy
// parts of rows to every row that takes them. What routing tells is written by one block a chunk.
//
// Ids and tokens of two calls lie side by side, by the parity of the epoch: whoever has begun call n has left
// call n - 1, and nobody leaves call n before all have begun it, so nothing of call n - 1 is read when call n
// + 1 writes. Replays of a graph count on.
//
// The kernel before need not have ended when this one begins: tables of experts are read meanwhile. The next
// may begin when the choices of all ranks have come, since then every rank is in this call.
//
// Every instruction runs a few times at most, so that fetching them is much of the time: with loops unrolled,
// 187 KB, a call of 1 to 128 tokens takes 27 us, without, 108 KB, 21 (two H200).
//
// Example: as routing/route.cu, whose positions it computes, and exchange/pull.cu, whose rows it writes.
#define ROUTE_LOOP _Pragma("unroll 1")
#define ROUTE_FOUR _Pragma("unroll 1")
#define SELDOM __noinline__
#include "exchange/copy.cuh"
#include "routing/results.cuh"

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
    int rows;
    int slots;
    int counters;
};

// Where the rows of every slot end, and how many there are; null: none. One warp.
__device__ inline void write_groups(const Call& call, const Small& small, const int* slot_rows) {
    const int lane = static_cast<int>(ptx::lane_id());
    i64* counts = small.slot_counts + static_cast<i64>(call.local) * small.slots;
    int* plan = small.plan + static_cast<i64>(call.local) * (small.counters + small.slots);
#pragma unroll 1
    for (int i = lane; i < small.counters; i += 32) plan[i] = 0;
    int before = 0;
#pragma unroll 1
    for (int first = 0; first < small.slots; first += 32) {
        const int slot = first + lane, rows = slot_rows && slot < small.slots ? slot_rows[slot] : 0;
        int end = rows;
#pragma unroll 1
        for (int step = 1; step < 32; step *= 2) {
            const int left = __shfl_up_sync(0xffffffffu, end, step);
            if (lane >= step) end += left;
        }
        if (slot < small.slots) counts[slot] = rows, plan[small.counters + slot] = before + end;
        before += __shfl_sync(0xffffffffu, end, 31);
    }
}

// All threads: every position of this rank, by this block alone; `position` and `columns` in shared memory.
__device__ inline void route_alone(const Call& call, const Small& small, const Scratch& s, const int* tokens,
                                   int* position, int* columns) {
    const Route& route = small.route;
    const int ranks = call.group->ranks, thread = static_cast<int>(threadIdx.x);
    int* rank_columns = columns + s.chunks * route.experts;
    cut_chunks(route, s, tokens);
    fetch_choices<1>(call, route, s);
    mark_experts(call, route, s);
#pragma unroll 1
    for (int i = thread; i < s.chunks * route.experts; i += kRouteThreads) columns[i] = held(&s.mask[4 * i]);
    __syncthreads();
    scan_chunks<4>(s, columns, route.experts, ranks, s.before, s.total);
    __syncthreads();
    if (route.room) balance(call, route, s);
    if (route.replicated) mark_owners(route, s);
    give_owners(s, rank_columns);
    __syncthreads();
    scan_owners(s, rank_columns, ranks);
    __syncthreads();
    place_slots(call, route, s);
    place_sources(route, s, ranks);
    place_choices(call, route, s, [&](int c, int token, int k, int row) {
        position[(c * kChunk + token) * route.choices + k] = row;
    });
    __syncthreads();
}

// What others read behind this call: the exchange's combine, and the experts. One block; all threads.
__device__ inline void write_results(const Call& call, const Small& small, Scratch s, const int* tokens,
                                     const int* position) {
    const Route& route = small.route;
    const int thread = static_cast<int>(threadIdx.x);
    if (small.row_weights != nullptr) {
        if (thread >= kRouteThreads - 32) write_groups(call, small, s.slot_rows);
        const i64 all = static_cast<i64>(call.group->ranks) * route.max_tokens * route.choices;
        const float* given = reinterpret_cast<const float*>(call.group->heap[call.me] + route.ids_at) +
                             parity_at(call, route) + 2 * all;
        float* weights = small.row_weights + static_cast<i64>(call.local) * small.rows;
#pragma unroll 1
        for (int i = thread; i < s.chunks * kChunk * route.choices; i += kRouteThreads) {
            const int row = position[i], c = i / (kChunk * route.choices);
            if (row >= 0 && row < small.rows)
                weights[row] = given[s.chunk[c].at * route.choices + i - c * kChunk * route.choices];
        }
    }
    s.sharers = 1;  // nobody else writes them
    write_rows(call, route, s, true);
    write_totals(call, route, s, tokens);
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
    const int words = tokens * (small.row_bytes / 16), step = small.pushers * kRouteThreads;
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
// `sources` ranks, from the `first_source`-th behind this one on. By the first `blocks` blocks.
__device__ inline void place_parts(const Call& call, const Small& small, const Scratch& s,
                                   const int* position, int blocks, int first_source, int sources) {
    const int lane = static_cast<int>(ptx::lane_id()), ranks = call.group->ranks,
              choices = small.route.choices, warps = kRouteThreads / 32;
    const int columns = small.row_bytes / 16,
              wide = (columns + 32 * small.parts - 1) / (32 * small.parts) * 32;
    const int units = sources * s.per_source * kChunk * small.parts;
    u8* out = small.out + call.local * small.out_stride;
#pragma unroll 1
    for (int u = static_cast<int>(threadIdx.x) / 32 * blocks + call.block; u < units;
         u += blocks * warps) {  // evenly over the SMs, which stores bound
        const int pair = u / small.parts, first = u % small.parts * wide, token = pair / sources;
        const int source = (call.me + first_source + pair % sources) % ranks,
                  c = source * s.per_source + token / kChunk;
        if (token % kChunk >= s.chunk[c].tokens) continue;
        const int row = lane < choices ? position[(c * kChunk + token % kChunk) * choices + lane] : -1;
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

// False where ids or tokens of a peer did not come.
__device__ inline bool route_and_place(Call& call, const Small& small) {
    const Route& route = small.route;
    const Scratch s = carve(call, route, 0, 1);
    int* position = reinterpret_cast<int*>(s.ids + s.chunks * kChunk * route.choices);
    int* columns = position + s.chunks * kChunk * route.choices;
    clear_masks(route, s);
    find_homes(route, s);
    ptx::wait_for_launches();
    count_call(call);
    give_choices(call, route);
    tell_given(call);
    const bool fine = take_choices(call);
    ptx::launch_dependents();
    if (!fine) {
        leave_nothing(call, route);
        if (small.row_weights && call.block == call.blocks - 1 && threadIdx.x < 32)
            write_groups(call, small, nullptr);
        return false;
    }
    const int* tokens = reinterpret_cast<const int*>(call.group->heap[call.me] + route.tokens_at) +
                        (call.epoch & 1) * call.group->ranks;
    route_alone(call, small, s, tokens, position, columns);
    // One block writes what there is to tell, as long as the others place rows.
    const int placing = max(1, call.blocks - 1);
    if (call.block == call.blocks - 1) write_results(call, small, s, tokens, position);
    if (call.block >= placing) return true;
    place_parts(call, small, s, position, placing, 0, 1);
    if (call.group->ranks == 1) return true;
    if (!take_tokens(call, small)) return false;
    place_parts(call, small, s, position, placing, 1, call.group->ranks - 1);
    return true;
}

extern "C" __global__ void __launch_bounds__(kRouteThreads, 1)
    dispatch_small(const __grid_constant__ Group group, const __grid_constant__ Small small) {
    Call call = name_call(group, kSmall, small.pushers);
    bool fine = true;
    if (call.block >= call.blocks) {
        ptx::wait_for_launches();
        count_call(call);
        push_tokens(call, small,
                    small.route.tokens ? small.route.tokens[call.local] : small.route.num_tokens);
    } else {
        fine = route_and_place(call, small);
    }
    end_rows(call, fine, small.out + call.local * small.out_stride, small.out_bytes);
}

}  // namespace exchange
