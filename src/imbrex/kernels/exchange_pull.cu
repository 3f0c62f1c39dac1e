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
#include "exchange_rows.cuh"

constexpr int kStagingLead = 4;  // the lister runs up to two groups ahead of the stores; less than that stalls it
constexpr int kBatch = 8;        // loads in flight per lane

struct Pull {
    const u8* x;          // [ranks of the launch, max_tokens, row_bytes]
    u8* out;              // [.., rows, row_bytes], expert-major
    const int* position;  // [.., W, max_tokens, K]; row of every choice of every rank's tokens here, -1: not here
    const int* tokens;    // [.., W]; tokens of every rank
    i64 staged_at;        // offset in a heap of the staging buffers
    i64 buffer_bytes;
    i64 x_stride;
    i64 out_stride;
    int max_tokens;
    int choices;  // K
    int row_bytes;
    int stages;
    int buffer;  // which of the buffers
    int lag;     // calls since that buffer was used, at least
};

struct PullView {
    const u8* x;
    u8* out;
    const int* position;
    const int* tokens;
    i64 buffer;
    int per_group;
    int source, tokens_there;  // whose tokens this lane lists
};

__device__ inline PullView view_of(const Call& call, const Pull& pull) {
    const Group& group = *call.group;
    PullView view;
    view.x = pull.x + call.local * pull.x_stride;
    view.out = pull.out + call.local * pull.out_stride;
    view.position = pull.position + static_cast<i64>(call.local) * group.ranks * pull.max_tokens * pull.choices;
    view.tokens = pull.tokens + call.local * group.ranks;
    view.buffer = pull.staged_at + pull.buffer * pull.buffer_bytes;
    view.per_group = 32 / group.ranks;
    view.source = (static_cast<int>(ptx::lane_id()) + call.me) % group.ranks;
    view.tokens_there = view.tokens[view.source];
    return view;
}

__device__ inline void list_staging(const Call& call, const Ring& ring, const Pull& pull, const PullView& view, int g, u32 number) {
    const int lane = static_cast<int>(ptx::lane_id());
    SegmentHead* segment = open_segment(call, ring, number);
    const int token = g * view.per_group + lane, tokens = __shfl_sync(0xffffffffu, view.tokens_there, 0);
    if (lane < view.per_group) {
        ItemHead* item = item_of(ring, segment, lane);
        item->source = view.x + static_cast<i64>(token) * pull.row_bytes;
        targets_of(item)[0] = call.group->heap[call.me] + view.buffer + static_cast<i64>(token) * pull.row_bytes;
        item->targets = token < tokens;
    }
    close_segment(ring, segment, number, view.per_group, 1);
}

// False when a peer's staging did not come.
__device__ inline bool list_pull(const Call& call, const Ring& ring, const Pull& pull, const PullView& view, int g, u32 number) {
    const Group& group = *call.group;
    const int lane = static_cast<int>(ptx::lane_id());
    SegmentHead* segment = open_segment(call, ring, number);
    const int source = view.source, token = g * view.per_group + lane / group.ranks;
    ItemHead* item = item_of(ring, segment, lane);
    int targets = 0;
    bool fine = true;
    if (lane < view.per_group * group.ranks && token < view.tokens_there) {
        const i64 at = static_cast<i64>(source) * pull.max_tokens + token;
        for (int k = 0; k < pull.choices; k += kBatch) {
            int row[kBatch];
#pragma unroll
            for (int u = 0; u < kBatch; ++u) row[u] = k + u < pull.choices ? view.position[at * pull.choices + k + u] : -1;
#pragma unroll
            for (int u = 0; u < kBatch; ++u)
                if (row[u] >= 0) targets_of(item)[targets++] = view.out + static_cast<i64>(row[u]) * pull.row_bytes;
        }
        if (source == call.me) {
            item->source = view.x + static_cast<i64>(token) * pull.row_bytes;
        } else {
            item->source = group.heap[source] + view.buffer + static_cast<i64>(token) * pull.row_bytes;
            if (targets) fine = wait_flag(call, flag_of(group, group.staged_flags, call.me, source, g), call.epoch, kRowsStaged, source);
        }
    }
    item->targets = targets;
    if (!__all_sync(0xffffffffu, fine)) return false;
    close_segment(ring, segment, number, 32, 0);
    return true;
}

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
