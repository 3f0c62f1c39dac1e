// The two ends of a gate's product: logits of a small batch, and the sum of a gradient's halves.
//
// The logits, float32 [T, E] of tokens [T, D] and weights [E, D] in bf16.
//
// A library's product of so few rows walks along D in a chain of its steps: 5.2 us of 8 tokens and 128
// experts of 2048 values, of which reading takes 0.1. Here the warps of a block share D, and the first
// threads add up what they have found. Products are exact in float32, and sums are in a fixed order.
//
// Few tokens: a block has kExperts experts and kTokens tokens; every thread has 8 values of each in a turn,
// and a warp adds its lanes up. Example, one expert, kWarps = 2, D = 512, weights 1, token 2: every thread 16,
// every warp 512, logit 1024.
//
// More tokens: a block has a square of kSide of each for tensor cores. A lane loads 16 bytes of two tokens and
// of two experts in a turn. These are no 16 neighbouring values of a sum, as the instruction has them, but the
// same ones of both operands.
#include "ptx/mma.cuh"

namespace gate {

constexpr int kThreads = 256, kWarps = kThreads / 32, kExperts = 2, kTokens = 8;
constexpr int kSide = 16, kTurns = 4;  // turns whose loads are under way together

__device__ __forceinline__ float across(float x, int mask) {
    return __uint_as_float(__shfl_xor_sync(0xffffffffu, __float_as_uint(x), mask));
}

__device__ __forceinline__ void add_products(u32 a, u32 b, float& sum) {
    sum = fmaf(ptx::bf16_low(a), ptx::bf16_low(b), sum);
    sum = fmaf(ptx::bf16_high(a), ptx::bf16_high(b), sum);
}

// Of eight values.
__device__ __forceinline__ void add_products(const uint4& a, const uint4& b, float& sum) {
    add_products(a.x, b.x, sum), add_products(a.y, b.y, sum);
    add_products(a.z, b.z, sum), add_products(a.w, b.w, sum);
}

// units: D / 8.
extern "C" __global__ void __launch_bounds__(kThreads)
    logits_of_few(const uint4* x, const uint4* weight, int tokens, int experts, int units, float* logits) {
    float* parts = reinterpret_cast<float*>(ptx::shared_memory());  // [kWarps][kExperts][kTokens]
    const int blocks_e = (experts + kExperts - 1) / kExperts, thread = static_cast<int>(threadIdx.x);
    const int first_e = static_cast<int>(blockIdx.x) % blocks_e * kExperts;
    const int first_t = static_cast<int>(blockIdx.x) / blocks_e * kTokens;
    float sum[kExperts][kTokens] = {};
    ptx::wait_for_launches();
    ptx::launch_dependents();
    for (int unit = thread; unit < units; unit += kThreads) {
        uint4 w[kExperts], v[kTokens];
#pragma unroll
        for (int e = 0; e < kExperts; ++e)
            w[e] = weight[static_cast<i64>(min(first_e + e, experts - 1)) * units + unit];
#pragma unroll
        for (int t = 0; t < kTokens; ++t)
            v[t] = x[static_cast<i64>(min(first_t + t, tokens - 1)) * units + unit];
#pragma unroll
        for (int e = 0; e < kExperts; ++e)
#pragma unroll
            for (int t = 0; t < kTokens; ++t) add_products(w[e], v[t], sum[e][t]);
    }
#pragma unroll
    for (int e = 0; e < kExperts; ++e)
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            float all = sum[e][t];
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) all += across(all, offset);
            if (thread % 32 == 0) parts[(thread / 32 * kExperts + e) * kTokens + t] = all;
        }
    __syncthreads();
    if (thread >= kExperts * kTokens) return;
    const int expert = first_e + thread / kTokens, token = first_t + thread % kTokens;
    if (expert >= experts || token >= tokens) return;
    float all = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) all += parts[warp * kExperts * kTokens + thread];
    logits[static_cast<i64>(token) * experts + expert] = all;
}

// units: D / 8.
extern "C" __global__ void __launch_bounds__(kThreads)
    logits_of_some(const uint4* x, const uint4* weight, int tokens, int experts, int units, float* logits) {
    float* parts = reinterpret_cast<float*>(ptx::shared_memory());  // [kWarps][kSide][kSide]
    const int blocks_e = (experts + kSide - 1) / kSide, thread = static_cast<int>(threadIdx.x);
    const int first_e = static_cast<int>(blockIdx.x) % blocks_e * kSide;
    const int first_t = static_cast<int>(blockIdx.x) / blocks_e * kSide;
    const int warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    const uint4* rows[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        rows[i] = x + static_cast<i64>(min(first_t + g + 8 * i, tokens - 1)) * units;
        rows[2 + i] = weight + static_cast<i64>(min(first_e + g + 8 * i, experts - 1)) * units;
    }
    float d[2][4] = {};
    ptx::wait_for_launches();
    ptx::launch_dependents();
    for (int first = 4 * warp + t; first - t < units; first += 4 * kWarps * kTurns) {
        uint4 v[kTurns][4];
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int unit = first + 4 * kWarps * turn;
                v[turn][i] = unit < units ? rows[i][unit] : uint4{0, 0, 0, 0};
            }
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
            const uint4 a = v[turn][0], b = v[turn][1];
            const u32 low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 w = v[turn][2 + i];
                ptx::mma_bf16(d[i], low, w.x, w.y), ptx::mma_bf16(d[i], high, w.z, w.w);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            parts[(warp * kSide + g + j / 2 * 8) * kSide + 8 * i + 2 * t + j % 2] = d[i][j];
    __syncthreads();
    const int token = first_t + thread / kSide, expert = first_e + thread % kSide;
    if (token >= tokens || expert >= experts) return;
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) all += parts[i * kSide * kSide + thread];
    logits[static_cast<i64>(token) * experts + expert] = all;
}

__device__ __forceinline__ u32 add_pairs(u32 a, u32 b, u32 other_a, u32 other_b) {
    return ptx::pack_bf16(__uint_as_float(a) + __uint_as_float(other_a),
                          __uint_as_float(b) + __uint_as_float(other_b));
}

// out [4 units], bf16: the sums of the halves of float32 numbers [2, 4 units], a unit a thread. 1 and 2: 3.
extern "C" __global__ void __launch_bounds__(kThreads)
    add_halves(const uint4* halves, int units, uint2* out) {
    const int unit = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    if (unit >= units) return;
    const uint4 a = halves[unit], b = halves[units + unit];
    uint2 sum;
    sum.x = add_pairs(a.x, a.y, b.x, b.y), sum.y = add_pairs(a.z, a.w, b.z, b.w);
    out[unit] = sum;
}

}  // namespace gate
