// Rows of the fp8 codec: D bytes of e4m3, then a float32 scale for every 128 values (`imbrex.codec.fp8`, to
// the bit).
//
// scale = amax / 448, value = x / scale rounded to nearest. A block with NaN or an infinity has a NaN scale
// and zeros.
// No value needs a division: with r a little below 1 / s and c = 1 / s - r, the quotient is x r + (x c),
// fused, to the last bit; so for every bf16 amax and x (all 128 x 128 significands tried, r one to three ulps
// below), and a zero keeps its sign, c being positive. Scales near the ends of the range and unusable ones
// take the slow way, which stands apart: between the fast steps it kept them from overlapping.
//
// Example, a block of 4, 448 scaled down to 4: 1 2 -4 0 has scale 1 and stays; 2 4 -8 0 has scale 2 and gives
// the same bytes.
#pragma once
#include "ptx/exchange.cuh"

namespace fp8 {

constexpr int kBlock = 128;  // values that share a scale
constexpr float kLargest = 448.0f;
constexpr float kInverse = 1.0f / 448.0f;
constexpr u32 kLeast = 0x1780, kPlain = 0x5000;  // bf16 bits: from 2^-80 on, up to 2^80, go the fast way

// The larger magnitudes of two pairs of bf16, as bits.
__device__ __forceinline__ u32 larger(u32 amax, u32 pair) { return ptx::max_u16x2(amax, pair & 0x7fff7fffu); }

__device__ __forceinline__ u32 larger_of_four(uint4 v) {
    return larger(larger(larger(v.x & 0x7fff7fffu, v.y), v.z), v.w);
}

struct Divisor {
    float scale, reciprocal, rest;
    bool plain;  // the fast way is exact
};

// `bits` of the largest magnitude of a block. The scale is right where `plain`; else `slow_scale` has it.
__device__ __forceinline__ Divisor plain_divisor(u32 bits) {
    const float largest = __uint_as_float(bits << 16), q = largest * kInverse;
    Divisor d;
    d.plain = bits - kLeast < kPlain;
    d.scale = __fmaf_rn(-__fmaf_rn(q, kLargest, -largest), kInverse, q);
    d.reciprocal = __uint_as_float(__float_as_uint(ptx::reciprocal(d.scale)) - 2);
    d.rest = __fmaf_rn(-d.reciprocal, d.scale, 1.0f) * d.reciprocal;
    return d;
}

// A NaN that was divided would be another one.
__device__ __forceinline__ float slow_scale(u32 bits) {
    return bits >= 0x7f80 ? __uint_as_float(0x7fc00000) : __fdiv_rn(__uint_as_float(bits << 16), kLargest);
}

// `amax`: bits of the largest magnitudes of the even and the odd values of a block.
__device__ __forceinline__ Divisor divisor_of(u32 amax) {
    const u32 bits = max(amax & 0xffffu, amax >> 16);
    Divisor d = plain_divisor(bits);
    if (!d.plain) d.scale = slow_scale(bits);
    return d;
}

__device__ __forceinline__ float quotient(float x, const Divisor& d) {
    return __fmaf_rn(x, d.reciprocal, x * d.rest);
}

__device__ __forceinline__ float slow_quotient(float x, const Divisor& d) {
    return d.scale > 0.0f ? __fdiv_rn(x, d.scale) : 0.0f;
}

template <bool kPlain>
__device__ __forceinline__ u32 four_values(u32 first, u32 second, const Divisor& d) {
    const float x[4] = {ptx::bf16_low(first), ptx::bf16_high(first), ptx::bf16_low(second),
                        ptx::bf16_high(second)};
    float q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = kPlain ? quotient(x[i], d) : slow_quotient(x[i], d);
    return ptx::pack_e4m3(q[0], q[1]) | ptx::pack_e4m3(q[2], q[3]) << 16;
}

template <bool kPlain>
__device__ __forceinline__ uint2 eight_values(uint4 v, const Divisor& d) {
    return {four_values<kPlain>(v.x, v.y, d), four_values<kPlain>(v.z, v.w, d)};
}

// Eight bf16 to eight e4m3; `plain` in all lanes alike: whether all of their divisors are.
__device__ __forceinline__ uint2 eight_values(uint4 v, const Divisor& d, bool plain) {
    return plain ? eight_values<true>(v, d) : eight_values<false>(v, d);
}

}  // namespace fp8
