// Routing on the device: from every rank's choices to the position of every row, before any data moves.
//
// Every rank gives its expert ids and gate weights to all ranks (a few hundred KB), and each computes alone what it needs: no
// second exchange, and the same integers everywhere. Tokens are cut into chunks of 128 that never cross a rank; a chunk
// keeps one 128-bit mask per expert, so "how many choices of this expert before mine" is a population count, in token
// order, without sorting and without atomics whose order matters.
//
// Example, 2 ranks, one expert each, K = 1: rank 0 wants [0, 1, 1], rank 1 wants [1, 0]. On rank 1, expert 1 has the
// rows (rank 0, token 1), (rank 0, token 2), (rank 1, token 0): position_WTK = [[[-1], [0], [1]], [[2], [-1]]]; the
// tokens it receives are its compact rows 0 and 1: recv_row_WT = [[-1, 0, 1], [-1, -1]].
#include "routing.cuh"

extern "C" __global__ void __launch_bounds__(kRouteThreads, 1) route_choices(const __grid_constant__ Group group,
                                                                             const __grid_constant__ Route route) {
    const Call call = begin_call(group, kRoute);
    const Scratch s = carve(call, route, call.block, group.blocks);
    const int ranks = group.ranks, thread = static_cast<int>(threadIdx.x);
    int* columns = reinterpret_cast<int*>(group.heap[call.me] + route.counts_at);
    int* rank_columns = columns + static_cast<i64>(s.per_source) * ranks * route.experts;
    const int* tokens = reinterpret_cast<const int*>(group.heap[call.me] + route.tokens_at) + (call.epoch & 1) * ranks;
    give_choices(call, route);
    tell_given(call);
    clear_masks(route, s);
    find_homes(route, s);
    bool fine = take_choices(call);
    if (fine) {
        cut_chunks(route, s, tokens);
        fetch_choices<2>(call, route, s);
        mark_experts(call, route, s);
        for (int i = thread; i < s.chunks * route.experts; i += kRouteThreads) columns[s.first * route.experts + i] = held(&s.mask[4 * i]);
        if (!route.replicated) give_owners(s, rank_columns);
        fine = own_blocks(call, 1);
    }
    if (fine) scan_chunks<16>(s, columns, route.experts, ranks, s.before, s.total);
    if (fine && route.replicated) {
        __syncthreads();
        if (route.room) balance(call, route, s);
        mark_owners(route, s);
        give_owners(s, rank_columns);
        fine = own_blocks(call, 2);
    }
    if (fine) {
        scan_owners(s, rank_columns, ranks);
        __syncthreads();
        place_slots(call, route, s);
        place_sources(route, s, ranks);
        place_choices(call, route, s, [](int, int, int, int) {});
        write_rows(call, route, s, true);
        if (call.block == 0) write_totals(call, route, s, tokens);
    } else {
        leave_nothing(call, route);
    }
    end_call(call);
}
