// What a routing leaves for the kernels behind it and for the host; see routing/route.cu.
#pragma once
#include "routing/steps.cuh"

namespace route {

// `sent`: the rows of the own tokens, too.
__device__ inline void write_rows(const Call& call, const Route& route, const Scratch& s, bool sent) {
    const int ranks = call.group->ranks, me = call.me;
    int* recv_row = route.recv_row + static_cast<i64>(call.local) * ranks * route.max_tokens;
    int* send_row = route.send_row + static_cast<i64>(call.local) * ranks * route.max_tokens;
ROUTE_LOOP
    for (int x = route_thread(); x < s.chunks * kChunk; x += kRouteThreads) {
        const int c = x / kChunk, in_chunk = x % kChunk, source = s.chunk[c].source,
                  token = s.chunk[c].first + in_chunk;
        if (token >= route.max_tokens || !writes(s, c)) continue;
ROUTE_LOOP
        for (int p = 0; p < ranks; ++p) {
            if (p != me && (source != me || !sent)) continue;
            const int owner = p / route.tensor;
            const u32* mask = &s.rank_mask[(c * s.owners + owner) * 4];
            const bool goes = (mask[in_chunk >> 5] >> (in_chunk & 31)) & 1;
            int row = -1;
            if (goes)
                row = source == p ? 0
                                  : s.base[source * ranks + p] + s.rank_before[c * s.owners + owner] +
                                        below(mask, in_chunk);
            if (row >= route.token_capacity) row = -1;
            if (p == me)
                recv_row[static_cast<i64>(source) * route.max_tokens + token] = source == me ? -1 : row;
            if (source == me && sent) send_row[static_cast<i64>(token) * ranks + p] = row;
        }
    }
}

// By one block of a rank: choices of every rank for every slot, added up over calls.
__device__ inline void add_tally(const Call& call, const Route& route, const Scratch& s) {
    const int ranks = call.group->ranks;
    int* tally = route.tally + static_cast<i64>(call.local) * ranks * route.slots;
ROUTE_LOOP
    for (int x = route_thread(); x < ranks * route.experts; x += kRouteThreads) {
        const int source = x / route.experts, e = x - source * route.experts;
        const int first = route.first_replica[e], replicas = route.first_replica[e + 1] - first;
ROUTE_LOOP
        for (int number = 0; number < replicas; ++number)
            tally[source * route.slots + route.replica_slots[first + number]] +=
                share_of(route, s, source, e, replicas, number);
    }
}

__device__ inline void write_totals(const Call& call, const Route& route, const Scratch& s,
                                    const int* tokens) {
    const int ranks = call.group->ranks, thread = route_thread();
    int* counts = route.counts + call.local * route.most_slots;
    int* totals = route.totals + call.local * 4;
    int* all_tokens = route.all_tokens + call.local * ranks;
    if (route.tally) add_tally(call, route, s);
ROUTE_LOOP
    for (int x = thread; route.traffic && x < ranks * ranks; x += kRouteThreads)
        route.traffic[call.local * ranks * ranks + x] =
            s.rank_total[x / ranks * s.owners + x % ranks / route.tensor];
ROUTE_LOOP
    for (int i = thread; i < route.most_slots; i += kRouteThreads) counts[i] = s.slot_rows[i];
ROUTE_LOOP
    for (int i = thread; i < ranks; i += kRouteThreads) all_tokens[i] = tokens[i];
    if (thread != 0) return;
    int rows = 0, received = 0;
#pragma unroll 8
    for (int i = 0; i < route.most_slots; ++i) rows += s.slot_rows[i];
ROUTE_LOOP
    for (int p = 0; p < ranks; ++p)
        if (p != call.me) received += s.rank_total[p * s.owners + call.me / route.tensor];
    const bool overflow = rows > route.row_capacity || received > route.token_capacity;
    totals[0] = rows;
    totals[1] = received;
    totals[2] = overflow;
    totals[3] = 0;
    if (overflow) call.own->overflows += 1;
}

// What a routing that failed leaves: no row anywhere, so that whatever was launched behind it reads and
// writes nothing.
__device__ inline void leave_nothing(const Call& call, const Route& route) {
    const int ranks = call.group->ranks, pairs = ranks * route.max_tokens, step = call.blocks * kRouteThreads;
    int* position = route.position + static_cast<i64>(call.local) * pairs * route.choices;
ROUTE_LOOP
    for (int i = call.block * kRouteThreads + route_thread(); i < pairs; i += step) {
ROUTE_LOOP
        for (int k = 0; k < route.choices; ++k) position[static_cast<i64>(i) * route.choices + k] = -1;
        route.recv_row[static_cast<i64>(call.local) * pairs + i] =
            route.send_row[static_cast<i64>(call.local) * pairs + i] = -1;
    }
    if (call.block != 0) return;
ROUTE_LOOP
    for (int i = route_thread(); i < route.most_slots; i += kRouteThreads)
        route.counts[call.local * route.most_slots + i] = 0;
ROUTE_LOOP
    for (int i = route_thread(); i < ranks; i += kRouteThreads) route.all_tokens[call.local * ranks + i] = 0;
    if (route_thread() < 4) route.totals[call.local * 4 + route_thread()] = 0;
ROUTE_LOOP
    for (int i = route_thread(); route.traffic && i < ranks * ranks; i += kRouteThreads)
        route.traffic[call.local * ranks * ranks + i] = 0;
}

}  // namespace route
