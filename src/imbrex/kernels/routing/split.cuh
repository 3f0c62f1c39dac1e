// The balanced split of one batch by one block: `placement/flow.py`, to the last integer.
//
// Tokens of an expert with several slots first stay with their source where it has a slot, the rest in equal
// parts. Then one warp, a lane a rank, pushes tokens from the fullest rank along a shortest path of shared
// experts to the emptiest rank it reaches, until nothing reachable is two below it: then no split has a lower
// fullest rank. A push takes what brings one end to the mean of the ranks reached, at most what the experts
// of each hop hold; 3 to 5 pushes do on 4 ranks, 20 on 16.
//
// Example, experts 0 and 1 on rank 0, 0 and 2 on rank 1, wanted 10, 6 and 2 times, 4 of the 10 by rank 0: at
// first the ranks have 10 and 8; one push of 1 leaves 9 and 9, so 3 of rank 0's 4 choices of expert 0 stay,
// and 1 goes to rank 1.
#pragma once
#include "ptx/exchange.cuh"

// Before a loop that a launch runs through once. Not unrolled where fetching instructions is what takes the
// time: see exchange/small.cu.
#ifndef ROUTE_LOOP
#define ROUTE_LOOP
#define ROUTE_FOUR _Pragma("unroll 4")
#endif

