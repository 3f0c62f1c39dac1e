// Routing on the device: from every rank's choices to the position of every row, before any data moves.
//
// Every rank gives its expert ids and gate weights to all ranks (a few hundred KB), and each computes alone
// what it needs: no second exchange, and the same integers everywhere. Tokens are cut into chunks of 128 that
// never cross a rank; a chunk keeps one 128-bit mask per expert, so "how many choices of this expert before
// mine" is a population count, in token order, without sorting and without atomics whose order matters.
//
// Example, 2 ranks, one expert each, K = 1: rank 0 wants [0, 1, 1], rank 1 wants [1, 0]. On rank 1, expert 1
// has the rows (rank 0, token 1), (rank 0, token 2), (rank 1, token 0): position_WTK = [[[-1], [0], [1]],
// [[2], [-1]]]; the tokens it receives are its compact rows 0 and 1: recv_row_WT = [[-1, 0, 1], [-1, -1]].
#include "routing/whole.cuh"

namespace route {

extern "C" __global__ void __launch_bounds__(kRouteThreads, 1)
    route_choices(const __grid_constant__ Group group, const __grid_constant__ Route route) {
    const Call call = begin_call(group, kRoute);
    route_whole(call, route, carve(call, route, call.block, group.blocks));
    end_call(call);
}

}  // namespace route
