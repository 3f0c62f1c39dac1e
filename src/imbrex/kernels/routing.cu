// Routing on the device: from every rank's choices to the position of every row, before any data moves.
//
// Every rank gives its expert ids and gate weights to all ranks (a few hundred KB), and each computes alone what it needs: no
// second exchange, and the same integers everywhere. Tokens are cut into chunks of 128 that never cross a rank; a chunk
// keeps one 128-bit mask per expert, so "how many choices of this expert before mine" is a population count, in token
// order, without sorting and without atomics whose order matters.
//
// Example, 2 ranks, one expert each, K = 1: rank 0 wants [0, 1, 1], rank 1 wants [1, 0]. On rank 1, expert 1 has the
// rows (rank 0, token 1), (rank 0, token 2), (rank 1, token 0): position_WTK = [[[-1], [0], [1]], [[2], [-1]]]; the
// tokens it receives are its compact rows 0 and 1: recv_row_WT = [[-1, 0, 1], [-1, -1]].
#include "exchange.cuh"

constexpr int kChunk = 128;
constexpr int kRouteThreads = 512;
constexpr u32 kOwnBarriers = 2;

struct Route {
    const i64* ids;        // [ranks of the launch, max_tokens, K]
    const float* weights;  // the same
    const int* tokens;     // [..] or null
    const int* first_replica;  // [E + 1]; an expert's slots are replica_slots[first .. next), ascending
    const int* replica_slots;
    const int* rank_offsets;  // [W + 1]
    int* position;            // [.., W, max_tokens, K]
    float* all_weights;       // [.., W, max_tokens, K]
    int* recv_row;            // [.., W, max_tokens]
    int* send_row;            // [.., max_tokens, W]
    int* counts;              // [.., most_slots]; rows of every local slot, padding included
    int* totals;              // [.., 4]: expert-major rows, rows received, overflow, 0
    int* all_tokens;          // [.., W]; tokens of every rank
    i64 ids_at;               // offset in a heap: int32 [2, W, max_tokens * K], then as many floats
    i64 counts_at;            // offset in a heap: scratch of this rank alone, int32 [chunks, E], then [chunks, W]
    i64 tokens_at;            // offset in a heap: int32 [2, W]
    int num_tokens;
    int max_tokens;
    int choices;
    int experts;
    int most_slots;
    int alignment;
    int row_capacity;
    int token_capacity;
};

struct Scratch {
    u32* mask;       // [chunks of the block, E, 4]
    u32* rank_mask;  // [chunks of the block, W, 4]
    int* before;     // [chunks of the block, E]; choices of the expert in earlier chunks of the source
    int* total;      // [W, E]
    int* rank_before;  // [chunks of the block, W]
    int* rank_total;   // [W, W]
    int* slot_base;    // [W, most_slots]; row of the first choice of a source in a local slot
    int* slot_rows;    // [most_slots]
    int chunks;        // of this block
    int first;         // its first chunk
    int per_source;    // chunks of a source
};

__device__ inline Scratch carve(const Call& call, const Route& route) {
    const int ranks = call.group->ranks, experts = route.experts;
    Scratch s;
    s.per_source = (route.max_tokens + kChunk - 1) / kChunk;
    const int all = s.per_source * ranks;
    const int per_block = (all + call.group->blocks - 1) / call.group->blocks;
    s.first = call.block * per_block;
    s.chunks = max(0, min(per_block, all - s.first));
    u32* at = reinterpret_cast<u32*>(ptx::shared_memory());
    s.mask = at;
    at += per_block * experts * 4;
    s.rank_mask = at;
    at += per_block * ranks * 4;
    int* words = reinterpret_cast<int*>(at);
    s.before = words;
    words += per_block * experts;
    s.total = words;
    words += ranks * experts;
    s.rank_before = words;
    words += per_block * ranks;
    s.rank_total = words;
    words += ranks * ranks;
    s.slot_base = words;
    words += ranks * route.most_slots;
    s.slot_rows = words;
    return s;
}

__device__ __forceinline__ int below(const u32* mask, int token) {
    const int word = token >> 5;
    int count = __popc(mask[word] & ((1u << (token & 31)) - 1));
    for (int i = 0; i < word; ++i) count += __popc(mask[i]);
    return count;
}

__device__ __forceinline__ int held(const u32* mask) { return __popc(mask[0]) + __popc(mask[1]) + __popc(mask[2]) + __popc(mask[3]); }

__device__ __forceinline__ i64 parity_at(const Call& call, const Route& route) {
    return static_cast<i64>(call.epoch & 1) * call.group->ranks * route.max_tokens * route.choices;
}

