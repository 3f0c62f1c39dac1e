// A call of a rank as its steps see it: the arguments of a launch, and where things lie in the heaps.
#pragma once
#include "events/claims.cuh"

namespace claims {

constexpr int kThreads = 512, kWarps = kThreads / 32;
enum Step { kSend = 0, kExpand = 1, kReply = 2, kSum = 3, kCombine = 4, kRefuse = 5, kSettle = 6 };

// By value. The host reads it: `kernels.structs`. T: `room`, most tokens of a rank.
struct Events {
    Patience patience;
    const u8* x;           // own tokens [tokens, row_bytes]
    const i64* ids;        // [tokens, K]
    const float* weights;  // [tokens, K]
    const int* slot_of;    // [E]; of every expert
    const int* offsets;    // [owners + 1]; first slot of every owner
    int* position;         // [W, T, K]; expert-major row here of every choice, -1: none
    float* all_weights;    // [W, T, K]
    int* counts;           // [most_slots]; rows of every slot here
    int* totals;           // [4]; rows, 0, 0, 0
    int* tokens_of;        // [W]
    u8* rows;              // expert-major
    const u8* addend;      // [tokens, row_bytes] or null; joins last
    u8* out;               // [tokens, row_bytes]
    u8* kept;              // bool [tokens, K]
    int* outcome;          // [4, W]; whose replies count, packets came, tokens count here, replies came
    const int* known;      // of a backward: the outcome of its forward; null: a forward
    const float* values;   // of a backward: [rows], a number of every row that goes home as it is
    float* values_out;     // [tokens, K]
    u32* wanted;           // [tokens]; peers that a token is sent to, a bit each
    i64 words_at, heads_at, counts_at, parts_at, choices_at, gates_at, packets_at, replies_at, values_at;
    int step, tokens, room, choices, experts, most_slots, tensor, row_bytes;
    int wire_bytes;  // from one sum of a reply to the next
    int stages;    // of the ring that rows go through
    int weighted;  // rows are multiplied by the gate weights here
    int note;      // of the call: the same on all ranks
};

struct Head {
    int tokens;  // of a backward: kNothing where its choices here do not count
    int note;
    i64 given;  // of this rank's budget to that peer, so far
};
constexpr int kNothing = -1;

// Of a token: the slot that it wants, -1 for none, and how many choices of that slot its rank has before it.
struct alignas(8) Choice {
    int slot, before;
};

__device__ __forceinline__ u8* at_peer(const Call& call, i64 at, int rank) {
    return call.group->heap[rank] + at;
}

// What `from` left in the heap of `at`.
__device__ __forceinline__ Head* head_at(const Call& call, const Events& e, int at, int from) {
    return reinterpret_cast<Head*>(at_peer(call, e.heads_at, at)) + from;
}
__device__ __forceinline__ int* counts_at(const Call& call, const Events& e, int at, int from) {
    return reinterpret_cast<int*>(at_peer(call, e.counts_at, at)) + from * e.most_slots;
}
__device__ __forceinline__ Choice* choices_at(const Call& call, const Events& e, int at, int from) {
    return reinterpret_cast<Choice*>(at_peer(call, e.choices_at, at)) +
           static_cast<i64>(from) * e.room * e.choices;
}
__device__ __forceinline__ float* gates_at(const Call& call, const Events& e, int at, int from) {
    return reinterpret_cast<float*>(at_peer(call, e.gates_at, at)) +
           static_cast<i64>(from) * e.room * e.choices;
}
__device__ __forceinline__ float* values_at(const Call& call, const Events& e, int at, int from) {
    return reinterpret_cast<float*>(at_peer(call, e.values_at, at)) +
           static_cast<i64>(from) * e.room * e.choices;
}
__device__ __forceinline__ u8* row_at(const Call& call, const Events& e, i64 where, int at, int from,
                                      int token) {
    const i64 place = from < at ? from : from - 1;  // a rank keeps none for itself
    return at_peer(call, where, at) + (place * e.room + token) * e.row_bytes;
}

// A sum of a reply. Where `from` begins does not depend on how sums cross: one that is late may still store.
__device__ __forceinline__ u8* reply_at(const Call& call, const Events& e, int at, int from, int token) {
    return row_at(call, e, e.replies_at, at, from, 0) + static_cast<i64>(token) * e.wire_bytes;
}

__device__ __forceinline__ Call name_step(const Group& group, const Events& e) {
    Call call = name_call(group, kEvents);
    count_call(call);
    if (e.step != kSend) --call.epoch;  // the first step counts
    return call;
}

// A row by a warp, 16 bytes a lane, eight of them under way.
__device__ __forceinline__ void copy_row(u8* to, const u8* from, int row_bytes) {
    const int lane = static_cast<int>(ptx::lane_id()), units = row_bytes / 16;
#pragma unroll 1
    for (int first = lane; first < units; first += 32 * kBatch) {
        uint4 value[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            value[i] = reinterpret_cast<const uint4*>(from)[min(first + 32 * i, units - 1)];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (first + 32 * i < units) reinterpret_cast<uint4*>(to)[first + 32 * i] = value[i];
    }
}

// The ranks that a token is sent to, by the slot of this lane's choice. All lanes.
__device__ __forceinline__ u32 ranks_wanted(const Call& call, const Events& e, int slot) {
    u32 wanted = 0;
#pragma unroll 1
    for (int p = 0; p < call.group->ranks; ++p) {
        const int owner = p / e.tensor;
        const bool here = slot >= e.offsets[owner] && slot < e.offsets[owner + 1];
        wanted |= __ballot_sync(0xffffffffu, here) != 0 ? 1u << p : 0;
    }
    return wanted;
}

enum Outcome { kCounted = 0, kCame = 1, kServed = 2, kHeard = 3 };

// The peers that this call is with: in a backward those that its forward says.
__device__ __forceinline__ u32 peers_of(const Call& call, const Events& e, Outcome which) {
    const int lane = static_cast<int>(ptx::lane_id()), ranks = call.group->ranks;
    const bool with = lane < ranks && lane != call.me && (!e.known || e.known[which * ranks + lane]);
    return __ballot_sync(0xffffffffu, with);
}

__device__ __forceinline__ int slot_of(const Events& e, i64 id) {
    return id >= 0 && id < e.experts ? e.slot_of[id] : -1;
}

}  // namespace claims
