// Staging of tokens, and lists of rows to pull; see exchange/pull.cu.
#pragma once
#include "exchange/copy.cuh"
#include "exchange/mover.cuh"

namespace mover {

constexpr int kStagers = 8;  // warps
constexpr int kStagersBarrier = 1;
constexpr int kPullThreads = kMoverThreads + 32 * kStagers;

struct Pull {
    const u8* x;  // [ranks of the launch, max_tokens, row_bytes]
    u8* out;      // [.., rows, row_bytes], expert-major
    // [.., W, max_tokens, K]; row of every choice of every rank's tokens here, -1: not here
    const int* position;
    const int* tokens;  // [.., W]; tokens of every rank
    i64 staged_at;      // offset in a heap of the staging buffers
    i64 buffer_bytes;
    i64 inbox_at;  // the same of tokens that come unasked, [W, early groups, row] a buffer
    i64 x_stride;
    i64 out_stride;
    i64 out_bytes;  // of one rank's rows, all that there is room for
    int max_tokens;
    int choices;  // K
    int row_bytes;
    int pitch;  // bytes from one staged row to the next, where they are staged in fp8
    int stages;
    int buffer;        // which of the buffers
    int lag;           // calls since that buffer was used, at least
    int early_groups;  // that are stored at every peer, whoever wants them, instead of staged here
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
    view.position =
        pull.position + static_cast<i64>(call.local) * group.ranks * pull.max_tokens * pull.choices;
    view.tokens = pull.tokens + call.local * group.ranks;
    view.buffer = pull.staged_at + pull.buffer * pull.buffer_bytes;
    view.per_group = 32 / group.ranks;
    view.source = (static_cast<int>(ptx::lane_id()) + call.me) % group.ranks;
    view.tokens_there = view.tokens[view.source];
    return view;
}

// Where in a heap the early tokens of a rank are.
__device__ __forceinline__ i64 inbox_of(const Call& call, const Pull& pull, const PullView& view,
                                        int source) {
    const i64 rows = static_cast<i64>(pull.buffer) * call.group->ranks + source;
    return pull.inbox_at + rows * pull.early_groups * view.per_group * pull.row_bytes;
}

// Words to the same place in every peer's heap, read once.
__device__ inline void store_at_peers(const Call& call, i64 to, const u8* from, int words, int thread,
                                      int threads) {
    constexpr int kWords = 4;
    for (int first = thread; first < words; first += kWords * threads) {
        uint4 value[kWords];
#pragma unroll
        for (int u = 0; u < kWords; ++u)
            value[u] = reinterpret_cast<const uint4*>(from)[min(first + u * threads, words - 1)];
#pragma unroll 1
        for (int i = 1; i < call.group->ranks; ++i) {
            const int p = call.me + i < call.group->ranks ? call.me + i : call.me + i - call.group->ranks;
            uint4* there = reinterpret_cast<uint4*>(call.group->heap[p] + to) + first;
#pragma unroll
            for (int u = 0; u < kWords; ++u)
                if (first + u * threads < words) there[u * threads] = value[u];
        }
    }
}

struct AsTheyAre {
    static constexpr bool kCoded = false;
    __device__ __forceinline__ static void stage(u8*, const u8*, int) {}
};

// This block's own tokens into the heap, group after group, as fast as it goes: a peer never waits for what
// we pull. By the stagers' threads, from 0 on. `Form`: how a warp stages a row that is not copied as it is.
template <class Form = AsTheyAre>
__device__ inline void stage_groups(const Call& call, const Pull& pull, const PullView& view, int tokens,
                                    int thread) {
    const Group& group = *call.group;
    if (!wait_credit(call, thread % 32, pull.lag)) return;
    u8* staged = group.heap[call.me] + view.buffer;
    for (int g = call.block; g * view.per_group < tokens; g += group.blocks) {
        const i64 at = static_cast<i64>(g) * view.per_group * pull.row_bytes;
        const int words = min(view.per_group, tokens - g * view.per_group) * (pull.row_bytes / 16);
        if constexpr (Form::kCoded) {
            const int first = g * view.per_group, last = min(first + view.per_group, tokens);
#pragma unroll 1
            for (int token = first + thread / 32; token < last; token += kStagers)
                Form::stage(staged + static_cast<i64>(token) * pull.pitch,
                            view.x + static_cast<i64>(token) * pull.row_bytes, pull.row_bytes / 2);
        } else if (g < pull.early_groups)
            store_at_peers(call, inbox_of(call, pull, view, call.me) + at, view.x + at, words, thread,
                           32 * kStagers);
        else
            copy_words(staged + at, view.x + at, words, thread, 32 * kStagers);
        ptx::named_barrier(kStagersBarrier, 32 * kStagers);
        if (thread < group.ranks && thread != call.me) {
            ptx::fence_sys();
            ptx::store_relaxed_sys(flag_of(group, group.staged_flags, thread, call.me, g), call.epoch);
        }
    }
}

// False when a peer's staging did not come.
__device__ inline bool list_pull(const Call& call, const Ring& ring, const Pull& pull, const PullView& view,
                                 int g, u32 number) {
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
            for (int u = 0; u < kBatch; ++u)
                row[u] = k + u < pull.choices ? view.position[at * pull.choices + k + u] : -1;
#pragma unroll
            for (int u = 0; u < kBatch; ++u)
                if (row[u] >= 0)
                    targets_of(item)[targets++] = view.out + static_cast<i64>(row[u]) * pull.row_bytes;
        }
        if (source == call.me) {
            item->source = view.x + static_cast<i64>(token) * pull.row_bytes;
        } else {
            const bool early = g < pull.early_groups;
            const u8* rows = early ? group.heap[call.me] + inbox_of(call, pull, view, source)
                                   : group.heap[source] + view.buffer;
            item->source = rows + static_cast<i64>(token) * pull.row_bytes;
            if (targets)
                fine = wait_flag(call, flag_of(group, group.staged_flags, call.me, source, g), call.epoch,
                                 kRowsStaged, source);
        }
    }
    item->targets = targets;
    ptx::fence_async();  // what this lane acquired from a peer, before TMA reads it
    if (!__all_sync(0xffffffffu, fine)) return false;
    close_segment(ring, segment, number, 32);
    return true;
}

// `fine`: positions are there. False where not everything could be listed.
__device__ inline bool list_all(const Call& call, const Ring& ring, const Pull& pull, const PullView& view,
                                bool fine) {
    const Group& group = *call.group;
    int most = 0;
    for (int p = 0; p < group.ranks && fine; ++p) most = max(most, view.tokens[p]);
    u32 number = 0;
    for (int g = call.block; fine && g * view.per_group < most; g += group.blocks) {
        fine = list_pull(call, ring, pull, view, g, number);
        if (fine) ++number;
    }
    open_segment(call, ring, number);
    close_segment(ring, segment_of(ring, number), number, 0);
    return fine;
}

// What the three warps of the mover and those that stage leave behind.
__device__ inline void end_pull(const Call& call, const Pull& pull, bool fine) {
    end_rows(call, fine, pull.out + call.local * pull.out_stride, pull.out_bytes);
}

}  // namespace mover
