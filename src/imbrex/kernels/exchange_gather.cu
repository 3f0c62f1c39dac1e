// Combine from compact rows, each already the sum of its token's rows on one rank: every rank pulls the sums of its own tokens and
// adds them in the order of the ranks. Nothing is written on the way, so 8 SMs load each byte once.
//
// A block is some crews, each on tokens of its own: a warp that lets pieces of the other ranks' rows come by TMA into a ring of
// slots, one after the other, and warps that add them, every thread its columns, with own row and addend straight from memory,
// asked for some pieces ahead. What comes next is nowhere written down: all warps of a crew read the same table of rows and count.
//
// Floor: 27 MB an SM at D = 7168 (8 SMs, 4 ranks), 20 of them remote at the 39 GB/s that a pull of whole rows reached with 200 KB
// in flight: 515 us. So all shared memory is slots, none is kept for a rank without a row, and pieces are multiples of 128 bytes
// (others halve the rate of remote loads). A slot is freed by one lane of every warp: arrivals on a barrier take 3 cycles each, and
// 448 for each half row took 776 us.
//
// Example, 2 ranks: token 5 of rank 0 wants both; rank 0 pulls u from rank 1 and writes bf16(u + own[5]).
#include "exchange_terms.cuh"

#ifndef GATHER_WARPS
#define GATHER_WARPS 16
#endif
#ifndef RANKS_AT_ONCE
#define RANKS_AT_ONCE 4
#endif
constexpr int kMostGatherThreads = 32 * GATHER_WARPS;
constexpr int kWide = 2;          // columns of 16 bytes that a thread has of a piece
constexpr int kAhead = 2;         // pieces of own rows and addends on their way to a thread
constexpr int kRanksAtOnce = RANKS_AT_ONCE;   // whose rows a thread reads together
constexpr int kBarrierBytes = 1024;

// racecheck follows barriers by thread: with this it sees who has read a slot.
#ifndef EVERY_LANE_ARRIVES
#define EVERY_LANE_ARRIVES 0
#endif

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
    int crews;
    int adders;  // warps of a crew that add
    int slots;   // of a crew
    int out_float;
};

struct Crew {
    u32 full, empty;  // shared addresses of arrays of barriers, one a slot
    u32 ring;         // of the slots
    int pitch;        // bytes of a slot
    int warp;         // 0 loads
    int first, step;  // tokens
};

__device__ inline Crew make_crew(const Call& call, const Gather& gather) {
    const u32 base = ptx::smem_u32(ptx::shared_memory()), all = static_cast<u32>(gather.crews * gather.slots);
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < all; ++i) {
            ptx::mbarrier_init(base + 8 * i, 1);
            ptx::mbarrier_init(base + 8 * (all + i), gather.adders * (EVERY_LANE_ARRIVES ? 32 : 1));
        }
        ptx::fence_barrier_init();
        ptx::fence_async_shared();
    }
    __syncthreads();
    const int warps = 1 + gather.adders, warp = static_cast<int>(threadIdx.x) / 32, number = warp / warps;
    Crew crew;
    crew.pitch = (gather.piece_bytes + 127) / 128 * 128;
    crew.full = base + 8 * number * gather.slots;
    crew.empty = crew.full + 8 * all;
    crew.ring = base + kBarrierBytes + number * gather.slots * crew.pitch;
    crew.warp = warp % warps;
    crew.first = call.block * gather.crews + number;
    crew.step = call.blocks * gather.crews;
    return crew;
}

// Where the next piece lands.
struct Place {
    u32 slot, round;
    __device__ __forceinline__ void next(int slots) {
        if (++slot == static_cast<u32>(slots)) {
            slot = 0;
            ++round;
        }
    }
};

