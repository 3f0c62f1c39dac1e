// Combine from compact rows, each already the sum of its token's rows on one rank: every rank pulls the sums of its own tokens and
// adds them in the order of the ranks. Nothing is written on the way, so 8 SMs load each byte once.
//
// Warp 0 lets the rows of the other ranks come by TMA into a ring of entries: one piece of a token's row from every rank, in the
// place of that rank. Teams of warps take turns, each warp adding its columns, own row and addend straight from memory, the row some pieces
// ahead. A warp may be entries ahead of another; an entry is free when all have read it.
//
// Example, 2 ranks: token 5 of rank 0 wants both; rank 0 pulls u from rank 1 and writes bf16(u + own[5]).
#include "exchange_terms.cuh"

constexpr int kTeams = 1;         // that take turns; two of fewer warps and smaller pieces were slower, the loading warp bounds both
constexpr int kAddingWarps = 14;  // of a team: 448 threads, half a row of 7168 values
constexpr int kGatherThreads = 32 * (1 + kTeams * kAddingWarps);
constexpr int kMostEntries = 32;
constexpr int kAhead = 4;         // pieces of own rows on their way to a team
constexpr int kRanksAtOnce = 2;

struct Gather {
    const u8* own;        // [ranks of the launch, tokens, row_bytes]
    const u8* addend;     // the same or null; joins last
    u8* out;              // bf16 or float32 [.., tokens, D]
    const int* send_row;  // [.., max_tokens, W]; column of the own rank: at least 0 where a choice is local
    const int* tokens;    // [.., W]
    i64 sums_at;          // offset in a heap of the sums of this call
    i64 x_stride;         // bytes between ranks of the launch
    i64 out_stride;
    int max_tokens;
    int row_bytes;
    int piece_bytes;
    int entries;  // a multiple of the teams, so that an entry always meets the same one
    int out_float;
};

struct Entries {
    u32 full, empty;  // shared addresses of arrays of barriers
    u32 slots;
    int* ranks;  // [entries]; bits of the ranks whose rows count
    int bytes;   // of an entry
};

__device__ inline Entries make_entries(const Call& call, const Gather& gather) {
    u8* shared = ptx::shared_memory();
    const u32 base = ptx::smem_u32(shared);
    Entries entries;
    entries.full = base;
    entries.empty = base + 8 * kMostEntries;
    entries.ranks = reinterpret_cast<int*>(shared + 16 * kMostEntries);
    entries.slots = base + 1024;
    entries.bytes = max(1, call.group->ranks - 1) * gather.piece_bytes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < gather.entries; ++i) {
            ptx::mbarrier_init(entries.full + 8 * i, 1);
            ptx::mbarrier_init(entries.empty + 8 * i, 32 * kAddingWarps);
        }
        ptx::fence_barrier_init();
        ptx::fence_async_shared();
    }
    __syncthreads();
    return entries;
}

// Lane i * W + p asks for the row of rank p of the i-th token of a batch.
__device__ inline void pull_entries(const Call& call, const Gather& gather, const Entries& entries, int tokens) {
    const Group& group = *call.group;
    const int lane = static_cast<int>(ptx::lane_id()), ranks = group.ranks, batch = 32 / ranks;
    const int of = lane / ranks, p = lane % ranks;
    const int* send_row = gather.send_row + static_cast<i64>(call.local) * gather.max_tokens * ranks;
    const u8* sums = group.heap[p] + gather.sums_at;
    const u32 place = p < call.me ? p : p - 1;
    if (!wait_credit(call, lane, 1)) return;  // every peer has begun this call: its sums are there
    ptx::fence_async();
    u32 at = 0, round = 0;
    for (int first = call.block; first < tokens; first += batch * group.blocks) {
        const int token = first + of * group.blocks;
        const bool any = of < batch && token < tokens;
        const int row = any ? send_row[static_cast<i64>(token) * ranks + p] : -1;
        const u32 wanted = __ballot_sync(0xffffffffu, row >= 0);
        const u8* source = sums + static_cast<i64>(row) * gather.row_bytes;
        for (int i = 0; i < batch && first + i * group.blocks < tokens; ++i) {
            const u32 bits = wanted >> i * ranks & ((1u << ranks) - 1);
            const int loads = __popc(bits & ~(1u << call.me));
            for (int offset = 0; offset < gather.row_bytes; offset += gather.piece_bytes) {
                const int bytes = min(gather.piece_bytes, gather.row_bytes - offset);
                if (round > 0 && !wait_stage(call, entries.empty + 8 * at, (round & 1) ^ 1)) return;
                __syncwarp();  // an entry without loads is full at once, and might be empty again before a slow lane has looked
                if (lane == i * ranks) {
                    entries.ranks[at] = static_cast<int>(bits);
                    ptx::mbarrier_expect(entries.full + 8 * at, bytes * loads);
                }
                __syncwarp();
                if (of == i && row >= 0 && p != call.me)
                    ptx::bulk_load(entries.slots + at * entries.bytes + place * gather.piece_bytes, source + offset, bytes, entries.full + 8 * at);
                if (++at == static_cast<u32>(gather.entries)) {
                    at = 0;
                    ++round;
                }
            }
        }
    }
}

