// Rows brought to expert order beside a product, by warps that have nothing else to do, and what the product
// waits for.
//
// A ticket is kTicket rows, drawn in the order in which tiles are drawn. Of a ticket, a warp takes the rows
// that are the lowest of their token here: it loads the token once, from the peer that staged it or from the
// own tokens, stores it at all its rows, and then counts every one of them. A counter counts 128 rows of the
// whole buffer, whatever the tiles: a tile of 128 rows needs at most two, one of 192 three, and movers find
// theirs by a shift.
//
//   mover      wait for the token's flag | load | store at its rows | fence | add 1 for every row
//   producer   weights of the first steps | poll one to three counters | fence | rows
//
// Invariants:
//   A mover waits for nothing but peers' staging, which is a launch before: one resident block can bring all
//     rows, and no product is needed for another's rows.
//   Every row is stored once and counted once. Choices that were dropped have no row.
//   A mover whose peer fails stores NaN from then on, and counts all the same: the counters get full, the
//     product ends, and the status says whose tokens did not come.
//   Rows have the bits and places that exchange/pull.cu gives them.
//
// Example, K = 2: a token whose rows here are 3 and 200 is brought by whoever draws row 3, who adds 1 to
// counters 0 and 1. Of 210 rows counter 0 is full at 128, counter 1 at 82.
#pragma once
#include "peers/protocol.cuh"
#include "gemm/load.cuh"

