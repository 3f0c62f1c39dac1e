// Dispatch to expert-major rows: tokens are staged in the heap, and every rank pulls what its experts want, storing
// a row once for every local expert that takes it. The result is normal memory.
//
// One stream of segments a block: stage the tokens of group g, then pull group g - kStagingLead from every rank, the
// own included. A group is 32 / W tokens of each rank; block b has the groups g = b, b + blocks, ... Staging waits for no
// peer but the credit, and a pull of group g waits only for the staging of g, which its owner lists before any pull
// of g: no cycle.
//
// Example, 2 ranks, K = 1, position_WTK of rank 1 = [[[0], [-1], [1]], [[2]]]: rank 1 pulls tokens 0 and 2 of rank 0 to
// rows 0 and 1 and stores its own token 0, straight from `x`, to row 2.
#include "exchange_pull.cuh"

__device__ inline void list_all(const Call& call, const Ring& ring, const Pull& pull) {
    const int lane = static_cast<int>(ptx::lane_id());
    const Group& group = *call.group;
    const PullView view = view_of(call, pull);
    if (call.block == 0) tell_started(call, lane);
    bool fine = wait_credit(call, lane, pull.lag);
    int most = 0;
    for (int p = 0; p < group.ranks; ++p) most = view.tokens[p] > most ? view.tokens[p] : most;
    const int groups = (most + view.per_group - 1) / view.per_group;
    u32 number = 0;
    const int lead = kStagingLead * group.blocks;
    for (int g = call.block; fine && g < groups + lead; g += group.blocks) {
        if (g < groups) list_staging(call, ring, pull, view, g, number++);
        if (g >= lead) {
            fine = list_pull(call, ring, pull, view, g - lead, number);
            number += fine;
        }
    }
    open_segment(call, ring, number);
    close_segment(ring, segment_of(ring, number), number, 0, 0);
}

extern "C" __global__ void __launch_bounds__(kMoverThreads, 1) pull_rows(const __grid_constant__ Group group,
                                                                         const __grid_constant__ Pull pull) {
    const Call call = begin_call(group, kPull);
    const Ring ring = make_ring(call, pull.row_bytes, pull.row_bytes, pull.stages, pull.choices);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp == 0 && ptx::lane_id() == 0) load_rows(call, ring);
    if (warp == 1 && ptx::lane_id() == 0) store_rows(call, ring);
    if (warp == 2) list_all(call, ring, pull);
    if (warp == 3 && ptx::lane_id() == 0) publish_segments(call, ring, group.staged_flags);
    end_call(call);
}
