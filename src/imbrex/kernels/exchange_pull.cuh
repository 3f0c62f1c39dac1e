// Lists of rows to stage and to pull; see exchange_pull.cu.
#pragma once
#include "exchange_rows.cuh"

constexpr int kStagingLead = 4;  // the lister runs up to two groups ahead of the stores; less than that stalls it

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

// False when a peer's staging did not come; `wait`: for it.
__device__ inline bool list_pull(const Call& call, const Ring& ring, const Pull& pull, const PullView& view, int g, u32 number, bool wait = true) {
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
            if (targets && wait) fine = wait_flag(call, flag_of(group, group.staged_flags, call.me, source, g), call.epoch, kRowsStaged, source);
        }
    }
    item->targets = targets;
    if (!__all_sync(0xffffffffu, fine)) return false;
    close_segment(ring, segment, number, 32, 0);
    return true;
}
