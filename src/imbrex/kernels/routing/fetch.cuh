// What all ranks have given, into a routing block; see routing/route.cu.
#pragma once
#include "routing/scratch.cuh"

namespace route {

struct alignas(16) FourIds {
    int id[4];
};
struct alignas(16) FourWeights {
    float weight[4];
};

__device__ __forceinline__ u16 known_id(const Call& call, const Route& route, const Scratch& s, int chunk,
                                        int id) {
    if (id >= -1 && id < route.experts) return id < 0 ? kNone : static_cast<u16>(id);
    give_up(call, kBadIds, kIdsArrived, s.chunk[chunk].source);
    return kNone;
}

// The block's ids into shared memory, all sources' weights out where kWeights; four choices of a token at
// once, kFetch times in flight.
template <int kFetch, bool kWeights = true>
__device__ inline void fetch_fours(const Call& call, const Route& route, const Scratch& s, const int* ids,
                                   const float* given, float* weights) {
    const int per = kChunk * route.choices / 4, fours = s.chunks * per;
ROUTE_LOOP
    for (int first = route_thread(); first < fours; first += kFetch * kRouteThreads) {
        FourIds id[kFetch];
        FourWeights weight[kFetch];
#pragma unroll
        for (int u = 0; u < kFetch; ++u) {
            // no branch around a load: they all leave before the first comes back
            const int i = min(first + u * kRouteThreads, fours - 1), c = i / per;
            id[u] =
                *reinterpret_cast<const FourIds*>(ids + s.chunk[c].at * route.choices + 4 * (i - c * per));
            if (kWeights)
                weight[u] = *reinterpret_cast<const FourWeights*>(given + s.chunk[c].at * route.choices +
                                                                  4 * (i - c * per));
        }
#pragma unroll
        for (int u = 0; u < kFetch; ++u) {
            const int i = first + u * kRouteThreads, c = i / per, token = 4 * (i - c * per) / route.choices;
            if (i >= fours) continue;
            const bool here = token < s.chunk[c].tokens;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                s.ids[4 * i + j] = here ? known_id(call, route, s, c, id[u].id[j]) : kNone;
                if (!here) weight[u].weight[j] = 0.0f;
            }
            if (kWeights && s.chunk[c].first + token < route.max_tokens && writes(s, c))
                *reinterpret_cast<FourWeights*>(weights + s.chunk[c].at * route.choices + 4 * (i - c * per)) =
                    weight[u];
        }
    }
}

// The same one by one, for any number of choices.
template <bool kWeights>
__device__ inline void fetch_ones(const Call& call, const Route& route, const Scratch& s, const int* ids,
                                  const float* given, float* weights) {
    const int per = kChunk * route.choices;
ROUTE_LOOP
    for (int i = route_thread(); i < s.chunks * per; i += kRouteThreads) {
        const int c = i / per, in_chunk = i - c * per, token = in_chunk / route.choices;
        const bool here = token < s.chunk[c].tokens;
        const int at = s.chunk[c].at * route.choices + in_chunk;
        s.ids[i] = here ? known_id(call, route, s, c, ids[at]) : kNone;
        if (kWeights && s.chunk[c].first + token < route.max_tokens && writes(s, c))
            weights[at] = here ? given[at] : 0.0f;
    }
}

template <int kFetch, bool kWeights = true>
__device__ inline void fetch_choices(const Call& call, const Route& route, const Scratch& s) {
    const i64 all = static_cast<i64>(call.group->ranks) * route.max_tokens * route.choices;
    const int* ids =
        reinterpret_cast<const int*>(call.group->heap[call.me] + route.ids_at) + parity_at(call, route);
    const float* given = reinterpret_cast<const float*>(ids) + 2 * all;
    float* weights = route.all_weights + call.local * all;
    if (route.choices % 4 == 0)
        fetch_fours<kFetch, kWeights>(call, route, s, ids, given, weights);
    else
        fetch_ones<kWeights>(call, route, s, ids, given, weights);
    route_sync();
}

}  // namespace route
