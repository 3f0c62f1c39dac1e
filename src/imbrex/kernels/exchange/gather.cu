// Combine from compact rows, each already the sum of its token's rows on one rank: every rank pulls the sums
// of its own tokens and adds them in the order of the ranks. Nothing is written on the way, so 8 SMs load
// each byte once.
//
// A block is some crews, each on tokens of its own: a warp that lets rows come by TMA into a ring of slots,
// one after the other, and warps that add them, every thread its columns. Rows of the other ranks, the own
// row in its place among them and the addend behind them go the same way. What comes next is nowhere written
// down: all warps of a crew read the same table of rows, and count.
//
// Measured on four H200, D = 7168, 4096 tokens a rank: 500 us on 8 SMs, the 319 GB/s of the wire, with or
// without sums and stores; 739 on 4. 27 MB an SM, 20 of them remote, want 80 KB in flight at 2 us: so all
// shared memory is slots, none is kept for a rank without a row, and pieces are multiples of 128 bytes
// (others halve the rate of remote loads). Then a token's chain of instructions counts, some 5 cycles each in
// a warp that waits for itself: 14 warps of two columns on one token took 0.8 to 1.2 us a token whatever its
// bytes (886 us with two teams of ten). Hence few wide warps, two tokens or more at once, one copy of the
// wait.
// Own rows by plain loads two tokens ahead bound it alike.
//
// Example, 2 ranks: token 5 of rank 0 wants both; rank 0 pulls u from rank 1 and writes bf16(u + own[5]).
#include "exchange/terms.cuh"

