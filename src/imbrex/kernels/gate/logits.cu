// The two ends of a gate's product: logits of few tokens, and the sum of a gradient's halves.
//
// The logits of few tokens, float32 [T, E] of tokens [T, D] and weights [E, D] in bf16.
//
// A product of tensor cores with few rows walks along D in a chain of its steps: 5.2 us of 8 tokens and 128
// experts of 2048 values, of which reading takes 0.1. Here a block has kExperts experts and kTokens tokens,
// and its threads share D: every thread has 8 values of each in a turn, a warp adds its lanes up, the first
// threads the warps. Products are exact in float32, and sums are in a fixed order.
//
// Example, one expert, kWarps = 2, D = 512, weights 1, token 2: every thread 16, every warp 512, logit 1024.
#include "ptx/exchange.cuh"

namespace gate {

constexpr int kThreads = 256, kWarps = kThreads / 32, kExperts = 2, kTokens = 8;

__device__ __forceinline__ float across(float x, int mask) {
    return __uint_as_float(__shfl_xor_sync(0xffffffffu, static_cast<int>(__float_as_uint(x)), mask));
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
