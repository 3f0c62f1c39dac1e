// Dispatch to expert-major rows: tokens are staged in the heap, and every rank pulls what its experts want,
// storing a row once for every local expert that takes it. The result is normal memory.
//
// A group is 32 / W tokens of each rank; block b has the groups g = b, b + blocks, ... Eight warps stage the
// block's own tokens with plain loads and stores and set a flag at every peer after each group; they wait for
// nothing but the credit, so no rank's staging ever waits for another's pulling. The ring of the mover pulls
// group after group from every rank, the own included, as their flags come.
//
// Example, 2 ranks, K = 1, position_WTK of rank 1 = [[[0], [-1], [1]], [[2]]]: rank 1 pulls tokens 0 and 2 of
// rank 0 to rows 0 and 1 and stores its own token 0, straight from `x`, to row 2.
#include "exchange/pull.cuh"

namespace exchange {

using namespace mover;

extern "C" __global__ void __launch_bounds__(kPullThreads, 1)
    pull_rows(const __grid_constant__ Group group, const __grid_constant__ Pull pull) {
    const Call call = begin_call(group, kPull);
    const Ring ring = make_ring(call, pull.row_bytes, pull.row_bytes, pull.stages, pull.choices);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    bool fine = true;
    if (warp == 0 && ptx::lane_id() == 0) fine = load_rows(call, ring);
    // A call behind one that failed may have nothing to wait for: routing left it no row.
    if (warp == 1 && ptx::lane_id() == 0) {
        fine = !failed(call);
        fine = store_rows(call, ring) && fine;
    }
    if (warp >= 2) {
        const PullView view = view_of(call, pull);
        if (warp == 2) {
            if (call.block == 0) tell_started(call, static_cast<int>(ptx::lane_id()));
            fine = list_all(call, ring, pull, view, true);
        } else {
            stage_groups(call, pull, view, view.tokens[call.me],
                         static_cast<int>(threadIdx.x) - kMoverThreads);
        }
    }
    end_pull(call, pull, fine);
}

}  // namespace exchange
