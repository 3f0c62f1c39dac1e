// From rows of the fp8 codec, each received once, to expert-major rows: every token is loaded into shared
// memory once, by TMA, and stored from there at the row of each of its choices. DECODE 1: as bf16, the own
// tokens, which come from `x`, as they are. DECODE 0: as they crossed, bytes and scales apart, the own
// tokens written in shared memory as the codec writes the others.
//
// A warp works alone, with two slots: while one token's stores are read from the one, the next token arrives
// in the other. 65645 rows of 7168 on an H200: 194 us as they are (165 at the memory's rate), 308 as bf16
// (280); with 3 or 4 slots, or from 4 warps a multiprocessor on, the same (rows of 2048 want 8). By plain
// loads and stores, 16 bytes a lane: 257 to 300, and 373, with 1 to 7 loads under way and 4 to 32 blocks a
// multiprocessor.
//
// Example, 2 ranks, K = 1, on rank 1: recv_row [[0, -1], ..], position [[[3], [-1]], [[1], [-1]]]: received
// row 0 becomes row 3, the own token 0 row 1. Received rows begin every `pitch` bytes.
#include "exchange/quantise.cuh"

namespace rows {

using namespace mover;
using namespace fp8;

constexpr int kSlots = 2;
constexpr bool kDecode = DECODE;
constexpr u32 kTries = 1 << 20;  // of 10 us, to wait for a load

struct Expansion {
    const u8* received;
    const u8* x;          // bf16
    const int* position;  // [ranks, max_tokens, choices]; expert-major row, -1: not here
    const int* recv_row;  // [ranks, max_tokens]; compact row, -1: none
    const int* tokens;    // [ranks]
    u8* rows;
    float* scales;  // DECODE 0
    int ranks, me, max_tokens, choices;
    int width, pitch;
    int blocks, warps;  // warps of a block
};

struct Token {
    int at;   // among all ranks' tokens; -1: no more
    int row;  // received, or of `x`
    bool own;
};

// The tokens of one warp that have rows here: every `step`-th of all, from `next` on. A lane looks at one of
// 32 at once.
struct Finder {
    int next, step;
    int row;  // of the token that a lane looks at
    u32 found;

