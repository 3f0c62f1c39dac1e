// What pushes tokens to compact rows: the list of where they go, and the warps; see exchange/push.cu.
#pragma once
#include "exchange/quantise.cuh"

#ifndef QUANTISE
#define QUANTISE 0
#endif

namespace mover {

constexpr int kQuantisers = QUANTISE ? 14 : 0;  // at most
constexpr int kPushThreads = kMoverThreads + 32 * kQuantisers;

struct Push {
    const u8* x;          // [ranks of the launch, max_tokens, row_bytes]
    const int* send_row;  // [.., max_tokens, W]; row at that rank, -1: not sent
    const int* tokens;    // [..]; tokens of every rank of the launch, or null
    i64 rows_at;          // offset in a heap of the receive buffers
    i64 buffer_bytes;
    i64 x_stride;    // bytes from one rank's tokens to the next (virtual ranks)
    int num_tokens;  // where `tokens` is null
    int max_tokens;
    int row_bytes;
    int wire_bytes;  // of a row at the peers
    int pitch;       // from one of them to the next
    int stages;
    int quantisers;
    int buffer;  // which of the buffers
    int lag;     // calls since that buffer was used, at least
};

// `fine`: send_row is there. False where not everything could be listed. A block's tokens are every
// `blocks`-th, or of every `blocks`-th segment of 32.
template <bool kBySegment>
__device__ inline bool list_push(const Call& call, const Ring& ring, const Push& push, bool fine) {
    const int lane = static_cast<int>(ptx::lane_id());
    const Group& group = *call.group;
    fine = fine && wait_credit(call, lane, push.lag);
    const int tokens = push.tokens ? push.tokens[call.local] : push.num_tokens;
    const u8* x = push.x + call.local * push.x_stride;
    const int* send_row = push.send_row + static_cast<i64>(call.local) * push.max_tokens * group.ranks;
    const i64 buffer = push.rows_at + push.buffer * push.buffer_bytes;
    u32 number = 0;
    const int begin = kBySegment ? 32 * call.block : call.block, step = kBySegment ? 1 : group.blocks;
    for (int first = begin; fine && first < tokens; first += 32 * group.blocks) {
        SegmentHead* segment = open_segment(call, ring, number);
        ItemHead* item = item_of(ring, segment, lane);
        const int token = first + lane * step;
        int targets = 0;
        if (token < tokens) {
            item->source = x + static_cast<i64>(token) * push.row_bytes;
            // No two tokens in a row start at one peer.
            const int turn = group.ranks > 1 ? token % (group.ranks - 1) : 0;
            for (int i = 1; i < group.ranks; ++i) {
                const int step = i + turn < group.ranks ? i + turn : i + turn - group.ranks + 1;
                const int p = call.me + step < group.ranks ? call.me + step : call.me + step - group.ranks;
                const int row = send_row[static_cast<i64>(token) * group.ranks + p];
                if (row >= 0)
                    targets_of(item)[targets++] = group.heap[p] + buffer + static_cast<i64>(row) * push.pitch;
            }
        }
        item->targets = targets;
        close_segment(ring, segment, number++, 32);
    }
    open_segment(call, ring, number);
    close_segment(ring, segment_of(ring, number), number, 0);
    return fine;
}

__device__ inline Ring make_push_ring(const Call& call, const Push& push) {
    const int scales = push.row_bytes / 2 / kBlock;  // of a row
    return make_ring(call, push.row_bytes, push.wire_bytes, push.stages, call.group->ranks, push.quantisers,
                     4 * scales * push.quantisers);
}

// All warps that move rows but the lister. False where the peers' rows have not come.
__device__ inline bool push_listed(const Call& call, const Ring& ring, const Push& push) {
    const int warp = static_cast<int>(threadIdx.x) / 32, quantiser = warp - 3,
              scales = push.row_bytes / 2 / kBlock;
    bool fine = true;
    if (warp == 0 && ptx::lane_id() == 0) load_rows(call, ring);
    if (warp == 1 && ptx::lane_id() == 0) {
        fine = store_rows(call, ring) && !failed(call);
        if (fine) {
            tell_arrived(call);
            fine = wait_arrived(call, kRowsArrived);
        }
    }
    if (quantiser >= 0 && quantiser < push.quantisers) {
        float* own =
            reinterpret_cast<float*>(ring.segments + kSegments * segment_stride(ring)) + quantiser * scales;
        quantise_rows(call, ring, quantiser, push.quantisers, own);
    }
    return fine;
}

// NaN to what was to be received: a peer that is late stores rows over it, which are right.
__device__ inline void end_push(const Call& call, const Push& push, bool fine) {
    u8* received = call.group->heap[call.me] + push.rows_at + push.buffer * push.buffer_bytes;
    end_rows(call, fine, received, push.buffer_bytes);
}

}  // namespace mover