// My ids and weights into every heap, then one flag per block.
__device__ inline void give_choices(const Call& call, const Route& route) {
    const Group& group = *call.group;
    const int tokens = route.tokens ? route.tokens[call.local] : route.num_tokens;
    const i64 all = static_cast<i64>(group.ranks) * route.max_tokens * route.choices;
    const i64 mine = static_cast<i64>(route.max_tokens) * route.choices;
    const i64* ids = route.ids + call.local * mine;
    const float* weights = route.weights + call.local * mine;
    const int count = tokens * route.choices, step = group.blocks * kRouteThreads;
    for (int i = call.block * kRouteThreads + static_cast<int>(threadIdx.x); i < count; i += step) {
        const int id = static_cast<int>(ids[i]);
        const float weight = weights[i];
        for (int p = 0; p < group.ranks; ++p) {
            int* there = reinterpret_cast<int*>(group.heap[p] + route.ids_at) + parity_at(call, route) + call.me * mine + i;
            there[0] = id;
            reinterpret_cast<float*>(there)[2 * all] = weight;
        }
    }
    if (call.block == 0 && static_cast<int>(threadIdx.x) < group.ranks)
        reinterpret_cast<int*>(group.heap[threadIdx.x] + route.tokens_at)[(call.epoch & 1) * group.ranks + call.me] = tokens;
    __syncthreads();
    for (int p = static_cast<int>(threadIdx.x); p < group.ranks; p += kRouteThreads) {
        ptx::fence_sys();
        ptx::store_release_sys(&control_of(group, p)->arrived[kRoute][call.me][call.block], call.epoch);
    }
}

__device__ inline bool take_choices(const Call& call) {
    const int words = call.group->ranks * call.group->blocks;
    bool fine = true;
    for (int i = static_cast<int>(threadIdx.x); i < words; i += kRouteThreads) {
        const int p = i / call.group->blocks;
        fine = fine && wait_flag(call, &call.own->arrived[kRoute][p][i % call.group->blocks], call.epoch, kIdsArrived, p);
    }
    return __syncthreads_and(fine) != 0;
}

struct Choice {
    int source, token, in_chunk, chunk, expert;  // chunk: of the block; expert -1: none
    i64 at;                                      // [W, max_tokens, K]
};

// Choice `x` of the block's chunks, in the order chunk, token, choice.
__device__ inline Choice choice_of(const Call& call, const Route& route, const Scratch& s, const int* tokens, int x) {
    const int per_chunk = kChunk * route.choices;
    Choice c;
    c.chunk = x / per_chunk;
    const int rest = x - c.chunk * per_chunk, number = s.first + c.chunk;
    c.in_chunk = rest / route.choices;
    c.source = number / s.per_source;
    c.token = (number - c.source * s.per_source) * kChunk + c.in_chunk;
    const int k = rest - c.in_chunk * route.choices;
    c.at = (static_cast<i64>(c.source) * route.max_tokens + c.token) * route.choices + k;
    c.expert = -1;
    if (c.token < tokens[c.source]) {
        const int* ids = reinterpret_cast<const int*>(call.group->heap[call.me] + route.ids_at) + parity_at(call, route);
        c.expert = ids[c.at];
    }
    return c;
}

__device__ inline void mark_experts(const Call& call, const Route& route, const Scratch& s, const int* tokens) {
    const i64 all = static_cast<i64>(call.group->ranks) * route.max_tokens * route.choices;
    const float* given = reinterpret_cast<const float*>(call.group->heap[call.me] + route.ids_at) + 2 * all + parity_at(call, route);
    float* weights = route.all_weights + call.local * all;
    for (int x = static_cast<int>(threadIdx.x); x < s.chunks * kChunk * route.choices; x += kRouteThreads) {
        const Choice c = choice_of(call, route, s, tokens, x);
        if (c.token >= route.max_tokens) continue;
        weights[c.at] = c.token < tokens[c.source] ? given[c.at] : 0.0f;
        if (c.expert < 0) continue;
        const u32 bit = 1u << (c.in_chunk & 31);
        if (c.expert >= route.experts ||
            (atomicOr(&s.mask[(c.chunk * route.experts + c.expert) * 4 + (c.in_chunk >> 5)], bit) & bit) != 0)
            give_up(call, kBadIds, kIdsArrived, c.source);
    }
}

// Prefixes over the chunks of every source, of columns [chunks][width] that all blocks of this rank have written.
__device__ inline void scan_chunks(const Scratch& s, const int* columns, int width, int ranks, int* before, int* total) {
    for (int x = static_cast<int>(threadIdx.x); x < ranks * width; x += kRouteThreads) {
        const int source = x / width, column = x - source * width;
        int sum = 0;
        for (int j = 0; j < s.per_source; ++j) {
            const int number = source * s.per_source + j - s.first;
            if (number >= 0 && number < s.chunks) before[number * width + column] = sum;
            sum += columns[(source * s.per_source + j) * width + column];
        }
        total[x] = sum;
    }
    __syncthreads();
}

