// Routing beside something else in the block, with few threads and little shared memory: the steps of
// route.cu over windows of the block's chunks, twice; what other chunks need to know of one goes through
// the rank's scratch.
#pragma once
#include "routing/results.cuh"

#ifndef IN_FLIGHT
#define IN_FLIGHT 2
#endif

namespace route {

constexpr int kInFlight = IN_FLIGHT;  // batches of loads a thread, as registers allow

// Where a block keeps what it knows of its scratch: in shared memory, since registers are short, too.
struct Windows {
    Scratch whole, part;
};

// The next window, for all threads that route, and its masks. Ends in step.
template <bool kWeights>
__device__ inline void mark_window(const Call& call, const Route& route, Windows& windows, int at, int window,
                                   const int* tokens) {
    const Scratch& s = windows.whole;
    if (route_thread() == 0) {
        windows.part.first = s.first + at;
        windows.part.chunks = min(window, s.chunks - at);
        windows.part.rank_mask = s.rank_mask + 4 * at * s.owners;
        windows.part.rank_before = s.rank_before + at * s.owners;
    }
    route_sync();
    clear_masks(route, windows.part);
    cut_chunks(route, windows.part, tokens);
    fetch_choices<kInFlight, kWeights>(call, route, windows.part);
    mark_experts(call, route, windows.part);
}

// Every expert has one slot. All threads that route; false where somebody did not come.
__device__ inline bool route_windows(const Call& call, const Route& route, Windows& windows, int window) {
    const Scratch &s = windows.whole, &w = windows.part;
    const int ranks = call.group->ranks, thread = route_thread(), experts = route.experts;
    const i64 all = static_cast<i64>(s.per_source) * ranks;
    int* columns = reinterpret_cast<int*>(call.group->heap[call.me] + route.counts_at);
    int* rank_columns = columns + all * experts;
    int* before = rank_columns + all * ranks + static_cast<i64>(s.first) * experts;  // of the block's chunks
    const int* tokens =
        reinterpret_cast<const int*>(call.group->heap[call.me] + route.tokens_at) + (call.epoch & 1) * ranks;
    for (int at = 0; at < s.chunks; at += window) {
        mark_window<true>(call, route, windows, at, window, tokens);
        for (int i = thread; i < w.chunks * experts; i += kRouteThreads)
            columns[w.first * experts + i] = held(&w.mask[4 * i]);
        give_owners(w, rank_columns);
        route_sync();
    }
    if (!own_blocks(call, 1)) return false;
    scan_chunks<8 * kInFlight>(s, columns, experts, ranks, before, s.total);
    scan_owners(s, rank_columns, ranks);
    route_sync();
    place_slots(call, route, s);
    place_sources(route, s, ranks);
    for (int at = 0; at < s.chunks; at += window) {
        mark_window<false>(call, route, windows, at, window, tokens);
        for (int i = thread; i < w.chunks * experts; i += kRouteThreads)
            w.before[i] = before[at * experts + i];
        route_sync();
        place_choices(call, route, w, [](int, int, int, int) {});
        write_rows(call, route, w, false);
        route_sync();
    }
    if (call.block == 0) write_totals(call, route, s, tokens);
    return true;
}

}  // namespace route
