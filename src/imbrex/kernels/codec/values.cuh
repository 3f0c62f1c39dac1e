// What the codecs' kernels share: rows in and out, magnitudes, quotients.
//
// ROWS_F32: rows are float32, else bf16. A unit is kValues (4 or 8) values that one thread loads and stores
// at once.
#pragma once
#include "ptx/codec.cuh"

namespace codec {

struct alignas(16) Quad {
    u32 word[4];
};
struct alignas(8) Pair {
    u32 word[2];
};

constexpr bool kF32 = ROWS_F32;
constexpr u32 kInfinity = 0x7f800000u, kNan = 0x7fc00000u;
constexpr float kLargestOfRows = kF32 ? 0x1.fffffep127f : 0x1.fep127f;

template <int kValues>
struct Unit {
    static constexpr int kWords = kF32 ? kValues : kValues / 2;
    u32 word[kWords];

    __device__ __forceinline__ float value(int i) const {
        if (kF32) return __uint_as_float(word[i]);
        return i & 1 ? ptx::bf16_high(word[i / 2]) : ptx::bf16_low(word[i / 2]);
    }
    __device__ __forceinline__ u32 magnitude(int i) const { return __float_as_uint(value(i)) & 0x7fffffffu; }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kWords; ++i) word[i] = 0;
    }
    __device__ __forceinline__ void load(const void* row, i64 unit) {
        const u32* from = static_cast<const u32*>(row) + unit * kWords;
        if constexpr (kWords == 2) {
            const Pair p = *reinterpret_cast<const Pair*>(from);
            word[0] = p.word[0], word[1] = p.word[1];
        } else {
#pragma unroll
            for (int i = 0; i < kWords; i += 4) {
                const Quad q = *reinterpret_cast<const Quad*>(from + i);
#pragma unroll
                for (int j = 0; j < 4; ++j) word[i + j] = q.word[j];
            }
        }
    }
    __device__ __forceinline__ void set(const float (&v)[kValues]) {
#pragma unroll
        for (int i = 0; i < kWords; ++i)
            word[i] = kF32 ? __float_as_uint(v[i]) : ptx::pack_bf16(v[2 * i], v[2 * i + 1]);
    }
    __device__ __forceinline__ void store(void* row, i64 unit) const {
        u32* to = static_cast<u32*>(row) + unit * kWords;
        if constexpr (kWords == 2) {
            *reinterpret_cast<Pair*>(to) = Pair{{word[0], word[1]}};
        } else {
#pragma unroll
            for (int i = 0; i < kWords; i += 4)
                *reinterpret_cast<Quad*>(to + i) = Quad{{word[i], word[i + 1], word[i + 2], word[i + 3]}};
        }
    }
};

template <int kValues>
__device__ __forceinline__ u32 largest(const Unit<kValues>& unit) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) amax = max(amax, unit.magnitude(i));
    return amax;
}

// The largest over groups of kLanes neighbours. Bits of magnitudes grow with the magnitude, NaN and infinity
// last.
template <int kLanes>
__device__ __forceinline__ u32 group_max(u32 amax) {
    if constexpr (kLanes == 32) {
        return __reduce_max_sync(0xffffffffu, amax);
    } else {
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2)
            amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, step));
        return amax;
    }
}

// amax / kLargest; NaN where the block holds NaN or an infinity.
__device__ __forceinline__ float scale_of(u32 amax, float kLargest) {
    return amax >= kInfinity ? __uint_as_float(kNan) : __fdiv_rn(__uint_as_float(amax), kLargest);
}

// q = x / scale as rounded by a division, without one a value: with r = 1 / s rounded, q = x r and q + r (x -
// q s), both fused, is the rounded quotient (Markstein) as long as nothing underflows; tiny scales divide. 0
// where the scale is 0, infinite or not a number. kSign: a quotient of -0 stays -0.
template <bool kSign, int kValues>
__device__ __forceinline__ void divide(const Unit<kValues>& x, float scale, float (&q)[kValues]) {
    if (!(scale > 0.0f) || __float_as_uint(scale) >= kInfinity) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) q[i] = 0.0f;
    } else if (scale < 1e-30f) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) q[i] = __fdiv_rn(x.value(i), scale);
    } else {
        const float reciprocal = __frcp_rn(scale);
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            const float value = x.value(i), near = __fmul_rn(value, reciprocal);
            q[i] = __fmaf_rn(__fmaf_rn(-near, scale, value), reciprocal, near);
            if (kSign) q[i] = __uint_as_float(__float_as_uint(q[i]) | (__float_as_uint(value) & 0x80000000u));
        }
    }
}

// 1.5 * 2^23: a float of small magnitude plus this has its nearest integer, ties to even, in the low bits.
constexpr float kRounder = 12582912.0f;

__device__ __forceinline__ u32 rounded(float x, float offset = 0.0f) {
    return __float_as_uint(__fadd_rn(x, kRounder + offset));
}
__device__ __forceinline__ float clamped(float x, float most) { return fminf(fmaxf(x, -most), most); }

// Where the largest code may be too large for a row it is the largest value of rows. NaN stays NaN.
template <int kValues>
__device__ __forceinline__ void saturate(float (&v)[kValues], float scale, float largest_code) {
    if (!(scale > kLargestOfRows / (2.0f * largest_code))) return;
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = clamped(v[i], kLargestOfRows);
}

}  // namespace codec