namespace fused {

using exchange::Call;
using exchange::Group;

constexpr int kTicket = 4, kPerRow = 32 / kTicket;  // rows; lanes that look for the token of one
constexpr int kCounted = 128;
#ifndef WIRE_FP8
#define WIRE_FP8 0
#endif

constexpr bool kDecodes = WIRE_FP8;  // what peers have staged
#ifndef WORDS
#define WORDS (WIRE_FP8 ? 6 : 8)
#endif
constexpr int kWords = WORDS;  // of 16 bytes that a lane has in flight; 8 and decoding spill

// Rows that peers staged in fp8 are decoded on their way; the own ones never were coded.
//
// By value. The host reads it: `kernels.structs`.
struct Rows {
    const u8* x;          // own tokens
    u8* out;              // [room, row_bytes], expert-major
    const int* token;     // [room]; rank * max_tokens + token of every row
    const int* position;  // [W, max_tokens, K]; row of every choice of every rank's tokens here, -1: not here
    const int* totals;    // the first: how many rows there are
    u32* there;           // rows of every kCounted that have come
    i64 staged_at;        // offset in a heap, of the buffer that tokens are staged in
    int room;
    int max_tokens;
    int choices;
    int row_bytes;
    int pitch;   // bytes from one row of a peer to the next, where they are staged in fp8
    int blocks;  // the first ones, whose idle warps move: all but where a fixed split is asked for
    int* own;    // [experts, 2] to be filled (fused/own_rows.cuh), or null
    u32* bounds;  // how many of them are known
};

// The call that staged the tokens, a launch before, as one of this rank's launch. Made of what is constant,
// so that it needs no registers but for its number.
__device__ __forceinline__ Call call_of(const Group& group) {
    exchange::Control* own = exchange::control_of(group, group.first);
    return {&group, own, exchange::kPull, group.first, 0, static_cast<int>(blockIdx.x), group.blocks,
            ptx::load_relaxed_sys(&own->epoch[exchange::kPull])};
}

__device__ __forceinline__ int count_rows(const Rows& rows) {
    return gemm::least(rows.totals[0], rows.room);
}

// The token of row `from` + lane / kPerRow where that is its lowest row here, else -1; the same in the
// kPerRow lanes of a row.
__device__ __forceinline__ int token_of(const Rows& rows, int from, int count) {
    const int lane = static_cast<int>(ptx::lane_id()), row = from + lane / kPerRow;
    const int token = row < count ? rows.token[row] : -1;
    int lowest = row;
    for (int k = lane % kPerRow; token >= 0 && k < rows.choices; k += kPerRow) {
        const int at = rows.position[static_cast<i64>(token) * rows.choices + k];
        if (at >= 0 && at < lowest) lowest = at;
    }
    u32 first = __ballot_sync(~0u, lowest == row);
    first >>= lane / kPerRow * kPerRow;
    constexpr u32 kAll = kPerRow == 32 ? ~0u : (1u << kPerRow % 32) - 1;
    return token >= 0 && (first & kAll) == kAll ? token : -1;
}

// All lanes; false after the time-out or any failure. Lanes that have no token ask for nothing.
__device__ __forceinline__ bool wait_staged(const Call& call, const Rows& rows, int token) {
    const Group& group = *call.group;
    bool fine = true;
    const int source = token / rows.max_tokens;
    if (token >= 0 && source != call.me)
        fine = wait_flag(call,
                         flag_of(group, group.staged_flags, call.me, source,
                                 token % rows.max_tokens / (32 / group.ranks)),
                         call.epoch, exchange::kRowsStaged, source);
    return __all_sync(~0u, fine);
}

__device__ __forceinline__ u32 decode_pair(u32 bytes, float scale) {
    float low, high;
    ptx::unpack_e4m3(bytes & 0xffff, low, high);
    return ptx::pack_bf16(__fmul_rn(low, scale), __fmul_rn(high, scale));
}

// kWords words of a row, 512 bytes apart, of which `left` and more are not there. One address for all.
template <int kAt = 0>
__device__ __forceinline__ void load_words(uint4 (&value)[kWords], const u8* from, int left) {
    if constexpr (kAt < kWords) {
        value[kAt] = ptx::load_once<512 * kAt>(from, 32 * kAt < left);
        load_words<kAt + 1>(value, from, left);
    }
}

// The same of a row of the fp8 codec, whose words are half as long; decoded as rows/expand.cu does. One lane
// loads the scale of 128 values for all that have them. `word`: the lane's first, of `words`.
__device__ __forceinline__ void load_coded(uint4 (&value)[kWords], const u8* from, int word, int words) {
    const int lane = static_cast<int>(ptx::lane_id());
#pragma unroll
    for (int u = 0; u < kWords; ++u) {
        const u64* at = reinterpret_cast<const u64*>(from) + word + 32 * u;
        const u64 bytes = word + 32 * u < words ? ptx::load_relaxed_sys(at) : 0;
        value[u].x = static_cast<u32>(bytes), value[u].y = static_cast<u32>(bytes >> 32);
    }
    const int block = (word - lane) / 16 + lane;
    const bool wanted = lane < 2 * kWords && 16 * block < words;
    const u32* scales = reinterpret_cast<const u32*>(from + 8 * words);
    const u32 scale = wanted ? ptx::load_relaxed_sys(scales + block) : 0;
#pragma unroll
    for (int u = 0; u < kWords; ++u) {
        const float mine = __uint_as_float(__shfl_sync(~0u, scale, 2 * u + lane / 16));
        const u32 low = value[u].x, high = value[u].y;
        value[u] = {decode_pair(low, mine), decode_pair(low >> 16, mine), decode_pair(high, mine),
                    decode_pair(high >> 16, mine)};
    }
}

// A token to all its rows here; `mine`: the row of this lane's choice.
__device__ __forceinline__ void bring(const Call& call, const Rows& rows, int token, int mine) {
    const int source = token / rows.max_tokens, words = rows.row_bytes / 16;
    const bool coded = kDecodes && source != call.me;
    const u8* from = (source == call.me ? rows.x : call.group->heap[source] + rows.staged_at) +
                     static_cast<i64>(token % rows.max_tokens) * (coded ? rows.pitch : rows.row_bytes);
    const u32 wanted = __ballot_sync(~0u, mine >= 0);
    const int lane = static_cast<int>(ptx::lane_id());
#pragma unroll 1
    for (int word = lane; word - lane < words; word += 32 * kWords) {
        uint4 value[kWords];
        if (coded)
            load_coded(value, from, word, words);
        else
            load_words(value, from + 16 * static_cast<i64>(word), words - word);
#pragma unroll 1
        for (u32 to = wanted; to; to &= to - 1) {
            const int row = __shfl_sync(~0u, mine, __ffs(to) - 1);
            uint4* target =
                reinterpret_cast<uint4*>(rows.out + static_cast<i64>(row) * rows.row_bytes) + word;
#pragma unroll
            for (int u = 0; u < kWords; ++u)
                if (word + 32 * u < words) target[32 * u] = value[u];
        }
    }
}

// NaN to this lane's row.
__device__ __forceinline__ void spoil(const Rows& rows, int mine) {
    u32* target = reinterpret_cast<u32*>(rows.out + static_cast<i64>(mine) * rows.row_bytes);
#pragma unroll 1
    for (int i = 0; mine >= 0 && i < rows.row_bytes / 4; ++i) target[i] = ~0u;
}

// What idle warps do: `gemm::run`'s `beside`.
struct Bring {
    const Group& group;
    const Rows& rows;

