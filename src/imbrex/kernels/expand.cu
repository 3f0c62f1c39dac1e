// From rows of the fp8 codec, each received once, to bf16 expert-major rows: every token is read once, decoded, and stored at the
// row of each of its choices here. The own tokens come from `x`, as they are. A warp has 32 pieces of 16 values of one token.
//
// Example, 2 ranks, K = 1, on rank 1: recv_row [[0, -1], ..], position [[[3], [-1]], [[1], [-1]]]: received row 0 becomes row 3,
// the own token 0 row 1. Received rows begin every `pitch` bytes.
#include "ptx_exchange.cuh"

constexpr int kValues = 16;   // of a lane
constexpr int kScaled = 128;  // that share a scale
constexpr int kThreads = 256;

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
    const float scale = reinterpret_cast<const float*>(row + width)[piece * kValues / kScaled];
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
    const i64 first = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) / 32, stride = static_cast<i64>(blocks) * kThreads / 32;
    for (i64 work = first; work < static_cast<i64>(ranks) * max_tokens * parts; work += stride) {
        const int part = static_cast<int>(work % parts), source = static_cast<int>(work / parts / max_tokens);
        const int token = static_cast<int>(work / parts % max_tokens);
        if (token >= tokens[source]) continue;
        const i64 at = static_cast<i64>(source) * max_tokens + token;
        const int row = source == me ? token : recv_row[at];
        if (row < 0) continue;
        const int mine = lane < choices ? position[at * choices + lane] : -1;
        const int piece = part * 32 + lane;
        const bool inside = piece < pieces;
        Sixteen values = {};
        if (inside) {
            if (source == me)
                values = read_plain(x + static_cast<i64>(token) * 2 * width, piece);
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
    }
}