__device__ inline void store_sum(const Gather& gather, u8* out, i64 column, const float (&sum)[8]) {
    if (gather.out_float) {
        reinterpret_cast<float4*>(out)[2 * column] = {sum[0], sum[1], sum[2], sum[3]};
        reinterpret_cast<float4*>(out)[2 * column + 1] = {sum[4], sum[5], sum[6], sum[7]};
    } else {
        reinterpret_cast<uint4*>(out)[column] = pack_eight(sum);
    }
}

// A team's pieces, one after the other.
struct Walk {
    int token, offset;
    __device__ __forceinline__ void next(const Call& call, const Gather& gather) {
#pragma unroll
        for (int i = 0; i < kTeams; ++i) {
            offset += gather.piece_bytes;
            if (offset >= gather.row_bytes) {
                offset = 0;
                token += call.group->blocks;
            }
        }
    }
};

// The rows of the ranks in order, `bits` saying which count; this rank's is `home`. Several come from shared memory at once.
__device__ __forceinline__ void add_ranks(float (&sum)[8], u32 slot, int piece_bytes, int bits, int me, int ranks, const uint4& home) {
    for (int first = 0; first < ranks; first += kRanksAtOnce) {
        uint4 value[kRanksAtOnce];
#pragma unroll
        for (int u = 0; u < kRanksAtOnce; ++u) {
            const int p = first + u;
            if (p == me)
                value[u] = home;
            else if (bits >> p & 1)
                value[u] = ptx::load_shared(slot + (p < me ? p : p - 1) * piece_bytes);
        }
#pragma unroll
        for (int u = 0; u < kRanksAtOnce; ++u)
            if (bits >> (first + u) & 1) add_eight(sum, value[u], 1.0f);
    }
}

// Every thread has one column of 16 bytes of each piece. Own rows are asked for kAhead pieces before their turn.
__device__ inline void add_entries(const Call& call, const Gather& gather, const Entries& entries, int tokens) {
    const int thread = static_cast<int>(threadIdx.x) - 32, team = thread / (32 * kAddingWarps), mine = 16 * (thread % (32 * kAddingWarps));
    const u8* own = gather.own + call.local * gather.x_stride + mine;
    const u8* addend = gather.addend + call.local * gather.x_stride + mine;
    u8* out = gather.out + call.local * gather.out_stride;
    uint4 home[kAhead];
    Walk walk = {call.block, 0};
    for (int i = 0; i < team; ++i) {
        walk.offset += gather.piece_bytes;
        if (walk.offset >= gather.row_bytes) walk = {walk.token + call.group->blocks, 0};
    }
    Walk ahead = walk;
    const auto ask = [&](int d) {
        const i64 at = static_cast<i64>(ahead.token) * gather.row_bytes + ahead.offset;
        const bool wanted = ahead.token < tokens && mine < gather.piece_bytes && ahead.offset + mine < gather.row_bytes;
        home[d] = ptx::load_once(own + at, wanted);
        ahead.next(call, gather);
    };
    u32 at = team, round = 0;
#pragma unroll
    for (int d = 0; d < kAhead; ++d) ask(d);
    while (walk.token < tokens) {
#pragma unroll
        for (int d = 0; d < kAhead; ++d) {
            if (walk.token >= tokens) break;
            const bool inside = mine < gather.piece_bytes && walk.offset + mine < gather.row_bytes;
            const i64 here = static_cast<i64>(walk.token) * gather.row_bytes + walk.offset;
            const uint4 added = ptx::load_once(addend + here, gather.addend && inside);
            if (!wait_stage(call, entries.full + 8 * at, round & 1)) return;
            float sum[8] = {};
            add_ranks(sum, entries.slots + at * entries.bytes + mine, gather.piece_bytes, inside ? entries.ranks[at] : 0, call.me, call.group->ranks, home[d]);
            ptx::mbarrier_arrive(entries.empty + 8 * at);
            if (gather.addend) add_eight(sum, added, 1.0f);
            if (inside) store_sum(gather, out, (here + mine) / 16, sum);
            ask(d);
            walk.next(call, gather);
            at += kTeams;
            if (at >= static_cast<u32>(gather.entries)) {
                at -= gather.entries;
                ++round;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kGatherThreads, 1) gather_sums(const __grid_constant__ Group group,
                                                                           const __grid_constant__ Gather gather) {
    const Call call = begin_call(group, kGather);
    const Entries entries = make_entries(call, gather);
    const int tokens = gather.tokens[call.local * group.ranks + call.me];
    if (threadIdx.x < 32) {
        if (call.block == 0) tell_started(call, static_cast<int>(ptx::lane_id()));
        pull_entries(call, gather, entries, tokens);
    } else {
        add_entries(call, gather, entries, tokens);
    }
    end_call(call);
}