    __device__ __forceinline__ void operator()() const {
        const Call call = call_of(group);
        const int lane = static_cast<int>(ptx::lane_id());
        if (static_cast<int>(blockIdx.x) >= rows.blocks) return;
        for (;;) {
            const int count = count_rows(rows);  // again, not to keep it
            const int drawn = lane == 0 ? static_cast<int>(atomicAdd(&call.own->drawn[call.kind][0], 1u)) : 0;
            const int from = __shfl_sync(~0u, drawn, 0) * kTicket;
            if (from >= count) return;
            const int own = token_of(rows, from, count);
            const bool fine = wait_staged(call, rows, own);
            const u32 live = __ballot_sync(~0u, own >= 0 && lane % kPerRow == 0);
            const auto each = [&](auto what) {
#pragma unroll 1
                for (u32 left = live; left; left &= left - 1) {
                    const int token = __shfl_sync(~0u, own, __ffs(left) - 1);
                    what(token, lane < rows.choices
                                    ? rows.position[static_cast<i64>(token) * rows.choices + lane]
                                    : -1);
                }
            };
            if (fine)
                each([&](int token, int mine) { bring(call, rows, token, mine); });
            else
                each([&](int, int mine) { spoil(rows, mine); });
            ptx::fence_gpu();
            __syncwarp();
            each([&](int, int mine) {
                if (mine >= 0) ptx::add_relaxed_gpu(rows.there + mine / kCounted, 1);
            });
        }
    }
};

// What the producer waits for: `gemm::run`'s `ready`. Rows of a tall tile may be three counters'. Movers end
// in bounded time, so this limit is one for a broken kernel only; the tile is computed all the same.
template <int kBlockM>
struct Come {
    static constexpr bool kWaits = true;
    static constexpr int kAhead = gemm::kPeek;
    static constexpr u32 kPatience = 1u << 28;  // who multiplies waits for the movers, and theirs ends first
    const Group& group;
    const Rows& rows;
    u32* status;

    __device__ __forceinline__ bool are_there(int block) const {
        const int due = gemm::least(kCounted, count_rows(rows) - kCounted * block);
        return static_cast<int>(ptx::load_acquire_gpu(rows.there + block)) >= due;
    }

    __device__ __forceinline__ bool are_there(int first, int last) const {
        if (kBlockM > kCounted && last > first + 1 && !are_there(first + 1)) return false;
        return are_there(first) && are_there(last);
    }

    __device__ __forceinline__ void operator()(const gemm::Tile& tile) const {
        const int first = tile.row / kCounted,
                  last = (tile.row + gemm::least(tile.rows, kBlockM) - 1) / kCounted;
        if (!are_there(first, last)) {
            const u64 begin = ptx::global_timer();
            while (!are_there(first, last)) {
                if (ptx::global_timer() - begin > 4 * group.timeout_ns) {
                    *status = 1;
                    break;
                }
                ptx::pause();
            }
        }
        ptx::fence_async();
    }
};

}  // namespace fused
