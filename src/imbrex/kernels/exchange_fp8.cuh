// Rows of the fp8 codec: D bytes of e4m3, then a float32 scale for every 128 values (`imbrex.codec.fp8`, to the bit).
//
// scale = amax / 448, value = x / scale rounded to nearest. A block with NaN or an infinity has a NaN scale and zeros. The
// quotient is exact without a division per value: with the rounded reciprocal r of s, q = x r and q + r (x - q s), both fused, is
// the rounded quotient (Markstein), as long as nothing underflows; tiny scales divide.
//
// Example, a block of 4, 448 scaled down to 4: 1 2 -4 0 has scale 1 and stays; 2 4 -8 0 has scale 2 and gives the same bytes.
#pragma once
#include "ptx_exchange.cuh"

constexpr int kBlock = 128;   // values that share a scale
constexpr float kLargest = 448.0f;

__device__ __forceinline__ u32 larger(u32 amax, u32 pair) {
    const u32 low = pair & 0x7fff, high = pair >> 16 & 0x7fff;
    return max(amax, max(low, high));
}

// The scale of a block from the bits of its largest magnitude, as bf16.
__device__ __forceinline__ float scale_of(u32 amax) {
    return amax >= 0x7f80 ? __uint_as_float(0x7fc00000) : __fdiv_rn(__uint_as_float(amax << 16), kLargest);
}

struct Divisor {
    float scale, reciprocal;
    bool usable, tiny;
};

__device__ __forceinline__ Divisor divisor_of(float scale) {
    Divisor d;
    d.scale = scale;
    d.usable = scale > 0.0f;
    d.tiny = scale < 1e-30f;
    d.reciprocal = d.usable && !d.tiny ? __frcp_rn(scale) : 0.0f;
    return d;
}

__device__ __forceinline__ float quotient(float x, const Divisor& d) {
    if (d.tiny) return d.usable ? __fdiv_rn(x, d.scale) : 0.0f;
    const float q = x * d.reciprocal;
    if (!d.usable) return 0.0f;
    return q == 0.0f ? q : __fmaf_rn(__fmaf_rn(-q, d.scale, x), d.reciprocal, q);  // keeps the sign of a zero
}

__device__ __forceinline__ u32 four_values(u32 first, u32 second, const Divisor& d) {
    const u32 low = ptx::pack_e4m3(quotient(ptx::bf16_low(first), d), quotient(ptx::bf16_high(first), d));
    return low | ptx::pack_e4m3(quotient(ptx::bf16_low(second), d), quotient(ptx::bf16_high(second), d)) << 16;
}