// Lane i * W + p: the row at rank p of the i-th token of a batch that begins at `first`, or -1.
__device__ __forceinline__ int ask_batch(const Call& call, const Gather& gather, const Crew& crew, int first, int tokens) {
    const int lane = static_cast<int>(ptx::lane_id()), ranks = call.group->ranks;
    const int token = first + lane / ranks * crew.step;
    const int* send_row = gather.send_row + static_cast<i64>(call.local) * gather.max_tokens * ranks;
    return lane / ranks < 32 / ranks && token < tokens ? send_row[static_cast<i64>(token) * ranks + lane % ranks] : -1;
}

__device__ inline void pull_rows(const Call& call, const Gather& gather, const Crew& crew, int tokens) {
    const int lane = static_cast<int>(ptx::lane_id()), ranks = call.group->ranks, batch = 32 / ranks, p = lane % ranks;
    const u8* sums = call.group->heap[p] + gather.sums_at;
    int row = ask_batch(call, gather, crew, crew.first, tokens);
    if (!wait_credit(call, lane, 1)) return;  // every peer has begun this call: its sums are there
    ptx::fence_async();
    Place place = {0, 0};
    for (int first = crew.first; first < tokens; first += batch * crew.step) {
        const u32 wanted = __ballot_sync(0xffffffffu, row >= 0 && p != call.me);
        const u8* source = sums + static_cast<i64>(row) * gather.row_bytes;
        row = ask_batch(call, gather, crew, first + batch * crew.step, tokens);
        for (int i = 0; i < batch; ++i) {
            const u32 bits = wanted & ((1u << ranks) - 1) << i * ranks;
            for (int offset = 0; offset < gather.row_bytes; offset += gather.piece_bytes) {
                const int bytes = min(gather.piece_bytes, gather.row_bytes - offset);
                for (u32 left = bits; left; left &= left - 1) {
                    const bool fine = place.round == 0 || wait_stage(call, crew.empty + 8 * place.slot, (place.round & 1) ^ 1);
                    // a slow lane would otherwise look when the slot is full again
                    if (!__all_sync(0xffffffffu, fine)) return;
                    if (lane == __ffs(left) - 1) {
                        ptx::mbarrier_expect(crew.full + 8 * place.slot, bytes);
                        ptx::bulk_load(crew.ring + place.slot * crew.pitch, source + offset, bytes, crew.full + 8 * place.slot);
                    }
                    place.next(gather.slots);
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

// A crew's pieces, one after the other.
struct Walk {
    int token, offset;
    __device__ __forceinline__ void next(const Crew& crew, const Gather& gather) {
        offset += gather.piece_bytes;
        if (offset >= gather.row_bytes) {
            offset = 0;
            token += crew.step;
        }
    }
};

// This warp has read `rows` slots from `place` on.
__device__ __forceinline__ void free_slots(const Gather& gather, const Crew& crew, Place place, int rows) {
    __syncwarp();
    for (int i = 0; EVERY_LANE_ARRIVES && i < rows; ++i, place.next(gather.slots)) ptx::mbarrier_arrive(crew.empty + 8 * place.slot);
    u32 mine = place.slot + ptx::lane_id();
    if (mine >= static_cast<u32>(gather.slots)) mine -= gather.slots;
    if (!EVERY_LANE_ARRIVES && static_cast<int>(ptx::lane_id()) < rows) ptx::mbarrier_arrive(crew.empty + 8 * mine);
}

// One piece of the rows of the ranks in order, `bits` saying which there are; this rank's is `home`. False on failure.
__device__ __forceinline__ bool add_ranks(const Call& call, const Gather& gather, const Crew& crew, Place& place, u32 bits,
                                          int mine, const uint4 (&home)[kWide], float (&sum)[kWide][8]) {
    for (int first = 0; first < call.group->ranks; first += kRanksAtOnce) {
        uint4 value[kRanksAtOnce][kWide];
        const u32 some = bits >> first, pulled = (bits & ~(1u << call.me)) >> first;
        const Place begin = place;
#pragma unroll
        for (int u = 0; u < kRanksAtOnce; ++u)
            if (pulled >> u & 1) {
                if (!wait_stage(call, crew.full + 8 * place.slot, place.round & 1)) return false;
                const u32 from = crew.ring + place.slot * crew.pitch;
#pragma unroll
                for (int k = 0; k < kWide; ++k)  // a thread without a column reads another's
                    value[u][k] = ptx::load_shared(from + min(mine + k * 512 * gather.adders, crew.pitch - 16));
                place.next(gather.slots);
            }
#pragma unroll
        for (int u = 0; u < kRanksAtOnce; ++u)
            if (some >> u & 1)
#pragma unroll
                for (int k = 0; k < kWide; ++k) add_eight(sum[k], pulled >> u & 1 ? value[u][k] : home[k], 1.0f);
        free_slots(gather, crew, begin, __popc(pulled & ((1u << kRanksAtOnce) - 1)));
    }
    return true;
}

__device__ inline void add_rows(const Call& call, const Gather& gather, const Crew& crew, int tokens) {
    const int ranks = call.group->ranks, mine = 16 * (32 * (crew.warp - 1) + static_cast<int>(ptx::lane_id()));
    const u8* own = gather.own + call.local * gather.x_stride + mine;
    const u8* addend = gather.addend + call.local * gather.x_stride + mine;
    u8* out = gather.out + call.local * gather.out_stride;
    uint4 home[kAhead][kWide], added[kAhead][kWide];
    Walk walk = {crew.first, 0}, ahead = walk;
    Place place = {0, 0};
    const auto inside = [&](const Walk& at, int k) {
        const int byte = mine + k * 512 * gather.adders;
        return at.token < tokens && byte < gather.piece_bytes && at.offset + byte < gather.row_bytes;
    };
    const auto ask = [&](int d) {
        const i64 at = static_cast<i64>(ahead.token) * gather.row_bytes + ahead.offset;
#pragma unroll
        for (int k = 0; k < kWide; ++k) {
            home[d][k] = ptx::load_once(own + at + k * 512 * gather.adders, inside(ahead, k));
            added[d][k] = ptx::load_once(addend + at + k * 512 * gather.adders, gather.addend && inside(ahead, k));
        }
        ahead.next(crew, gather);
    };
#pragma unroll
    for (int d = 0; d < kAhead; ++d) ask(d);
    int row = ask_batch(call, gather, crew, crew.first, tokens), left = 0;
    u32 wanted = 0, bits = 0;
    while (walk.token < tokens) {
#pragma unroll
        for (int d = 0; d < kAhead; ++d) {
            if (walk.token >= tokens) break;
            if (walk.offset == 0) {
                if (left == 0) {
                    left = 32 / ranks;
                    wanted = __ballot_sync(0xffffffffu, row >= 0);
                    row = ask_batch(call, gather, crew, walk.token + left * crew.step, tokens);
                }
                bits = wanted & ((1u << ranks) - 1);
                wanted >>= ranks;
                --left;
            }
            float sum[kWide][8] = {};
            if (!add_ranks(call, gather, crew, place, bits, mine, home[d], sum)) return;
#pragma unroll
            for (int k = 0; k < kWide; ++k) {
                const i64 column = (static_cast<i64>(walk.token) * gather.row_bytes + walk.offset + mine) / 16 + k * 32 * gather.adders;
                if (gather.addend) add_eight(sum[k], added[d][k], 1.0f);
                if (inside(walk, k)) store_sum(gather, out, column, sum[k]);
            }
            ask(d);
            walk.next(crew, gather);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kMostGatherThreads, 1) gather_sums(const __grid_constant__ Group group,
                                                                               const __grid_constant__ Gather gather) {
    const Call call = begin_call(group, kGather);
    const Crew crew = make_crew(call, gather);
    const int tokens = gather.tokens[call.local * group.ranks + call.me];
    if (call.block == 0 && threadIdx.x < 32) tell_started(call, static_cast<int>(ptx::lane_id()));
    if (crew.warp == 0)
        pull_rows(call, gather, crew, tokens);
    else
        add_rows(call, gather, crew, tokens);
    end_call(call);
}