namespace exchange {

using namespace sums;

constexpr int kMostGatherThreads = 512;
constexpr int kWide = 4;        // columns of 16 bytes that a thread has of a piece, 512 bytes apart
constexpr int kRowsAtOnce = 2;  // that a thread reads together
constexpr int kBarrierBytes = 1024;

struct Gather {
    const u8* own;        // [ranks of the launch, tokens, row_bytes]
    const u8* addend;     // the same or null; joins last
    u8* out;              // bf16 or float32 [.., tokens, D]
    const int* send_row;  // [.., max_tokens, W]; column of the own rank: at least 0 where a choice is local
    const int* tokens;    // [.., W]
    i64 sums_at;          // offset in a heap of the sums of this call
    i64 x_stride;         // bytes between ranks of the launch
    i64 out_stride;
    i64 out_bytes;  // of one rank
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
            ptx::mbarrier_init(base + 8 * (all + i), 32 * gather.adders);
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
__device__ __forceinline__ int ask_batch(const Call& call, const Gather& gather, const Crew& crew, int first,
                                         int tokens) {
    const int lane = static_cast<int>(ptx::lane_id()), ranks = call.group->ranks;
    const int token = first + lane / ranks * crew.step;
    const int* send_row = gather.send_row + static_cast<i64>(call.local) * gather.max_tokens * ranks;
    return lane / ranks < 32 / ranks && token < tokens
               ? send_row[static_cast<i64>(token) * ranks + lane % ranks]
               : -1;
}

// The loading warp's side: one piece of one row, asked for by lane `asking`. False on failure.
__device__ __forceinline__ bool load_piece(const Call& call, const Gather& gather, const Crew& crew,
                                           Place& place, int asking, const u8* from, int bytes) {
    const bool fine =
        place.round == 0 || wait_stage(call, crew.empty + 8 * place.slot, (place.round & 1) ^ 1);
    // a slow lane would otherwise look when the slot is full again
    if (!__all_sync(0xffffffffu, fine)) return false;
    if (static_cast<int>(ptx::lane_id()) == asking) {
        ptx::mbarrier_expect(crew.full + 8 * place.slot, bytes);
        ptx::bulk_load(crew.ring + place.slot * crew.pitch, from, bytes, crew.full + 8 * place.slot);
    }
    place.next(gather.slots);
    return true;
}

__device__ inline bool load_rows(const Call& call, const Gather& gather, const Crew& crew, int tokens) {
    const int lane = static_cast<int>(ptx::lane_id()), ranks = call.group->ranks, batch = 32 / ranks,
              p = lane % ranks;
    const u8* own = gather.own + call.local * gather.x_stride;
    const u8* addend = gather.addend + call.local * gather.x_stride;
    const u8* sums = call.group->heap[p] + gather.sums_at;
    int row = ask_batch(call, gather, crew, crew.first, tokens);
    if (!wait_credit(call, lane, 1)) return false;  // every peer has begun this call: its sums are there
    ptx::fence_async();
    Place place = {0, 0};
    for (int first = crew.first; first < tokens; first += batch * crew.step) {
        // Of this lane's token.
        const i64 mine = static_cast<i64>(first + lane / ranks * crew.step) * gather.row_bytes;
        const u32 wanted = __ballot_sync(0xffffffffu, row >= 0);
        const u8* source = p == call.me ? own + mine : sums + static_cast<i64>(row) * gather.row_bytes;
        row = ask_batch(call, gather, crew, first + batch * crew.step, tokens);
        for (int i = 0; i < batch && first + i * crew.step < tokens; ++i)
            for (int offset = 0; offset < gather.row_bytes; offset += gather.piece_bytes) {
                const int bytes = min(gather.piece_bytes, gather.row_bytes - offset);
                for (u32 left = wanted & ((1u << ranks) - 1) << i * ranks; left; left &= left - 1)
                    if (!load_piece(call, gather, crew, place, __ffs(left) - 1, source + offset, bytes))
                        return false;
                if (gather.addend &&
                    !load_piece(call, gather, crew, place, i * ranks, addend + mine + offset, bytes))
                    return false;
            }
    }
    return true;
}

// The next `rows` slots of the ring, in order; `mine`: this thread's offset in a slot. False on failure.
__device__ __forceinline__ bool add_slots(const Call& call, const Gather& gather, const Crew& crew,
                                          Place& place, int rows, u32 mine, float (&sum)[kWide][8]) {
#pragma unroll 1
    for (; rows > 0; rows -= kRowsAtOnce) {
        const Place begin = place;
        const int count = min(rows, kRowsAtOnce);
        u32 from[kRowsAtOnce];
#pragma unroll
        for (int u = 0; u < kRowsAtOnce; ++u) {
            from[u] = crew.ring + place.slot * crew.pitch + mine;
            if (u < count) place.next(gather.slots);
        }
        Place waited = begin;
#pragma unroll 1
        for (int u = 0; u < count; ++u, waited.next(gather.slots))
            if (!warp_wait_stage(call, crew.full + 8 * waited.slot, waited.round & 1)) return false;
        uint4 value[kRowsAtOnce][kWide];
#pragma unroll
        for (int u = 0; u < kRowsAtOnce; ++u)
            if (u < count)
#pragma unroll
                for (int k = 0; k < kWide; ++k) value[u][k] = ptx::load_shared(from[u] + 512 * k);
#pragma unroll
        for (int u = 0; u < kRowsAtOnce; ++u)
            if (u < count)
#pragma unroll
                for (int k = 0; k < kWide; ++k) add_eight(sum[k], value[u][k], 1.0f);
        Place read = begin;  // every lane arrives: racecheck follows barriers by thread
#pragma unroll 1
        for (int u = 0; u < count; ++u, read.next(gather.slots))
            ptx::mbarrier_arrive(crew.empty + 8 * read.slot);
    }
    return true;
}

// `to`: of this thread's first column; `left`: bytes of the piece from there on.
__device__ __forceinline__ void store_sums(const Gather& gather, u8* to, int left,
                                           const float (&sum)[kWide][8]) {
    if (gather.out_float) {
        float4* wide = reinterpret_cast<float4*>(to);
#pragma unroll
        for (int k = 0; k < kWide; ++k)
            if (512 * k < left) {
                wide[64 * k] = {sum[k][0], sum[k][1], sum[k][2], sum[k][3]};
                wide[64 * k + 1] = {sum[k][4], sum[k][5], sum[k][6], sum[k][7]};
            }
    } else {
#pragma unroll
        for (int k = 0; k < kWide; ++k)
            if (512 * k < left) reinterpret_cast<uint4*>(to)[32 * k] = pack_eight(sum[k]);
    }
}

__device__ inline bool add_rows(const Call& call, const Gather& gather, const Crew& crew, int tokens) {
    const int ranks = call.group->ranks,
              mine = 512 * kWide * (crew.warp - 1) + 16 * static_cast<int>(ptx::lane_id());
    const int scale = gather.out_float ? 2 : 1;
    const i64 row_bytes = static_cast<i64>(scale) * gather.row_bytes;
    u8* out = gather.out + call.local * gather.out_stride + crew.first * row_bytes + scale * mine;
    int row = ask_batch(call, gather, crew, crew.first, tokens), left = 0;
    u32 wanted = 0;
    Place place = {0, 0};
    for (int token = crew.first; token < tokens; token += crew.step, out += crew.step * row_bytes) {
        if (left == 0) {
            left = 32 / ranks;
            wanted = __ballot_sync(0xffffffffu, row >= 0);
            row = ask_batch(call, gather, crew, token + left * crew.step, tokens);
        }
        const int rows = __popc(wanted & ((1u << ranks) - 1)) + (gather.addend != nullptr);
        wanted >>= ranks;
        --left;
        for (int offset = 0; offset < gather.row_bytes; offset += gather.piece_bytes) {
            float sum[kWide][8] = {};
            if (!add_slots(call, gather, crew, place, rows, mine, sum)) return false;
            store_sums(gather, out + scale * offset,
                       min(gather.piece_bytes, gather.row_bytes - offset) - mine, sum);
        }
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(kMostGatherThreads, 1)
    gather_sums(const __grid_constant__ Group group, const __grid_constant__ Gather gather) {
    const Call call = begin_call(group, kGather);
    const Crew crew = make_crew(call, gather);
    const int tokens = gather.tokens[call.local * group.ranks + call.me];
    if (call.block == 0 && threadIdx.x < 32) tell_started(call, static_cast<int>(ptx::lane_id()));
    // A call behind one that failed may have nothing to wait for: routing left it no token.
    const bool before = crew.warp == 0 && failed(call);
    const bool fine =
        crew.warp == 0 ? load_rows(call, gather, crew, tokens) : add_rows(call, gather, crew, tokens);
    end_rows(call, fine && !before, gather.out + call.local * gather.out_stride, gather.out_bytes);
}

}  // namespace exchange