// Replica `number` of `replicas` takes how many of `count` choices of rank `source`: placement.split.split_evenly.
__device__ __forceinline__ int share_of(int count, int replicas, int number, int source) {
    const int turn = ((number - source) % replicas + replicas) % replicas;
    return count / replicas + (turn < count % replicas);
}

// The slot of the `nth` choice of `expert` on rank `source`, and its number among those that slot takes from there.
__device__ inline int slot_of(const Route& route, const Scratch& s, int source, int expert, int& nth) {
    const int first = route.first_replica[expert], replicas = route.first_replica[expert + 1] - first;
    int number = 0;
    if (replicas > 1) {
        const int count = s.total[source * route.experts + expert];
        for (; number + 1 < replicas; ++number) {
            const int share = share_of(count, replicas, number, source);
            if (nth < share) break;
            nth -= share;
        }
    }
    return route.replica_slots[first + number];
}

__device__ __forceinline__ int rank_of_slot(const Route& route, int ranks, int slot) {
    int rank = 0;
    while (rank + 1 < ranks && slot >= route.rank_offsets[rank + 1]) ++rank;
    return rank;
}

__device__ inline void mark_ranks(const Call& call, const Route& route, const Scratch& s, const int* tokens) {
    const int ranks = call.group->ranks;
    for (int x = static_cast<int>(threadIdx.x); x < s.chunks * kChunk * route.choices; x += kRouteThreads) {
        const Choice c = choice_of(call, route, s, tokens, x);
        if (c.expert < 0) continue;
        int nth = s.before[c.chunk * route.experts + c.expert] + below(&s.mask[(c.chunk * route.experts + c.expert) * 4], c.in_chunk);
        const int rank = rank_of_slot(route, ranks, slot_of(route, s, c.source, c.expert, nth));
        atomicOr(&s.rank_mask[(c.chunk * ranks + rank) * 4 + (c.in_chunk >> 5)], 1u << (c.in_chunk & 31));
    }
}

// Rows of every local slot, and where every source's begin.
__device__ inline void place_slots(const Call& call, const Route& route, const Scratch& s) {
    const int ranks = call.group->ranks, first = route.rank_offsets[call.me], slots = route.rank_offsets[call.me + 1] - first;
    for (int x = static_cast<int>(threadIdx.x); x < route.most_slots; x += kRouteThreads) s.slot_rows[x] = 0;
    __syncthreads();
    for (int e = static_cast<int>(threadIdx.x); e < route.experts; e += kRouteThreads) {
        const int begin = route.first_replica[e], replicas = route.first_replica[e + 1] - begin;
        for (int number = 0; number < replicas; ++number) {
            const int slot = route.replica_slots[begin + number] - first;
            if (slot < 0 || slot >= slots) continue;
            int sum = 0;
            for (int source = 0; source < ranks; ++source) {
                s.slot_base[source * route.most_slots + slot] = sum;
                sum += share_of(s.total[source * route.experts + e], replicas, number, source);
            }
            s.slot_rows[slot] = (sum + route.alignment - 1) / route.alignment * route.alignment;
        }
    }
    __syncthreads();
    for (int slot = static_cast<int>(threadIdx.x); slot < slots; slot += kRouteThreads) {
        int start = 0;
        for (int i = 0; i < slot; ++i) start += s.slot_rows[i];
        for (int source = 0; source < ranks; ++source) s.slot_base[source * route.most_slots + slot] += start;
    }
    __syncthreads();
}

__device__ inline void write_positions(const Call& call, const Route& route, const Scratch& s, const int* tokens) {
    const int ranks = call.group->ranks, first = route.rank_offsets[call.me];
    int* position = route.position + static_cast<i64>(call.local) * ranks * route.max_tokens * route.choices;
    for (int x = static_cast<int>(threadIdx.x); x < s.chunks * kChunk * route.choices; x += kRouteThreads) {
        const Choice c = choice_of(call, route, s, tokens, x);
        if (c.token >= route.max_tokens) continue;
        int row = -1;
        if (c.expert >= 0) {
            int nth = s.before[c.chunk * route.experts + c.expert] + below(&s.mask[(c.chunk * route.experts + c.expert) * 4], c.in_chunk);
            const int slot = slot_of(route, s, c.source, c.expert, nth);
            if (rank_of_slot(route, ranks, slot) == call.me) row = s.slot_base[c.source * route.most_slots + slot - first] + nth;
            if (row >= route.row_capacity) row = -1;
        }
        position[c.at] = row;
    }
}

