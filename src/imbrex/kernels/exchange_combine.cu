// Combine: the rows of one token on one expert rank become one bf16 row there, cross the wire once, and are summed at
// home in the order of the ranks. From expert-major rows, or from compact rows that already are such sums.
//
// Expert-major, one stream of segments a block: reduce the tokens of group g (of every peer) into this rank's heap and
// publish, then sum at home group g - kLead from all ranks' heaps. A group is per_group tokens of each rank; block b has
// g = b, b + blocks, ... on both sides, so a flag has one writer. Reducing waits for no peer but the credit; summing g waits
// for the reducing of g, which every rank lists before any summing of g: no cycle.
//
// Example, 2 ranks: token 5 of rank 0 has rows r on rank 0 (weight .5) and s, t on rank 1 (weights .25, .25). Rank 1 writes
// u = bf16(.25 t + .25 s); rank 0 writes bf16(u + .5 r).
#include "exchange_sums.cuh"

constexpr int kLead = 5;   // the lister runs two groups ahead of the sums, and a flag takes part of a third
constexpr int kFew = 4;    // the same where 8 would spill

struct Combine {
    const u8* rows;        // expert-major [ranks of the launch, rows, row_bytes]; or null: compact
    const u8* own;         // compact: partial sums of the own tokens [.., max_tokens, row_bytes]
    const u8* addend;      // [.., max_tokens, row_bytes] or null; joins last
    u8* out;               // [.., max_tokens, row_bytes]
    const int* position;   // [.., W, max_tokens, K]
    const float* weights;  // [.., W, max_tokens, K], or null: already applied
    const int* recv_row;   // [.., W, max_tokens]
    const int* send_row;   // [.., max_tokens, W]; column of the own rank: 0 where a choice is local, else -1
    const int* tokens;     // [.., W]
    i64 reduced_at;        // offset in a heap of the buffers of sums
    i64 buffer_bytes;
    i64 rows_stride;       // bytes between ranks of the launch
    i64 x_stride;          // the same for own, addend and out
    int max_tokens;
    int choices;
    int row_bytes;
    int piece_bytes;
    int num_slots;
    int buffer;  // which of the buffers
    int lag;     // calls since that buffer was used, at least
};

struct CombineView {
    i64 tokens_at;  // index of (rank of the launch, 0, 0) in [.., W, max_tokens]
    const u8* rows;
    const int* send_row;
    const int* tokens;
    i64 buffer;
    int per_group;
    int source, tokens_there;  // whose tokens this lane lists for reducing
    int tokens_here;
};

__device__ inline CombineView view_of(const Call& call, const Combine& combine) {
    const int ranks = call.group->ranks;
    CombineView view;
    view.tokens_at = static_cast<i64>(call.local) * ranks * combine.max_tokens;
    view.rows = combine.rows + call.local * combine.rows_stride;
    view.send_row = combine.send_row + view.tokens_at;
    view.tokens = combine.tokens + call.local * ranks;
    view.buffer = combine.reduced_at + combine.buffer * combine.buffer_bytes;
    view.per_group = ranks < 16 ? 16 / ranks : 1;
    view.source = (call.me + static_cast<int>(ptx::lane_id())) % ranks;
    view.tokens_there = view.tokens[view.source];
    view.tokens_here = view.tokens[call.me];
    return view;
}

// Append the rows of a token that are on this rank, in the order of its choices.
__device__ inline int append_own(const SumRing& ring, const Combine& combine, const CombineView& view, SumItem* item, i64 token_at, int rows) {
    for (int k = 0; k < combine.choices; k += kBatch) {
        int row[kBatch];
        float weight[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
            const bool any = k + u < combine.choices;
            row[u] = any ? combine.position[token_at * combine.choices + k + u] : -1;
            weight[u] = any && combine.weights ? combine.weights[token_at * combine.choices + k + u] : 1.0f;
        }
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
            if (row[u] < 0) continue;
            rows_of(item)[rows] = view.rows + static_cast<i64>(row[u]) * combine.row_bytes;
            weights_of(ring, item)[rows++] = weight[u];
        }
    }
    return rows;
}

__device__ inline void list_reducing(const Call& call, const SumRing& ring, const Combine& combine, const CombineView& view, int g, u32 number) {
    const int lane = static_cast<int>(ptx::lane_id()), ranks = call.group->ranks;
    SumHead* segment = open_sums(call, ring, number);
    SumItem* item = sum_item(ring, segment, min(lane, kSegmentItems - 1));
    bool listed = false;
    const int source = view.source, token = g * view.per_group + lane / ranks;
    if (lane < kSegmentItems) item->target = nullptr;
    if (lane < view.per_group * ranks && source != call.me && token < view.tokens_there) {
        const i64 at = view.tokens_at + static_cast<i64>(source) * combine.max_tokens + token;
        const int row = combine.recv_row[at];
        if (row >= 0) {
            item->target = call.group->heap[call.me] + view.buffer + static_cast<i64>(row) * combine.row_bytes;
            item->rows = append_own(ring, combine, view, item, at, 0);
            listed = true;
        }
    }
    close_sums(ring, segment, number, kSegmentItems, g / call.group->blocks, listed);
}