    __device__ __forceinline__ Token take(const Expansion& e) {
        const int all = e.ranks * e.max_tokens;
        while (found == 0) {
            if (next >= all) return {-1, 0, false};
            const int mine = next + static_cast<int>(ptx::lane_id()) * step;
            next += 32 * step;
            row = -1;
            if (mine < all) {
                const int source = static_cast<int>(mine / e.max_tokens),
                          token = static_cast<int>(mine % e.max_tokens);
                if (token < e.tokens[source]) row = source == e.me ? token : e.recv_row[mine];
            }
            found = __ballot_sync(0xffffffffu, row >= 0);
        }
        const int lane = __ffs(found) - 1;
        found &= found - 1;
        const int at = next - (32 - lane) * step;
        return {at, __shfl_sync(0xffffffffu, row, lane), at / e.max_tokens == e.me};
    }
};

__device__ __forceinline__ int scale_bytes(const Expansion& e) { return e.width / (kBlock / 4); }

// One lane; `slot` is free. What will be decoded lies in its second half, the scales behind it.
__device__ __forceinline__ void load_token(const Expansion& e, const Token& token, u32 slot, u32 full) {
    const u32 bytes = token.own ? 2 * e.width : e.width + scale_bytes(e);
    const u8* from = token.own ? e.x + static_cast<i64>(token.row) * 2 * e.width
                               : e.received + static_cast<i64>(token.row) * e.pitch;
    ptx::mbarrier_expect(full, bytes);
    ptx::bulk_load(kDecode && !token.own ? slot + e.width : slot, from, bytes, full);
}

__device__ __forceinline__ u32 decode_pair(u32 bytes, float scale) {
    float low, high;
    ptx::unpack_e4m3(bytes & 0xffff, low, high);
    return ptx::pack_bf16(__fmul_rn(low, scale), __fmul_rn(high, scale));
}

__device__ __forceinline__ uint4 decode_eight(u32 first, u32 second, float scale) {
    return {decode_pair(first, scale), decode_pair(first >> 16, scale), decode_pair(second, scale),
            decode_pair(second >> 16, scale)};
}

// A row in the second half of its slot to bf16 from the beginning on, all lanes: n values that were read end
// at byte width + n, and become 2 n bytes, no more as long as n <= width. `row`: the slot again, to read
// scales from.
__device__ inline void decode_row(u32 slot, const u8* row, int width) {
    const int lane = static_cast<int>(ptx::lane_id()), swap = lane >> 2 & 1;
    for (int first = 0; first < width; first += kTogether * kStep) {
        uint4 bytes[kTogether];
        float scale[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const int at = min(first + i * kStep, width - kStep) + 16 * lane;
            bytes[i] = ptx::load_shared(slot + width + at);
            scale[i] = reinterpret_cast<const float*>(row + 2 * width)[at / kBlock];
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            if (first + i * kStep >= width) continue;
            const uint4 low = decode_eight(bytes[i].x, bytes[i].y, scale[i]),
                        high = decode_eight(bytes[i].z, bytes[i].w, scale[i]);
            const u32 to = slot + 2 * (first + i * kStep + 16 * lane);
            ptx::store_shared(to + 16 * swap, swap ? high : low);  // eight lanes meet all banks
            ptx::store_shared(to + 16 * (swap ^ 1), swap ? low : high);
        }
    }
    ptx::fence_async_shared();
}

// `target`: in lane k, the row of choice k.
__device__ __forceinline__ void store_token(const Expansion& e, u32 slot, int target) {
    const int bytes = kDecode ? 2 * e.width : e.width;
    if (target >= 0) {
        ptx::bulk_store(e.rows + static_cast<i64>(target) * bytes, slot, bytes);
        if (!kDecode)
            ptx::bulk_store(e.scales + static_cast<i64>(target) * (e.width / kBlock), slot + e.width,
                            scale_bytes(e));
    }
    ptx::bulk_commit();
}

extern "C" __global__ void __launch_bounds__(512) expand_fp8(const __grid_constant__ Expansion e) {
    const int warp = static_cast<int>(threadIdx.x) / 32, warps = e.warps,
              lane = static_cast<int>(ptx::lane_id());
    const int slot_bytes = 2 * e.width + (kDecode ? scale_bytes(e) : 0);
    u8 *shared = ptx::shared_memory(), *slots = shared + warp * kSlots * slot_bytes,
       *behind = shared + warps * kSlots * slot_bytes;
    float* scratch = reinterpret_cast<float*>(behind + 8 * kSlots * warps) + warp * (e.width / kBlock);
    const u32 full = ptx::smem_u32(behind) + 8 * kSlots * warp;
    if (lane == 0) {
        for (int i = 0; i < kSlots; ++i) ptx::mbarrier_init(full + 8 * i, 1);
        ptx::fence_barrier_init();
        ptx::fence_async_shared();
    }
    __syncwarp();
    Finder finder = {static_cast<int>(blockIdx.x) * warps + warp, e.blocks * warps, -1, 0};
    Token now = {-1, 0, false};
    int target = -1;
    for (u32 turn = 0;; ++turn) {  // the token of `turn` is asked for, that of the turn before is stored
        const u32 other = (turn + kSlots - 1) % kSlots;
        const Token next = finder.take(e);
        int next_target = -1;
        if (next.at >= 0) {
            ptx::bulk_wait_read<0>();
            __syncwarp();
            if (lane == 0)
                load_token(e, next, ptx::smem_u32(slots + turn % kSlots * slot_bytes),
                           full + 8 * (turn % kSlots));
            if (lane < e.choices) next_target = e.position[static_cast<i64>(next.at) * e.choices + lane];
        }
        if (now.at >= 0) {
            u8* row = slots + other * slot_bytes;
            const u32 slot = ptx::smem_u32(row);
            for (u32 tries = 0;
                 !ptx::mbarrier_try(full + 8 * other, ((turn - 1) / kSlots) & 1) && tries < kTries;)
                ++tries;
            if (kDecode && !now.own) decode_row(slot, row, e.width);
            if (!kDecode && now.own) quantise_row(slot, scratch, e.width);
            __syncwarp();
            store_token(e, slot, target);
        }
        if (next.at < 0) break;
        now = next;
        target = next_target;
    }
    ptx::bulk_wait<0>();
}

}  // namespace rows