// First compact row on rank `to` of the tokens of `source`.
__device__ inline int compact_base(const Scratch& s, int ranks, int source, int to) {
    int sum = 0;
    for (int p = 0; p < source; ++p)
        if (p != to) sum += s.rank_total[p * ranks + to];
    return sum;
}

__device__ inline void write_rows(const Call& call, const Route& route, const Scratch& s) {
    const int ranks = call.group->ranks, me = call.me;
    int* recv_row = route.recv_row + static_cast<i64>(call.local) * ranks * route.max_tokens;
    int* send_row = route.send_row + static_cast<i64>(call.local) * ranks * route.max_tokens;
    for (int x = static_cast<int>(threadIdx.x); x < s.chunks * kChunk; x += kRouteThreads) {
        const int chunk = x / kChunk, in_chunk = x % kChunk, number = s.first + chunk;
        const int source = number / s.per_source, token = (number - source * s.per_source) * kChunk + in_chunk;
        if (token >= route.max_tokens) continue;
        for (int p = 0; p < ranks; ++p) {
            if (source != me && p != me) continue;
            const u32* mask = &s.rank_mask[(chunk * ranks + p) * 4];
            const bool goes = (mask[in_chunk >> 5] >> (in_chunk & 31)) & 1;
            int row = -1;
            if (goes) row = source == p ? 0 : compact_base(s, ranks, source, p) + s.rank_before[chunk * ranks + p] + below(mask, in_chunk);
            if (row >= route.token_capacity) row = -1;
            if (p == me) recv_row[static_cast<i64>(source) * route.max_tokens + token] = source == me ? -1 : row;
            if (source == me) send_row[static_cast<i64>(token) * ranks + p] = row;
        }
    }
}

__device__ inline void write_totals(const Call& call, const Route& route, const Scratch& s, const int* tokens) {
    const int ranks = call.group->ranks, thread = static_cast<int>(threadIdx.x);
    int* counts = route.counts + call.local * route.most_slots;
    int* totals = route.totals + call.local * 4;
    int* all_tokens = route.all_tokens + call.local * ranks;
    for (int i = thread; i < route.most_slots; i += kRouteThreads) counts[i] = s.slot_rows[i];
    for (int i = thread; i < ranks; i += kRouteThreads) all_tokens[i] = tokens[i];
    if (thread != 0) return;
    int rows = 0;
    for (int i = 0; i < route.most_slots; ++i) rows += s.slot_rows[i];
    const int received = compact_base(s, ranks, ranks, call.me);
    const bool overflow = rows > route.row_capacity || received > route.token_capacity;
    totals[0] = rows;
    totals[1] = received;
    totals[2] = overflow;
    totals[3] = 0;
    if (overflow) call.own->overflows += 1;
}

extern "C" __global__ void __launch_bounds__(kRouteThreads, 1) route_choices(const __grid_constant__ Group group,
                                                                             const __grid_constant__ Route route) {
    const Call call = begin_call(group, kRoute);
    const Scratch s = carve(call, route);
    const int ranks = group.ranks, thread = static_cast<int>(threadIdx.x);
    int* columns = reinterpret_cast<int*>(group.heap[call.me] + route.counts_at);
    int* rank_columns = columns + static_cast<i64>(s.per_source) * ranks * route.experts;
    const int* tokens = reinterpret_cast<const int*>(group.heap[call.me] + route.tokens_at) + (call.epoch & 1) * ranks;
    give_choices(call, route);
    for (int i = thread; i < s.chunks * route.experts * 4; i += kRouteThreads) s.mask[i] = 0;
    for (int i = thread; i < s.chunks * ranks * 4; i += kRouteThreads) s.rank_mask[i] = 0;
    bool fine = take_choices(call);
    if (fine) {
        mark_experts(call, route, s, tokens);
        __syncthreads();
        for (int i = thread; i < s.chunks * route.experts; i += kRouteThreads) columns[s.first * route.experts + i] = held(&s.mask[4 * i]);
        fine = own_blocks(call, kOwnBarriers, 1);
    }
    if (fine) {
        scan_chunks(s, columns, route.experts, ranks, s.before, s.total);
        mark_ranks(call, route, s, tokens);
        __syncthreads();
        for (int i = thread; i < s.chunks * ranks; i += kRouteThreads) rank_columns[s.first * ranks + i] = held(&s.rank_mask[4 * i]);
        place_slots(call, route, s);
        fine = own_blocks(call, kOwnBarriers, 2);
    }
    if (fine) {
        scan_chunks(s, rank_columns, ranks, ranks, s.rank_before, s.rank_total);
        write_positions(call, route, s, tokens);
        write_rows(call, route, s);
        if (call.block == 0) write_totals(call, route, s, tokens);
    }
    end_call(call);
}
