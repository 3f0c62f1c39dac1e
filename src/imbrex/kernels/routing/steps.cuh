// The steps of the routing kernel; see routing/route.cu.
#pragma once
#include "routing/fetch.cuh"

namespace route {

// As ranks exchange it, in 32 bits: an id that has more is none of the experts, and stays so.
__device__ __forceinline__ int short_id(i64 id) {
    return id == static_cast<int>(id) ? static_cast<int>(id) : -2;
}

// My ids and weights into every heap.
__device__ inline void give_choices(const Call& call, const Route& route) {
    const Group& group = *call.group;
    const int thread = route_thread();
    const int tokens = route.tokens ? route.tokens[call.local] : route.num_tokens;
    const i64 all = static_cast<i64>(group.ranks) * route.max_tokens * route.choices;
    const i64 mine = static_cast<i64>(route.max_tokens) * route.choices;
    const i64* ids = route.ids + call.local * mine;
    const float* weights = route.weights + call.local * mine;
    const int count = tokens * route.choices, step = call.blocks * kRouteThreads;
ROUTE_LOOP
    for (int first = call.block * kRouteThreads + thread; first < count; first += 4 * step) {
        int id[4];
        float weight[4];
#pragma unroll
        for (int u = 0; u < 4; ++u)
            if (first + u * step < count) {
                id[u] = short_id(ids[first + u * step]);
                weight[u] = weights[first + u * step];
            }
ROUTE_LOOP
        for (int p = 0; p < group.ranks; ++p) {
            int* there = reinterpret_cast<int*>(group.heap[p] + route.ids_at) + parity_at(call, route) +
                         call.me * mine + first;
#pragma unroll
            for (int u = 0; u < 4; ++u)
                if (first + u * step < count) {
                    there[u * step] = id[u];
                    reinterpret_cast<float*>(there)[u * step + 2 * all] = weight[u];
                }
        }
    }
    if (call.block == 0 && thread < group.ranks)
        reinterpret_cast<int*>(group.heap[thread] +
                               route.tokens_at)[(call.epoch & 1) * group.ranks + call.me] = tokens;
}

// What this block has given is there: one flag per block at every rank, the own included. All threads.
__device__ inline void tell_given(const Call& call) {
    const int thread = route_thread();
    route_sync();
    stall(call, 4);
    if (thread < call.group->ranks) {
        ptx::fence_sys();
        ptx::store_relaxed_sys(&control_of(*call.group, thread)->arrived[call.kind][call.me][call.block],
                               call.epoch);
    }
}

__device__ inline bool take_choices(const Call& call) {
    const int words = call.group->ranks * call.blocks;
    bool fine = true;
ROUTE_LOOP
    for (int i = route_thread(); i < words; i += kRouteThreads) {
        const int p = i / call.blocks;
        fine = fine &&
               wait_flag(call, &call.own->arrived[call.kind][p][i % call.blocks], call.epoch, kIdsArrived, p);
    }
    return route_all(fine);
}

// All blocks of this rank have come here, for the `times`-th time in this call. All threads; false on
// failure.
__device__ inline bool own_blocks(const Call& call, u32 times) {
    bool fine = true;
    route_sync();
    if (call.group->blocks > 1 && route_thread() == 0) {
        ptx::add_acq_rel_gpu(&call.own->barrier, 1);
        fine = wait_flag(call, &call.own->barrier, times * static_cast<u32>(call.group->blocks), kOwnBlocks,
                         call.me);
    }
    return route_all(fine);
}

__device__ __forceinline__ void clear_masks(const Route& route, const Scratch& s) {
ROUTE_LOOP
    for (int i = route_thread(); i < s.chunks * route.experts * 4; i += kRouteThreads) s.mask[i] = 0;
}

// A table that needs nobody: where experts with one slot live.
__device__ inline void find_homes(const Route& route, const Scratch& s) {
    const int thread = route_thread();
ROUTE_LOOP
    for (int e = thread; e < route.experts; e += kRouteThreads) {
        const int first = route.first_replica[e];
        int home = -1;
        if (route.first_replica[e + 1] - first == 1) {
            const int slot = route.replica_slots[first];
            int rank = 0;
            while (rank + 1 < s.owners && slot >= route.rank_offsets[rank + 1]) ++rank;
            home = rank << 16 | slot;
        }
        s.home[e] = home;
    }
}

__device__ inline void cut_chunks(const Route& route, const Scratch& s, const int* tokens) {
ROUTE_LOOP
    for (int i = route_thread(); i < s.chunks; i += kRouteThreads) {
        const int source = (s.first + i) / s.per_source,
                  first = (s.first + i - source * s.per_source) * kChunk;
        s.chunk[i] = {source, first, max(0, min(kChunk, tokens[source] - first)),
                      source * route.max_tokens + first};
    }
    route_sync();
}

// Calls `each(chunk, token in chunk, choice, expert)` for the block's choices, spread over its threads, and
// `done(chunk, token)` in all lanes after a token's choices.
template <class Each, class Done>
__device__ __forceinline__ void for_choices(const Route& route, const Scratch& s, Each each, Done done) {
    const int token = route_thread() / kPerToken, lane = route_thread() % kPerToken;
ROUTE_LOOP
    for (int c = 0; c < s.chunks; ++c) {
ROUTE_LOOP
        for (int k = lane; k < route.choices; k += kPerToken)
            each(c, token, k, s.ids[(c * kChunk + token) * route.choices + k]);
        done(c, token);
    }
}

// The owners that a token wants, of which each of its threads knows some. By ballots, since shuffles and
// atomics share the pipe of shared memory, which bounds this step.
__device__ __forceinline__ void note_owners(const Scratch& s, int c, int token, Owners& bits) {
    const u32 mine = ((1u << kPerToken) - 1) << (ptx::lane_id() / kPerToken * kPerToken);
    Owners wanted = 0;
ROUTE_LOOP
    for (int p = 0; p < s.owners; ++p)
        wanted |= static_cast<Owners>((__ballot_sync(0xffffffffu, bits >> p & 1) & mine) != 0) << p;
    if (route_thread() % kPerToken == 0) s.wanted[c * kChunk + token] = static_cast<Wanted>(wanted);
    bits = 0;
}

// Masks of experts, and what owners a token wants where an expert has one slot everywhere.
__device__ inline void mark_experts(const Call& call, const Route& route, const Scratch& s) {
    bool repeated = false;
    Owners bits = 0;
    for_choices(
        route, s,
        [&](int c, int token, int, int expert) {
            if (expert == kNone) return;
            const u32 bit = 1u << (token & 31);
            repeated |= (atomicOr(&s.mask[(c * route.experts + expert) * 4 + (token >> 5)], bit) & bit) != 0;
            bits |= route.replicated ? 0 : Owners{1} << (s.home[expert] >> 16);
        },
        [&](int c, int token) { note_owners(s, c, token, bits); });
    if (repeated) give_up(call, kBadIds, kIdsArrived, call.me);
    route_sync();
}

// Prefixes over the chunks of every source, of columns [chunks][width] that all blocks of this rank have
// written; a thread has kScan loads in flight.
template <int kScan>
__device__ inline void scan_chunks(const Scratch& s, const int* columns, int width, int ranks, int* before,
                                   int* total) {
ROUTE_LOOP
    for (int x = route_thread(); x < ranks * width; x += kRouteThreads) {
        const int source = x / width, column = x - source * width;
        int sum = 0;
ROUTE_LOOP
        for (int j = 0; j < s.per_source; j += kScan) {
            int value[kScan];
#pragma unroll
            for (int u = 0; u < kScan; ++u)
                value[u] = columns[(source * s.per_source + min(j + u, s.per_source - 1)) * width + column];
#pragma unroll
            for (int u = 0; u < kScan; ++u) {
                const int mine = source * s.per_source + j + u - s.first;
                if (j + u < s.per_source && mine >= 0 && mine < s.chunks) before[mine * width + column] = sum;
                sum += j + u < s.per_source ? value[u] : 0;
            }
        }
        total[x] = sum;
    }
}

// All threads, where `room`: replicas by the loads of this batch.
__device__ inline void balance(const Call& call, const Route& route, const Scratch& s) {
    const int ranks = call.group->ranks;
    const Tables tables{
        route.first_replica, route.replica_slots, route.rank_offsets, route.experts, s.owners, ranks};
    const auto count = [&](int source, int expert) { return s.total[source * route.experts + expert]; };
    split_choices(tables, s.flow, route_thread(), kRouteThreads, count, [] { route_sync(); });
ROUTE_LOOP
    for (int i = route_thread(); i < *s.flow.several; i += kRouteThreads)
        s.home[s.flow.expert[i]] = -1 - s.flow.start[i];
    route_sync();
}

// The same for the few columns of owners, which come in one load and are added in shared memory. All threads.
__device__ inline void scan_owners(const Scratch& s, const int* columns, int ranks) {
    const int thread = route_thread(), width = s.owners;
ROUTE_LOOP
    for (int i = thread; i < ranks * s.per_source * width; i += kRouteThreads) s.staged[i] = columns[i];
    route_sync();
ROUTE_LOOP
    for (int x = thread; x < ranks * width; x += kRouteThreads) {
        const int source = x / width, column = x - source * width;
        int sum = 0;
ROUTE_LOOP
        for (int j = source * s.per_source; j < (source + 1) * s.per_source; ++j) {
            if (j >= s.first && j < s.first + s.chunks) s.rank_before[(j - s.first) * width + column] = sum;
            sum += s.staged[j * width + column];
        }
        s.rank_total[x] = sum;
    }
}

// Replica `number` of `replicas` takes how many choices of rank `source`: placement.flow, or
// placement.split.split_evenly.
__device__ __forceinline__ int share_of(const Route& route, const Scratch& s, int source, int expert,
                                        int replicas, int number) {
    const int count = s.total[source * route.experts + expert];
    if (replicas == 1) return count;
    if (route.room) return s.flow.share[source * 2 * route.room - 1 - s.home[expert] + number];
    const int turn = ((number - source) % replicas + replicas) % replicas;
    return count / replicas + (turn < count % replicas);
}

// owner << 16 | slot of the `nth` choice of `expert` on rank `source`; `nth` becomes its number within that
// slot.
__device__ inline int home_of(const Route& route, const Scratch& s, int source, int expert, int& nth) {
    if (s.home[expert] >= 0) return s.home[expert];
    const int first = route.first_replica[expert], replicas = route.first_replica[expert + 1] - first;
    int number = 0;
ROUTE_LOOP
    for (; number + 1 < replicas; ++number) {
        const int share = share_of(route, s, source, expert, replicas, number);
        if (nth < share) break;
        nth -= share;
    }
    const int slot = route.replica_slots[first + number];
    int rank = 0;
    while (rank + 1 < s.owners && slot >= route.rank_offsets[rank + 1]) ++rank;
    return rank << 16 | slot;
}

__device__ __forceinline__ int nth_choice(const Route& route, const Scratch& s, int c, int token,
                                          int expert) {
    return s.before[c * route.experts + expert] + below(&s.mask[(c * route.experts + expert) * 4], token);
}

// What owners a token wants where replicas have to be chosen.
__device__ inline void mark_owners(const Route& route, const Scratch& s) {
    Owners bits = 0;
    for_choices(
        route, s,
        [&](int c, int token, int, int expert) {
            if (expert == kNone) return;
            int nth = s.home[expert] < 0 ? nth_choice(route, s, c, token, expert) : 0;
            bits |= Owners{1} << (home_of(route, s, s.chunk[c].source, expert, nth) >> 16);
        },
        [&](int c, int token) { note_owners(s, c, token, bits); });
    route_sync();
}

// Masks of owners, and how many tokens want each.
__device__ inline void give_owners(const Scratch& s, int* columns) {
    const int warp = route_thread() / 32, lane = static_cast<int>(ptx::lane_id());
ROUTE_LOOP
    for (int x = warp; x < 4 * s.chunks; x += kRouteThreads / 32) {
        const Owners bits = s.wanted[32 * x + lane];
ROUTE_LOOP
        for (int p = 0; p < s.owners; ++p) {
            const u32 mask = __ballot_sync(0xffffffffu, bits >> p & 1);
            if (lane == 0) s.rank_mask[(x / 4 * s.owners + p) * 4 + x % 4] = mask;
        }
    }
    route_sync();
ROUTE_LOOP
    for (int i = route_thread(); i < s.chunks * s.owners; i += kRouteThreads)
        columns[s.first * s.owners + i] = held(&s.rank_mask[4 * i]);
}

// Rows of every local slot, and where every source's begin.
__device__ inline void place_slots(const Call& call, const Route& route, const Scratch& s) {
    const int ranks = call.group->ranks, owner = call.me / route.tensor;
    const int first = route.rank_offsets[owner], slots = route.rank_offsets[owner + 1] - first;
    const int thread = route_thread();
ROUTE_LOOP
    for (int x = thread; x < route.most_slots; x += kRouteThreads) s.slot_rows[x] = 0;
    route_sync();
ROUTE_LOOP
    for (int e = thread; e < route.experts; e += kRouteThreads) {
        const int home = s.home[e];
        const int begin = home < 0 ? route.first_replica[e] : 0,
                  replicas = home < 0 ? route.first_replica[e + 1] - begin : 1;
ROUTE_LOOP
        for (int number = 0; number < replicas; ++number) {
            const int slot = (home < 0 ? route.replica_slots[begin + number] : home & 0xffff) - first;
            if (slot < 0 || slot >= slots) continue;
            int sum = 0;
ROUTE_LOOP
            for (int source = 0; source < ranks; ++source) {
                s.slot_base[source * route.most_slots + slot] = sum;
                sum += share_of(route, s, source, e, replicas, number);
            }
            s.slot_rows[slot] = (sum + route.alignment - 1) / route.alignment * route.alignment;
        }
    }
    route_sync();
ROUTE_LOOP
    for (int slot = thread; slot < slots; slot += kRouteThreads) {
        int start = 0;
#pragma unroll 8
        for (int i = 0; i < slot; ++i) start += s.slot_rows[i];
ROUTE_LOOP
        for (int source = 0; source < ranks; ++source) s.slot_base[source * route.most_slots + slot] += start;
    }
    route_sync();
}

// Writes the position of every choice, and tells `also`.
template <class Also>
__device__ inline void place_choices(const Call& call, const Route& route, const Scratch& s, Also also) {
    const int ranks = call.group->ranks, owner = call.me / route.tensor, first = route.rank_offsets[owner];
    int* position = route.position + static_cast<i64>(call.local) * ranks * route.max_tokens * route.choices;
    const auto row_of = [&](int c, int token, int expert) {
        if (expert == kNone) return -1;
        const int known = s.home[expert];
        if (known >= 0 && known >> 16 != owner) return -1;
        int nth = nth_choice(route, s, c, token, expert);
        const int home = known >= 0 ? known : home_of(route, s, s.chunk[c].source, expert, nth);
        if (home >> 16 != owner) return -1;
        const int row = s.slot_base[s.chunk[c].source * route.most_slots + (home & 0xffff) - first] + nth;
        return row < route.row_capacity ? row : -1;
    };
    const int token = route_thread() / kPerToken, lane = route_thread() % kPerToken;
ROUTE_LOOP
    for (int k = lane; k < route.choices; k += kPerToken)
ROUTE_FOUR
        for (int c = 0; c < s.chunks; ++c) {
            const int row = row_of(c, token, s.ids[(c * kChunk + token) * route.choices + k]);
            also(c, token, k, row);
            if (s.chunk[c].first + token < route.max_tokens && writes(s, c))
                position[(s.chunk[c].at + token) * route.choices + k] = row;
        }
}

// First compact row on every rank of the tokens of every source.
__device__ inline void place_sources(const Route& route, const Scratch& s, int ranks) {
ROUTE_LOOP
    for (int x = route_thread(); x < ranks * ranks; x += kRouteThreads) {
        const int source = x / ranks, to = x - source * ranks;
        int sum = 0;
ROUTE_LOOP
        for (int p = 0; p < source; ++p)
            if (p != to) sum += s.rank_total[p * s.owners + to / route.tensor];
        s.base[x] = sum;
    }
    route_sync();
}

}  // namespace route
