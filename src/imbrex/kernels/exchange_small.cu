// Dispatch of a small batch in one kernel: routing, data and flags, for decoding.
//
// Every block gives its share of the ids and weights to all ranks and copies its share of the tokens into the own heap, then sets
// one flag per peer for both. When all blocks of all ranks have, every block routes all tokens by itself -- a few
// thousand choices, less than a meeting of blocks costs -- and its warps move parts of rows, each from where its token lies
// through registers to every row that takes it. What routing tells is written by one block a chunk.
//
// Ids and tokens of two calls lie side by side, by the parity of the epoch: whoever has begun call n has left call n - 1, and
// nobody leaves call n before all have begun it, so nothing of call n - 1 is read when call n + 1 writes. Replays of a graph count on.
//
// Example: as routing.cu, whose positions it computes, and exchange_pull.cu, whose rows it moves.
#include "exchange_copy.cuh"
#include "routing.cuh"

struct Small {
    Route route;
    const u8* x;      // [ranks of the launch, tokens, row_bytes]
    u8* out;          // [.., rows, row_bytes], expert-major
    i64 staged_at;    // offset in a heap of the two staging buffers
    i64 buffer_bytes;
    i64 x_stride;
    i64 out_stride;
    int row_bytes;
    int parts;        // in which a row is cut
};

// All threads: every position of this rank, by this block alone; `position` and `columns` in shared memory.
__device__ inline void route_alone(const Call& call, const Route& route, const Scratch& s, const int* tokens, int* position, int* columns) {
    const int ranks = call.group->ranks, thread = static_cast<int>(threadIdx.x);
    int* rank_columns = columns + s.chunks * route.experts;
    cut_chunks(route, s, tokens);
    fetch_choices(call, route, s);
    mark_experts(call, route, s);
    for (int i = thread; i < s.chunks * route.experts; i += kRouteThreads) columns[i] = held(&s.mask[4 * i]);
    __syncthreads();
    scan_chunks<4>(s, columns, route.experts, ranks, s.before, s.total);
    __syncthreads();
    if (route.room) balance(call, route, s);
    if (route.replicated) mark_owners(route, s);
    give_owners(s, rank_columns);
    __syncthreads();
    scan_chunks<4>(s, rank_columns, s.owners, ranks, s.rank_before, s.rank_total);
    __syncthreads();
    place_slots(call, route, s);
    place_sources(route, s, ranks);
    place_choices(call, route, s, [&](int c, int token, int k, int row) { position[(c * kChunk + token) * route.choices + k] = row; });
    write_rows(call, route, s);
    if (call.block == 0) write_totals(call, route, s, tokens);
    __syncthreads();
}

// Each warp a part of a token's row, from its rank to every row here that takes it.
__device__ inline void pull_parts(const Call& call, const Small& small, const Scratch& s, const u8* staged, const int* position) {
    const Group& group = *call.group;
    const int lane = static_cast<int>(ptx::lane_id()), ranks = group.ranks, choices = small.route.choices, warps = kRouteThreads / 32;
    const int columns = small.row_bytes / 16, wide = (columns + 32 * small.parts - 1) / (32 * small.parts) * 32;
    const int units = ranks * s.per_source * kChunk * small.parts;
    u8* out = small.out + call.local * small.out_stride;
    for (int u = call.block * warps + static_cast<int>(threadIdx.x) / 32; u < units; u += group.blocks * warps) {
        const int pair = u / small.parts, first = u % small.parts * wide, token = pair / ranks;
        const int source = (pair + call.me) % ranks, c = source * s.per_source + token / kChunk;
        if (token % kChunk >= s.chunk[c].tokens) continue;
        const int row = lane < choices ? position[(c * kChunk + token % kChunk) * choices + lane] : -1;
        u32 taken = __ballot_sync(0xffffffffu, row >= 0);
        if (taken == 0) continue;
        const u8* x = source == call.me ? small.x + call.local * small.x_stride : group.heap[source] + (staged - group.heap[call.me]);
        Words<kStaged> words;
        for (int column = first; column < min(first + wide, columns); column += 32 * kStaged) {
            words.load(x + static_cast<i64>(token) * small.row_bytes, column + lane, 32, min(first + wide, columns));
            for (u32 left = taken; left; left &= left - 1) {
                const int target = __shfl_sync(0xffffffffu, row, __ffs(left) - 1);
                words.store(out + static_cast<i64>(target) * small.row_bytes, column + lane, 32, min(first + wide, columns));
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kRouteThreads, 1) dispatch_small(const __grid_constant__ Group group,
                                                                              const __grid_constant__ Small small) {
    const Call call = begin_call(group, kSmall);
    const Route& route = small.route;
    const Scratch s = carve(call, route, 0, 1);
    int* position = reinterpret_cast<int*>(s.ids + s.chunks * kChunk * route.choices);
    int* columns = position + s.chunks * kChunk * route.choices;
    u8* staged = group.heap[call.me] + small.staged_at + (call.epoch & 1) * small.buffer_bytes;
    const int own_tokens = route.tokens ? route.tokens[call.local] : route.num_tokens;
    const int step = group.blocks * kRouteThreads, mine = call.block * kRouteThreads + static_cast<int>(threadIdx.x);
    give_choices(call, route);
    copy_words(staged, small.x + call.local * small.x_stride, own_tokens * (small.row_bytes / 16), mine, step);
    tell_given(call);
    prepare(call, route, s);
    if (take_choices(call)) {
        route_alone(call, route, s, reinterpret_cast<const int*>(group.heap[call.me] + route.tokens_at) + (call.epoch & 1) * group.ranks, position, columns);
        pull_parts(call, small, s, staged, position);
    } else {
        leave_nothing(call, route);
    }
    end_call(call);
}