__device__ inline void list_home(const Call& call, const SumRing& ring, const Combine& combine, const CombineView& view, SumItem* item, int token) {
    const Group& group = *call.group;
    const i64 x_at = call.local * combine.x_stride + static_cast<i64>(token) * combine.row_bytes;
    int rows = 0;
    for (int first = 0; first < group.ranks; first += kFew) {
        int row[kFew];
#pragma unroll
        for (int u = 0; u < kFew; ++u) row[u] = first + u < group.ranks ? view.send_row[static_cast<i64>(token) * group.ranks + first + u] : -1;
#pragma unroll
        for (int u = 0; u < kFew; ++u) {
            const int p = first + u;
            if (row[u] < 0) continue;
            if (p == call.me && combine.rows) {
                rows = append_own(ring, combine, view, item, view.tokens_at + static_cast<i64>(call.me) * combine.max_tokens + token, rows);
            } else {
                weights_of(ring, item)[rows] = 1.0f;
                rows_of(item)[rows++] = p == call.me ? combine.own + x_at : group.heap[p] + view.buffer + static_cast<i64>(row[u]) * combine.row_bytes;
            }
        }
    }
    if (combine.addend) {
        weights_of(ring, item)[rows] = 1.0f;
        rows_of(item)[rows++] = combine.addend + x_at;
    }
    item->rows = rows;
    item->target = combine.out + x_at;
}

// Home tokens first, first + step, ...: `count` of them.
__device__ inline void list_summing(const Call& call, const SumRing& ring, const Combine& combine, const CombineView& view, int first, int step, int count,
                                    u32 number) {
    const int lane = static_cast<int>(ptx::lane_id());
    SumHead* segment = open_sums(call, ring, number);
    SumItem* item = sum_item(ring, segment, min(lane, kSegmentItems - 1));
    const int token = first + lane * step;
    const bool listed = lane < count && token < view.tokens_here;
    if (listed)
        list_home(call, ring, combine, view, item, token);
    else if (lane < kSegmentItems)
        item->target = nullptr;
    close_sums(ring, segment, number, kSegmentItems, -1, listed);
}

__device__ inline bool wait_reduced(const Call& call, int lane, int g) {
    const Group& group = *call.group;
    bool fine = true;
    for (int p = lane; p < group.ranks; p += 32)
        if (p != call.me) fine = fine && wait_flag(call, flag_of(group, group.reduced_flags, call.me, p, g), call.epoch, kRowsReduced, p);
    return __all_sync(0xffffffffu, fine);
}

__device__ inline u32 list_expert_major(const Call& call, const SumRing& ring, const Combine& combine, const CombineView& view) {
    const Group& group = *call.group;
    const int lane = static_cast<int>(ptx::lane_id());
    int most = 0;
    for (int p = 0; p < group.ranks; ++p) most = view.tokens[p] > most ? view.tokens[p] : most;
    const int groups = (most + view.per_group - 1) / view.per_group, lead = kLead * group.blocks;
    u32 number = 0;
    for (int g = call.block; g < groups + lead; g += group.blocks) {
        if (g < groups) list_reducing(call, ring, combine, view, g, number++);
        if (g >= lead) {
            if (!wait_reduced(call, lane, g - lead)) break;
            list_summing(call, ring, combine, view, (g - lead) * view.per_group, 1, view.per_group, number++);
        }
    }
    return number;
}

__device__ inline u32 list_compact(const Call& call, const SumRing& ring, const Combine& combine, const CombineView& view) {
    const int lane = static_cast<int>(ptx::lane_id()), blocks = call.group->blocks;
    u32 number = 0;
    if (!wait_credit(call, lane, 1)) return number;  // every peer has begun this call: its rows are there
    for (int first = call.block; first < view.tokens_here; first += kSegmentItems * blocks)
        list_summing(call, ring, combine, view, first, blocks, kSegmentItems, number++);
    return number;
}

extern "C" __global__ void __launch_bounds__(kSumThreads, 1) combine_rows(const __grid_constant__ Group group,
                                                                          const __grid_constant__ Combine combine) {
    const Call call = begin_call(group, kCombine);
    // warps: lister, publisher, a loader for each half, then summing warps, turn about
    const int warp = static_cast<int>(threadIdx.x) / 32, half = warp % kHalves;
    const SumRing ring = make_sum_ring(call, half, combine.row_bytes, combine.piece_bytes, combine.num_slots, combine.choices + group.ranks);
    if (warp == 0) {
        const CombineView view = view_of(call, combine);
        const int lane = static_cast<int>(ptx::lane_id());
        if (call.block == 0) tell_started(call, lane);
        u32 number = 0;
        if (wait_credit(call, lane, combine.lag))
            number = combine.rows ? list_expert_major(call, ring, combine, view) : list_compact(call, ring, combine, view);
        SumHead* end = open_sums(call, ring, number);
        close_sums(ring, end, number, -1, -1, false);
        if (lane == 0) ptx::store_release_block(ring.listed, ptx::load_acquire_block(ring.listed) | kLast);
    } else if (warp == 1) {
        if (ptx::lane_id() == 0) publish_sums(call, ring, group.reduced_flags);
    } else if (warp < 2 + kHalves) {
        load_pieces(call, ring);
    } else {
        sum_rows(call, ring, (warp - 2 - kHalves) / kHalves);
    }
    end_call(call);
}
