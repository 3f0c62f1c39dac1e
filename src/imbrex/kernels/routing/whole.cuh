// All that routing does, in a block that has room for all of its chunks; see routing/route.cu.
#pragma once
#include "routing/results.cuh"

namespace route {

// Nothing besides positions is written of a choice.
struct NoMore {
    __device__ __forceinline__ void operator()(int, int, int, int) const {}
};

// All threads that route; false where somebody did not come, and then nothing is routed. `also`: see
// `place_choices`.
template <class Also = NoMore>
__device__ inline bool route_whole(const Call& call, const Route& route, const Scratch& s, Also also = {}) {
    const int ranks = call.group->ranks;
    int* columns = reinterpret_cast<int*>(call.group->heap[call.me] + route.counts_at);
    int* rank_columns = columns + static_cast<i64>(s.per_source) * ranks * route.experts;
    const int* tokens =
        reinterpret_cast<const int*>(call.group->heap[call.me] + route.tokens_at) + (call.epoch & 1) * ranks;
    give_choices(call, route);
    tell_given(call);
    clear_masks(route, s);
    find_homes(route, s);
    bool fine = take_choices(call);
    if (fine) {
        cut_chunks(route, s, tokens);
        fetch_choices<2>(call, route, s);
        mark_experts(call, route, s);
        for (int i = route_thread(); i < s.chunks * route.experts; i += kRouteThreads)
            columns[s.first * route.experts + i] = held(&s.mask[4 * i]);
        if (!route.replicated) give_owners(s, rank_columns);
        fine = own_blocks(call, 1);
    }
    if (fine) scan_chunks<16>(s, columns, route.experts, ranks, s.before, s.total);
    if (fine && route.replicated) {
        route_sync();
        if (route.room) balance(call, route, s);
        mark_owners(route, s);
        give_owners(s, rank_columns);
        fine = own_blocks(call, 2);
    }
    if (fine) {
        scan_owners(s, rank_columns, ranks);
        route_sync();
        place_slots(call, route, s);
        place_sources(route, s, ranks);
        place_choices(call, route, s, also);
        write_rows(call, route, s, true);
        if (call.block == 0) write_totals(call, route, s, tokens);
    } else {
        leave_nothing(call, route);
    }
    return fine;
}

}  // namespace route
