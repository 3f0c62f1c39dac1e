// From rows of the fp8 codec, each received once, to expert-major rows: every token is read once and stored at the row of each of its
// choices here, decoded to bf16 (`expand_fp8`), or as it is, bytes and scales apart (`expand_fp8_rows`). The own tokens come from `x`,
// as they are, or written as the codec writes the others. A warp has 32 or 128 pieces of 16 values of one token.
//
// Example, 2 ranks, K = 1, on rank 1: recv_row [[0, -1], ..], position [[[3], [-1]], [[1], [-1]]]: received row 0 becomes row 3,
// the own token 0 row 1. Received rows begin every `pitch` bytes.
#include "exchange_fp8.cuh"

constexpr int kValues = 16;  // of a lane
constexpr int kScaled = kBlock / kValues;  // lanes that share a scale
constexpr int kThreads = 256;
constexpr int kPieces = 4;  // that a lane of `expand_fp8_rows` has under way

// What the routing kernel says of the tokens that have a row here.
struct Tokens {
    const int *position, *recv_row, *tokens;
    int ranks, me, max_tokens, choices;
};

// take(own, row, part, target): for every part of every such token, all lanes of a warp; `row` of `x` where `own`, else a compact one;
// `target`: in lane k, the row of choice k, -1: not here.
template <class Take>
__device__ __forceinline__ void for_parts(const Tokens& of, int parts, int blocks, Take&& take) {
    const int lane = static_cast<int>(ptx::lane_id());
    const i64 first = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) / 32, stride = static_cast<i64>(blocks) * kThreads / 32;
    for (i64 work = first; work < static_cast<i64>(of.ranks) * of.max_tokens * parts; work += stride) {
        const int part = static_cast<int>(work % parts), source = static_cast<int>(work / parts / of.max_tokens);
        const int token = static_cast<int>(work / parts % of.max_tokens);
        if (token >= of.tokens[source]) continue;
        const i64 at = static_cast<i64>(source) * of.max_tokens + token;
        const bool own = source == of.me;
        const int row = own ? token : of.recv_row[at];
        if (row < 0) continue;
        take(own, row, part, lane < of.choices ? of.position[at * of.choices + lane] : -1);
    }
}

struct Sixteen {
    uint4 low, high;
};

__device__ __forceinline__ u32 decode_pair(u32 bytes, float scale) {
    float low, high;
    ptx::unpack_e4m3(bytes & 0xffff, low, high);
    return ptx::pack_bf16(__fmul_rn(low, scale), __fmul_rn(high, scale));
}

__device__ __forceinline__ Sixteen read_coded(const u8* row, int width, int piece) {
    const uint4 bytes = *reinterpret_cast<const uint4*>(row + kValues * piece);
    const float scale = reinterpret_cast<const float*>(row + width)[piece / kScaled];
    const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    u32 pairs[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[2 * i] = decode_pair(words[i], scale);
        pairs[2 * i + 1] = decode_pair(words[i] >> 16, scale);
    }
    return {{pairs[0], pairs[1], pairs[2], pairs[3]}, {pairs[4], pairs[5], pairs[6], pairs[7]}};
}

__device__ __forceinline__ Sixteen read_plain(const u8* row, int piece) {
    const uint4* from = reinterpret_cast<const uint4*>(row + 2 * kValues * piece);
    return {from[0], from[1]};
}

extern "C" __global__ void __launch_bounds__(kThreads)
    expand_fp8(const u8* received, const u8* x, const int* position, const int* recv_row, const int* tokens, int ranks, int me,
               int max_tokens, int choices, int width, int pitch, u8* rows, int blocks) {
    const int lane = static_cast<int>(ptx::lane_id()), pieces = width / kValues, parts = (pieces + 31) / 32;
    for_parts({position, recv_row, tokens, ranks, me, max_tokens, choices}, parts, blocks, [=](bool own, int row, int part, int mine) {
        const int piece = part * 32 + lane;
        const bool inside = piece < pieces;
        Sixteen values = {};
        if (inside) {
            if (own)
                values = read_plain(x + static_cast<i64>(row) * 2 * width, piece);
            else
                values = read_coded(received + static_cast<i64>(row) * pitch, width, piece);
        }
        for (int k = 0; k < choices; ++k) {
            const int target = __shfl_sync(0xffffffffu, mine, k);
            if (target < 0 || !inside) continue;
            uint4* to = reinterpret_cast<uint4*>(rows + (static_cast<i64>(target) * width + kValues * piece) * 2);
            to[0] = values.low;
            to[1] = values.high;
        }
    });
}

// A piece of 16 e4m3 values, and the scale of its block.
struct Coded {
    uint4 bytes;
    float scale;
};

// By all lanes, of which kScaled side by side have a block.
__device__ __forceinline__ Coded quantise(const Sixteen& values) {
    u32 amax = larger(larger_of_four(values.low), larger_of_four(values.high));
#pragma unroll
    for (int step = 1; step < kScaled; step *= 2) amax = ptx::max_u16x2(amax, __shfl_xor_sync(0xffffffffu, amax, step));
    const Divisor d = divisor_of(amax);
    const bool plain = __all_sync(0xffffffffu, d.plain);
    const uint2 low = eight_values(values.low, d, plain), high = eight_values(values.high, d, plain);
    return {{low.x, low.y, high.x, high.y}, d.scale};
}

extern "C" __global__ void __launch_bounds__(kThreads)
    expand_fp8_rows(const u8* received, const u8* x, const int* position, const int* recv_row, const int* tokens, int ranks, int me,
                    int max_tokens, int choices, int width, int pitch, u8* rows, float* scales, int blocks) {
    const int lane = static_cast<int>(ptx::lane_id()), pieces = width / kValues, parts = (pieces + 32 * kPieces - 1) / (32 * kPieces);
    for_parts({position, recv_row, tokens, ranks, me, max_tokens, choices}, parts, blocks, [=](bool own, int row, int part, int mine) {
        const int first = part * 32 * kPieces + lane;
        int piece[kPieces];  // the last one again where there are no more
        Coded held[kPieces];
#pragma unroll
        for (int i = 0; i < kPieces; ++i) piece[i] = first + 32 * i < pieces ? first + 32 * i : pieces - 1;
        if (own) {
            Sixteen values[kPieces];
#pragma unroll
            for (int i = 0; i < kPieces; ++i) values[i] = read_plain(x + static_cast<i64>(row) * 2 * width, piece[i]);
#pragma unroll
            for (int i = 0; i < kPieces; ++i) held[i] = quantise(values[i]);
        } else {
            const u8* from = received + static_cast<i64>(row) * pitch;
#pragma unroll
            for (int i = 0; i < kPieces; ++i)
                held[i] = {*reinterpret_cast<const uint4*>(from + kValues * piece[i]),
                           reinterpret_cast<const float*>(from + width)[piece[i] / kScaled]};
        }
        for (int k = 0; k < choices; ++k) {
            const int target = __shfl_sync(0xffffffffu, mine, k);
            if (target < 0) continue;
            u8* to = rows + static_cast<i64>(target) * width;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                if (first + 32 * i >= pieces) continue;
                *reinterpret_cast<uint4*>(to + kValues * piece[i]) = held[i].bytes;
                if (lane % kScaled == 0) scales[static_cast<i64>(target) * (pieces / kScaled) + piece[i] / kScaled] = held[i].scale;
            }
        }
    });
}