namespace route {

struct Tables {
    const int* first_replica;  // [E + 1]; an expert's slots are replica_slots[first .. next), ascending
    const int* replica_slots;
    const int* rank_offsets;  // [W + 1]
    int experts;
    int ranks;    // at most 32
    int sources;  // rows of the counts: a multiple of the ranks, or one that stands for all
};

// Shared memory. `room` experts may have several slots, with 2 * room slots together.
struct Flow {
    int* load;     // [W]
    int* between;  // [W, W + 1]; what every rank could give every other
    int* expert;   // [room]; experts with several slots, ascending
    int* start;    // [room]; their first slot among those of such experts
    u32* hosts;    // [room]; ranks that have one
    int* takes;    // [2 room]; tokens that a slot takes
    int* share;    // [sources, 2 room]; of every source
    int* several;  // how many experts
    int room;
};

__device__ inline Flow carve_flow(u8* at, int ranks, int sources, int room) {
    const auto take = [&at](int words) {
        u8* start = at;
        at += 4 * words;
        return start;
    };
    Flow f;
    f.load = reinterpret_cast<int*>(take(ranks));
    f.between = reinterpret_cast<int*>(take(ranks * (ranks + 1)));
    f.expert = reinterpret_cast<int*>(take(room));
    f.start = reinterpret_cast<int*>(take(room));
    f.hosts = reinterpret_cast<u32*>(take(room));
    f.takes = reinterpret_cast<int*>(take(2 * room));
    f.share = reinterpret_cast<int*>(take(2 * room * sources));
    f.several = reinterpret_cast<int*>(take(1));
    f.room = room;
    return f;
}

__device__ __forceinline__ int place_of(u32 hosts, int rank) { return __popc(hosts & ((1u << rank) - 1)); }

__device__ __forceinline__ bool hosted(u32 hosts, int rank) { return rank >= 0 && (hosts >> rank & 1) != 0; }

__device__ __forceinline__ int owner_of(const Tables& t, int slot) {
    int rank = 0;
    while (rank + 1 < t.ranks && slot >= t.rank_offsets[rank + 1]) ++rank;
    return rank;
}

__device__ __forceinline__ int home_rank(const Tables& t, int source) {
    return t.sources < t.ranks ? -1 : source * t.ranks / t.sources;
}

__device__ __forceinline__ int warp_max(int value) {
#pragma unroll
    for (int step = 16; step; step >>= 1)
        value = max(value, static_cast<int>(__shfl_xor_sync(~0u, static_cast<u32>(value), step)));
    return value;
}

__device__ __forceinline__ int warp_sum(int value) {
#pragma unroll
    for (int step = 16; step; step >>= 1)
        value += static_cast<int>(__shfl_xor_sync(~0u, static_cast<u32>(value), step));
    return value;
}

// Of the first warp: experts with several slots.
__device__ inline void list_several(const Tables& t, const Flow& f) {
    const int lane = static_cast<int>(ptx::lane_id());
    int found = 0;
ROUTE_LOOP
    for (int base = 0; base < t.experts; base += 32) {
        const int e = base + lane;
        const int first = e < t.experts ? t.first_replica[e] : 0;
        const bool more = e < t.experts && t.first_replica[e + 1] - first > 1;
        const u32 which = __ballot_sync(~0u, more);
        const int at = found + __popc(which & ((1u << lane) - 1));
        if (more && at < f.room) {
            f.expert[at] = e;
            f.start[at] = first - (e - at);
        }
        found += __popc(which);
    }
    if (lane == 0) *f.several = min(found, f.room);
}

// What the slots of expert number `i` take before any push, and what that makes of the ranks.
template <class Count>
__device__ inline void stay_home(const Tables& t, const Flow& f, int i, Count count) {
    const int e = f.expert[i], first = t.first_replica[e], slots = t.first_replica[e + 1] - first;
    int* takes = f.takes + f.start[i];
    u32 hosts = 0;
ROUTE_LOOP
    for (int p = 0; p < slots; ++p) {
        hosts |= 1u << owner_of(t, t.replica_slots[first + p]);
        takes[p] = 0;
    }
    f.hosts[i] = hosts;
    int rest = 0;
ROUTE_LOOP
    for (int w = 0; w < t.sources; ++w) {
        const int home = home_rank(t, w);
        if (hosted(hosts, home))
            takes[place_of(hosts, home)] += count(w, e);
        else
            rest += count(w, e);
    }
    int p = 0;
ROUTE_LOOP
    for (u32 from = hosts; from; from &= from - 1, ++p) {
        const int rank = __ffs(from) - 1;
        takes[p] += rest * (p + 1) / slots - rest * p / slots;
        atomicAdd(&f.load[rank], takes[p]);
ROUTE_LOOP
        for (u32 to = hosts; to; to &= to - 1)
            atomicAdd(&f.between[rank * (t.ranks + 1) + __ffs(to) - 1], takes[p]);
    }
}

// The first warp moves `amount` tokens from rank `a` to `b`; the experts they share give in their order.
__device__ inline void shift_tokens(const Tables& t, const Flow& f, int a, int b, int amount) {
    const int lane = static_cast<int>(ptx::lane_id()), several = *f.several;
ROUTE_LOOP
    for (int base = 0; base < several && amount > 0; base += 32) {
        const int i = base + lane;
        const u32 hosts = i < several ? f.hosts[i] : 0;
        const bool both = hosted(hosts, a) && hosted(hosts, b);
        int* takes = f.takes + (both ? f.start[i] : 0);
        const int held = both ? takes[place_of(hosts, a)] : 0;
        int sum = held;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const int other = __shfl_up_sync(~0u, sum, step);
            sum += lane >= step ? other : 0;
        }
        const int given = max(0, min(held, amount - (sum - held)));
        if (given > 0) {
            takes[place_of(hosts, a)] -= given;
            takes[place_of(hosts, b)] += given;
ROUTE_LOOP
            for (u32 to = hosts; to; to &= to - 1) {
                atomicAdd(&f.between[a * (t.ranks + 1) + __ffs(to) - 1], -given);
                atomicAdd(&f.between[b * (t.ranks + 1) + __ffs(to) - 1], given);
            }
        }
        amount -= __shfl_sync(~0u, sum, 31);
    }
    __syncwarp();
}

