// Dispatch of a small batch in one kernel: routing, data and flags, for decoding.
//
// Every block gives its share of the ids and weights to all ranks and copies its share of the tokens into the own heap, then sets
// one flag per peer for both. When all blocks of all ranks have, every block routes all tokens by itself -- a few
// thousand choices, less than a meeting of blocks costs -- and pulls its own tokens' rows. All blocks of a rank write the same
// integers.
//
// Ids and tokens of two calls lie side by side, by the parity of the epoch: whoever has begun call n has left call n - 1, and
// nobody leaves call n before all have begun it, so nothing of call n - 1 is read when call n + 1 writes. Replays of a graph count on.
//
// Example: as routing.cu, whose positions it computes, and exchange_pull.cu, whose rows it moves.
#include "exchange_pull.cuh"
#include "routing.cuh"

struct Small {
    Route route;
    Pull pull;
    i64 block_counts;  // bytes of routing scratch of a block
};

// All threads: every position of this rank, by this block alone.
__device__ inline void route_alone(const Call& call, const Route& route, const Scratch& s, const int* tokens, i64 block_counts) {
    const int ranks = call.group->ranks, thread = static_cast<int>(threadIdx.x);
    int* columns = reinterpret_cast<int*>(call.group->heap[call.me] + route.counts_at + call.block * block_counts);
    int* rank_columns = columns + static_cast<i64>(s.per_source) * ranks * route.experts;
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
    write_positions(call, route, s);
    write_rows(call, route, s);
    if (call.block == 0) write_totals(call, route, s, tokens);
}

__device__ inline void list_small(const Call& call, const Ring& ring, const Pull& pull, const PullView& view, const int* tokens) {
    int most = 0;
    for (int p = 0; p < call.group->ranks; ++p) most = max(most, tokens[p]);
    const int groups = (most + view.per_group - 1) / view.per_group;
    u32 number = 0;
    for (int g = call.block; g < groups; g += call.group->blocks) list_pull(call, ring, pull, view, g, number++, false);
    open_segment(call, ring, number);
    close_segment(ring, segment_of(ring, number), number, 0);
}

extern "C" __global__ void __launch_bounds__(kRouteThreads, 1) dispatch_small(const __grid_constant__ Group group,
                                                                              const __grid_constant__ Small small) {
    const Call call = begin_call(group, kSmall);
    const Route& route = small.route;
    const Pull& pull = small.pull;
    const Scratch s = carve(call, route, 0, 1);
    const i64 buffer = pull.staged_at + (call.epoch & 1) * pull.buffer_bytes;
    const int own_tokens = route.tokens ? route.tokens[call.local] : route.num_tokens;
    give_choices(call, route);
    const int step = group.blocks * kRouteThreads, mine = call.block * kRouteThreads + static_cast<int>(threadIdx.x);
    copy_words(group.heap[call.me] + buffer, pull.x + call.local * pull.x_stride, own_tokens * (pull.row_bytes / 16), mine, step);
    tell_given(call);
    prepare(call, route, s);
    if (take_choices(call)) {
        const int* tokens = reinterpret_cast<const int*>(group.heap[call.me] + route.tokens_at) + (call.epoch & 1) * group.ranks;
        route_alone(call, route, s, tokens, small.block_counts);
        ptx::fence_async_shared();  // the ring takes the place of the tables
        __syncthreads();
        const Ring ring = make_ring(call, pull.row_bytes, pull.row_bytes, pull.stages, pull.choices);
        const int warp = static_cast<int>(threadIdx.x) / 32;
        if (warp == 0 && ptx::lane_id() == 0) load_rows(call, ring);
        if (warp == 1 && ptx::lane_id() == 0) store_rows(call, ring);
        if (warp == 2) {
            PullView view = view_of(call, pull);
            view.buffer = buffer;
            view.tokens_there = tokens[view.source];
            list_small(call, ring, pull, view, tokens);
        }
    }
    end_call(call);
}
