// What ZFP's blocks of 4 and of 4 x 4 values share: fixed point and back, zfp's lifting, headers.
//
// A block's bits, the lowest of a word first: 1 if it is not all zero, the exponent of its largest magnitude
// + 127 in 8 bits, then planes of the transformed values from the top one down. 0 is a block of zeros, 1 one
// that holds NaN or an infinity.
#pragma once
#include "codec/values.cuh"

namespace codec {

constexpr u32 kNegabinary = 0xaaaaaaaau;
constexpr int kHeaderBits = 9;

struct Header {
    int exponent;
    bool coded;  // else `word` is the whole block

    // Of the largest magnitude's bits.
    __device__ explicit Header(u32 amax)
        : exponent(static_cast<int>(amax >> 23) - 126), coded(amax != 0 && amax < kInfinity) {}
    __device__ u32 word(u32 amax) const { return coded ? 1 + 2 * (exponent + 127) : amax != 0; }
};

__device__ __forceinline__ float power_of_two(int exponent) {
    return __uint_as_float(static_cast<u32>(exponent + 127) << 23);
}

template <int kSize>
__device__ __forceinline__ void fixed_point(const float (&x)[kSize], int exponent, int (&q)[kSize]) {
    if (exponent >= -97) {
        const float scale = power_of_two(30 - exponent);
#pragma unroll
        for (int i = 0; i < kSize; ++i) q[i] = static_cast<int>(__fmul_rn(x[i], scale));
    } else {  // that power is no float
        const float scale = power_of_two(-34 - exponent);
#pragma unroll
        for (int i = 0; i < kSize; ++i) q[i] = static_cast<int>(__fmul_rn(__fmul_rn(x[i], 0x1p64f), scale));
    }
}

template <int kSize>
__device__ __forceinline__ void floating_point(const u32 (&q)[kSize], int exponent, float (&x)[kSize]) {
    if (exponent >= -90 && exponent <= 125) {
        const float scale = power_of_two(exponent - 30);
#pragma unroll
        for (int i = 0; i < kSize; ++i) x[i] = __fmul_rn(static_cast<float>(static_cast<int>(q[i])), scale);
    } else {  // a subnormal result may not be rounded twice, one too large is the largest there is
        const double scale =
            exponent < 0 ? 0x1p-130 * power_of_two(exponent + 100) : 0x1p-29 * power_of_two(exponent - 1);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
            const double value = static_cast<int>(q[i]) * scale;
            x[i] = static_cast<float>(
                max(min(value, static_cast<double>(kLargestOfRows)), -static_cast<double>(kLargestOfRows)));
        }
    }
}

__device__ __forceinline__ void lift(int& x, int& y, int& z, int& w) {
    x = (x + w) >> 1, w -= x;
    z = (z + y) >> 1, y -= z;
    x = (x + z) >> 1, z -= x;
    w = (w + y) >> 1, y -= w;
    w += y >> 1, y -= w >> 1;
}

__device__ __forceinline__ int half(u32 v) { return static_cast<int>(v) >> 1; }

__device__ __forceinline__ void unlift(u32& x, u32& y, u32& z, u32& w) {
    y += half(w), w -= half(y);
    y += w, w = 2 * w - y;
    z += x, x = 2 * x - z;
    y += z, z = 2 * z - y;
    w += x, x = 2 * x - w;
}

__device__ __forceinline__ u32 to_negabinary(int v) {
    return (static_cast<u32>(v) + kNegabinary) ^ kNegabinary;
}
__device__ __forceinline__ u32 from_negabinary(u32 v) { return (v ^ kNegabinary) - kNegabinary; }

// Bits `kStep` apart change places between two words.
template <int kStep, u32 kMask>
__device__ __forceinline__ void exchange(u32& a, u32& b) {
    const u32 low = (a & kMask) | ((b & kMask) << kStep);
    b = ((a >> kStep) & kMask) | (b & ~kMask);
    a = low;
}

}  // namespace codec