// The first warp. Every push lowers the sum of squared loads, so it ends.
__device__ inline void even_out(const Tables& t, const Flow& f) {
    const int lane = static_cast<int>(ptx::lane_id()), stride = t.ranks + 1;
ROUTE_LOOP
    for (;;) {
        const int load = lane < t.ranks ? f.load[lane] : -1;
        u32 gives = 0;
ROUTE_LOOP
        for (int b = 0; b < t.ranks; ++b)
            gives |= static_cast<u32>(lane < t.ranks && f.between[lane * stride + b] > 0) << b;
        const int most = warp_max(load), fullest = __ffs(__ballot_sync(~0u, load == most)) - 1;
        u32 reached = 1u << fullest;
        int before = -1;
ROUTE_LOOP
        for (u32 level = reached; level;) {
            u32 next = 0;
ROUTE_LOOP
            for (; level; level &= level - 1) {
                const int rank = __ffs(level) - 1;
                const u32 fresh =
                    static_cast<u32>(__shfl_sync(~0u, static_cast<int>(gives), rank)) & ~reached & ~next;
                if (fresh >> lane & 1) before = rank;
                next |= fresh;
            }
            reached |= next;
            level = next;
        }
        const bool mine = reached >> lane & 1;
        const int least = -warp_max(mine ? -load : -0x7fffffff);
        if (most - least < 2) return;
        const int emptiest = __ffs(__ballot_sync(~0u, mine && load == least)) - 1;
        const int total = warp_sum(mine ? load : 0), number = __popc(reached);
        int amount = min(most - (total + number - 1) / number, total / number - least);
        if (amount == 0) amount = (most - least) / 2;
ROUTE_LOOP
        for (int at = emptiest; at != fullest;) {
            const int from = __shfl_sync(~0u, before, at);
            amount = min(amount, f.between[from * stride + at]);
            at = from;
        }
        __syncwarp();
ROUTE_LOOP
        for (int at = emptiest; at != fullest;) {
            const int from = __shfl_sync(~0u, before, at);
            shift_tokens(t, f, from, at, amount);
            at = from;
        }
        if (lane == 0) {
            f.load[fullest] -= amount;
            f.load[emptiest] += amount;
        }
        __syncwarp();
    }
}

// Who takes what of expert number `i`: sources that have it their own first, then in order.
template <class Count>
__device__ inline void assign_sources(const Tables& t, const Flow& f, int i, Count count) {
    const int e = f.expert[i], slots = t.first_replica[e + 1] - t.first_replica[e], width = 2 * f.room;
    const u32 hosts = f.hosts[i];
    int* takes = f.takes + f.start[i];
    int* share = f.share + f.start[i];
ROUTE_LOOP
    for (int w = 0; w < t.sources; ++w) {
ROUTE_LOOP
        for (int p = 0; p < slots; ++p) share[w * width + p] = 0;
        const int home = home_rank(t, w);
        if (!hosted(hosts, home)) continue;
        const int p = place_of(hosts, home), given = min(count(w, e), takes[p]);
        share[w * width + p] = given;
        takes[p] -= given;
    }
    int p = 0;
ROUTE_LOOP
    for (int w = 0; w < t.sources; ++w) {
        const int home = home_rank(t, w);
        int rest = count(w, e) - (hosted(hosts, home) ? share[w * width + place_of(hosts, home)] : 0);
        while (rest > 0) {
            while (takes[p] == 0) ++p;
            const int given = min(rest, takes[p]);
            share[w * width + p] += given;
            takes[p] -= given;
            rest -= given;
        }
    }
}

// Thread `thread` of `threads`, which meet in `sync()`. `count(source, expert)`: choices. Fills `share`; ends
// with them in step.
template <class Count, class Sync>
__device__ inline void split_choices(const Tables& t, const Flow& f, int thread, int threads, Count count,
                                     Sync sync) {
ROUTE_LOOP
    for (int x = thread; x < t.ranks; x += threads) f.load[x] = 0;
ROUTE_LOOP
    for (int x = thread; x < t.ranks * (t.ranks + 1); x += threads) f.between[x] = 0;
    if (thread < 32) list_several(t, f);
    sync();
ROUTE_LOOP
    for (int e = thread; e < t.experts; e += threads) {
        const int first = t.first_replica[e];
        if (t.first_replica[e + 1] - first != 1) continue;
        int sum = 0;
ROUTE_LOOP
        for (int w = 0; w < t.sources; ++w) sum += count(w, e);
        atomicAdd(&f.load[owner_of(t, t.replica_slots[first])], sum);
    }
ROUTE_LOOP
    for (int i = thread; i < *f.several; i += threads) stay_home(t, f, i, count);
    sync();
    if (thread < 32) even_out(t, f);
    sync();
ROUTE_LOOP
    for (int i = thread; i < *f.several; i += threads) assign_sources(t, f, i, count);
    sync();
}

}  // namespace route
