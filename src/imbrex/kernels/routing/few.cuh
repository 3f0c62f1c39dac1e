// Routing of a small batch where every expert stands in one slot: what a block that is told all choices does
// with them in one meeting of its threads. With replicas it takes the steps of routing/steps.cuh, which meet
// eight times; each costs as much as its work, since a call runs every instruction once.
//
// Choices are marked as they come, a bit of the token's for its expert. Then a lane takes a slot of this
// rank: it adds up the masks of the slot's expert over all chunks, which stand in the order of rows, and with
// the 31 lanes beside it finds where rows begin among those of 32 slots. Nobody lists positions: who wants
// one adds up what stands before it.
//
// Example, 2 ranks, one expert each, tokens of rank 0 want [0, 1, 1], of rank 1 [1, 0]: on rank 1 the
// expert's masks are 011 and 10 (first token on the left), so `before` is 0 and 2, and the choice of rank 1's
// first token has row 2.
#pragma once
#include "routing/results.cuh"

namespace route {

// In shared memory, besides `Scratch`.
struct Few {
    int* expert;  // [slots of this rank]
    int* begin;   // [the same]: rows of the slots before among the same 32
    int* group;   // [slots / 32]: rows of 32 slots
    int first;    // slot of this rank
    int slots;
};

// Behind `find_homes`: tables alone, which need nobody.
__device__ inline Few find_slots(const Call& call, const Route& route, const Scratch& s, int* expert,
                                 int* group) {
    const int owner = call.me / route.tensor;
    Few few{expert, s.slot_base, group, route.rank_offsets[owner], 0};
    few.slots = route.rank_offsets[owner + 1] - few.first;
ROUTE_LOOP
    for (int e = route_thread(); e < route.experts; e += kRouteThreads)
        if (s.home[e] >> 16 == owner) few.expert[(s.home[e] & 0xffff) - few.first] = e;
    return few;
}

// A choice that has come. False: its token wants the expert twice.
__device__ __forceinline__ bool mark_choice(const Route& route, const Scratch& s, int c, int token,
                                            int expert) {
    const u32 bit = 1u << (token & 31);
    return (atomicOr(&s.mask[(c * route.experts + expert) * 4 + (token >> 5)], bit) & bit) == 0;
}

// Rows of a slot of this rank, once all choices are marked; `tell(chunk, rows)`: those of chunks before.
template <class Tell>
__device__ __forceinline__ int rows_of_slot(const Route& route, const Scratch& s, const Few& few, int slot,
                                            Tell tell) {
    if (slot >= few.slots) return 0;
    const int expert = few.expert[slot];
    int rows = 0;
ROUTE_LOOP
    for (int c = 0; c < s.chunks; ++c) {
        tell(c * route.experts + expert, rows);
        rows += held(&s.mask[(c * route.experts + expert) * 4]);
    }
    return (rows + route.alignment - 1) / route.alignment * route.alignment;
}

// All threads, once all choices are marked; the block meets behind it.
__device__ inline void count_slots(const Route& route, const Scratch& s, const Few& few) {
    const int thread = route_thread(), lane = static_cast<int>(ptx::lane_id());
ROUTE_LOOP
    for (int slot = thread; slot - lane < route.most_slots; slot += kRouteThreads) {
        const int rows =
            rows_of_slot(route, s, few, slot, [&](int at, int before) { s.before[at] = before; });
        int end = rows;
ROUTE_LOOP
        for (int step = 1; step < 32; step *= 2) {
            const int left = __shfl_up_sync(0xffffffffu, end, step);
            if (lane >= step) end += left;
        }
        if (slot < few.slots) few.begin[slot] = end - rows;
        if (slot < route.most_slots) s.slot_rows[slot] = rows;
        if (lane == 31) few.group[slot / 32] = end;
    }
}

// The row of a choice on this rank, or -1.
__device__ __forceinline__ int few_row(const Route& route, const Scratch& s, const Few& few, int c, int token,
                                       int expert) {
    const int slot = expert == kNone ? -1 : (s.home[expert] & 0xffff) - few.first;
    if (slot < 0 || slot >= few.slots) return -1;
    int row = few.begin[slot] + nth_choice(route, s, c, token, expert);
ROUTE_LOOP
    for (int g = 0; g < slot / 32; ++g) row += few.group[g];
    return row < route.row_capacity ? row : -1;
}

// Every choice's row, to memory, by warps of the blocks that share it.
__device__ inline void write_positions(const Call& call, const Route& route, const Scratch& s,
                                       const Few& few) {
    const int ranks = call.group->ranks, warps = kRouteThreads / 32, per = kChunk * route.choices;
    int* position = route.position + static_cast<i64>(call.local) * ranks * route.max_tokens * route.choices;
ROUTE_LOOP
    for (int x = route_thread() / 32 * s.sharers + s.share; x < s.chunks * per / 32; x += s.sharers * warps) {
        const int i = 32 * x + static_cast<int>(ptx::lane_id()), c = i / per, in_chunk = i - c * per,
                  token = in_chunk / route.choices;
        if (s.chunk[c].first + token < route.max_tokens)
            position[static_cast<i64>(s.chunk[c].at) * route.choices + in_chunk] =
                few_row(route, s, few, c, token, s.ids[i]);
    }
}

// Masks of owners, by a block that tells where tokens go; the block meets behind it.
__device__ inline void mask_owners(const Route& route, const Scratch& s) {
    const int lane = static_cast<int>(ptx::lane_id());
ROUTE_LOOP
    for (int x = route_thread(); x < s.chunks * kChunk; x += kRouteThreads) {
        Owners bits = 0;
ROUTE_LOOP
        for (int k = 0; k < route.choices; ++k) {
            const int expert = s.ids[x * route.choices + k];
            if (expert != kNone) bits |= Owners{1} << (s.home[expert] >> 16);
        }
ROUTE_LOOP
        for (int o = 0; o < s.owners; ++o) {
            const u32 mask = __ballot_sync(0xffffffffu, bits >> o & 1);
            if (lane == o % 32) s.rank_mask[(x / kChunk * s.owners + o) * 4 + x % kChunk / 32] = mask;
        }
    }
}

// Tokens of every source that an owner gets, and those of the chunks before. The block meets behind it.
__device__ inline void count_owners(const Scratch& s, int ranks) {
ROUTE_LOOP
    for (int x = route_thread(); x < ranks * s.owners; x += kRouteThreads) {
        const int source = x / s.owners, owner = x - source * s.owners;
        int sum = 0;
ROUTE_LOOP
        for (int c = source * s.per_source; c < (source + 1) * s.per_source; ++c) {
            s.rank_before[c * s.owners + owner] = sum;
            sum += held(&s.rank_mask[(c * s.owners + owner) * 4]);
        }
        s.rank_total[x] = sum;
    }
}

// Choices of every rank for every expert.
__device__ inline void count_experts(const Call& call, const Route& route, const Scratch& s) {
ROUTE_LOOP
    for (int x = route_thread(); x < call.group->ranks * route.experts; x += kRouteThreads) {
        const int source = x / route.experts, expert = x - source * route.experts;
        int sum = 0;
ROUTE_LOOP
        for (int c = source * s.per_source; c < (source + 1) * s.per_source; ++c)
            sum += held(&s.mask[(c * route.experts + expert) * 4]);
        s.total[x] = sum;
    }
}

}  // namespace route
