// The block codecs, one struct each: how a unit of values becomes bytes, and bytes values. To the bit what
// `imbrex.codec` writes.
//
// kValues: of a unit. kLanes: threads whose units share a scale; 0 is the whole row. kRowScale: a scale of
// the row is needed.
// An encoded row: the values' bytes, then the blocks' scales, then the row's scale.
#pragma once
#include "codec/values.cuh"

namespace codec {

__device__ __forceinline__ u32 four_bytes(u32 a, u32 b, u32 c, u32 d) {
    return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | d << 24;
}

// {1, -2, 0.4, 127}: scale 1, bytes 01 fe 00 7f.
template <int kBlock>
struct Int8 {
    static constexpr int kValues = 4, kLanes = kBlock / kValues;
    static constexpr bool kRowScale = kBlock == 0;

    __device__ static int scales_at(int width) { return width; }
    __device__ static float row_scale(u32 amax) { return scale_of(amax, 127.0f); }
    __device__ static void encode(const Unit<4>& x, u32 amax, float row_scale, u8* row, int unit, int width,
                                  bool first) {
        const float scale = kRowScale ? row_scale : scale_of(amax, 127.0f);
        float q[4];
        divide<false>(x, scale, q);
        u32 bits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) bits[i] = rounded(clamped(q[i], 127.0f));
        reinterpret_cast<u32*>(row)[unit] = four_bytes(bits[0], bits[1], bits[2], bits[3]);
        if (first) reinterpret_cast<float*>(row + width)[kRowScale ? 0 : unit / max(kLanes, 1)] = scale;
    }
    __device__ static void decode(const u8* row, int unit, int width, float (&v)[4]) {
        const float scale =
            reinterpret_cast<const float*>(row + width)[kRowScale ? 0 : unit / max(kLanes, 1)];
        const u32 bytes = reinterpret_cast<const u32*>(row)[unit];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            v[i] = __fmul_rn(static_cast<float>(static_cast<signed char>(bytes >> 8 * i)), scale);
        saturate(v, scale, 127.0f);
    }
};

// e4m3: {448, 1, -0.3, 0}: scale 1, and -0.3 is -0.3125.
template <bool kE5m2>
struct Fp8 {
    static constexpr int kValues = 4, kLanes = 32;
    static constexpr bool kRowScale = false;
    static constexpr float kLargest = kE5m2 ? 57344.0f : 448.0f;

    __device__ static float row_scale(u32) { return 0.0f; }
    __device__ static u32 pack(float low, float high) {
        low = clamped(low, kLargest), high = clamped(high, kLargest);
        return kE5m2 ? ptx::pack_e5m2(low, high) : ptx::pack_e4m3(low, high);
    }
    __device__ static void encode(const Unit<4>& x, u32 amax, float, u8* row, int unit, int width,
                                  bool first) {
        const float scale = scale_of(amax, kLargest);
        float q[4];
        divide<true>(x, scale, q);
        reinterpret_cast<u32*>(row)[unit] = pack(q[0], q[1]) | pack(q[2], q[3]) << 16;
        if (first) reinterpret_cast<float*>(row + width)[unit / kLanes] = scale;
    }
    __device__ static void decode(const u8* row, int unit, int width, float (&v)[4]) {
        const float scale = reinterpret_cast<const float*>(row + width)[unit / kLanes];
        const u32 bytes = reinterpret_cast<const u32*>(row)[unit];
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            if (kE5m2)
                ptx::unpack_e5m2(bytes >> 8 * i & 0xffff, v[i], v[i + 1]);
            else
                ptx::unpack_e4m3(bytes >> 8 * i & 0xffff, v[i], v[i + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = __fmul_rn(v[i], scale);
        saturate(v, scale, kLargest);
    }
};

// Eight or four nibbles.
template <int kCount>
struct Packed {
    using Word = u32;
};
template <>
struct Packed<4> {
    using Word = u16;
};

// {7, -1, ...}: scale 1, nibbles 15 and 7, the even value in the low half.
template <int kCount>
struct Int4 {
    using Word = typename Packed<kCount>::Word;
    static constexpr int kValues = kCount, kLanes = 32 / kCount;
    static constexpr bool kRowScale = false;

    __device__ static float row_scale(u32) { return 0.0f; }
    __device__ static void encode(const Unit<kCount>& x, u32 amax, float, u8* row, int unit, int width,
                                  bool first) {
        // Rounded up to bfloat16, so that 7 steps reach the largest value.
        const u32 up = (__float_as_uint(scale_of(amax, 7.0f)) + 0xffff) >> 16;
        float q[kCount];
        divide<false>(x, __uint_as_float(up << 16), q);
        u32 packed = 0;
#pragma unroll
        for (int i = 0; i < kCount; ++i) packed |= (rounded(clamped(q[i], 7.0f), 8.0f) & 15) << 4 * i;
        reinterpret_cast<Word*>(row)[unit] = static_cast<Word>(packed);
        if (first) reinterpret_cast<u16*>(row + width / 2)[unit / kLanes] = static_cast<u16>(up);
    }
    __device__ static void decode(const u8* row, int unit, int width, float (&v)[kCount]) {
        const float scale = __uint_as_float(
            static_cast<u32>(reinterpret_cast<const u16*>(row + width / 2)[unit / kLanes]) << 16);
        const u32 packed = reinterpret_cast<const Word*>(row)[unit];
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            v[i] = __fmul_rn(static_cast<float>(static_cast<int>(packed >> 4 * i & 15) - 8), scale);
        saturate(v, scale, 7.0f);
    }
};

// {6, -0.5, 2.5, 0} of a row whose largest is 2688: scales 1 and 1, nibbles 7, 9, 4 (a tie, to even), 0.
template <int kCount>
struct Nvfp4 {
    using Word = typename Packed<kCount>::Word;
    static constexpr int kValues = kCount, kLanes = 16 / kCount;
    static constexpr bool kRowScale = true;

    __device__ static float row_scale(u32 amax) { return scale_of(amax, 2688.0f); }
    __device__ static float e4m3(u32 byte) {
        float low, high;
        ptx::unpack_e4m3(byte, low, high);
        return low;
    }
    // The steps double at 2 and at 4: each third of the line rounds on its own grid, and the true code is the
    // least of the three.
    __device__ static u32 code(float q) {
        const float x = fabsf(q);
        const u32 fine = __float_as_uint(__fmaf_rn(x, 2.0f, kRounder)), middle = rounded(x, 2.0f);
        const u32 coarse = __float_as_uint(__fmaf_rn(x, 0.5f, kRounder + 4.0f)),
                  most = __float_as_uint(kRounder + 7.0f);
        return (min(min(fine, middle), min(coarse, most)) & 7) | (q < 0.0f ? 8 : 0);
    }
    __device__ static void encode(const Unit<kCount>& x, u32 amax, float row_scale, u8* row, int unit,
                                  int width, bool first) {
        const bool usable = row_scale > 0.0f && __float_as_uint(row_scale) < kInfinity;
        const float wanted = usable ? __fdiv_rn(scale_of(amax, 6.0f), row_scale) : 0.0f;
        const u32 scale = ptx::pack_e4m3(clamped(wanted, 448.0f), 0.0f) & 255;
        float q[kCount];
        divide<false>(x, __fmul_rn(e4m3(scale), row_scale), q);
        u32 packed = 0;
#pragma unroll
        for (int i = 0; i < kCount; ++i) packed |= code(q[i]) << 4 * i;
        reinterpret_cast<Word*>(row)[unit] = static_cast<Word>(packed);
        if (first) row[width / 2 + unit / kLanes] = static_cast<u8>(scale);
        if (unit == 0) *reinterpret_cast<float*>(row + width / 2 + width / 16) = row_scale;
    }
    __device__ static void decode(const u8* row, int unit, int width, float (&v)[kCount]) {
        const float whole = *reinterpret_cast<const float*>(row + width / 2 + width / 16);
        const float scale = __fmul_rn(e4m3(row[width / 2 + unit / kLanes]), whole);
        const u32 packed = reinterpret_cast<const Word*>(row)[unit];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            // Two bits of exponent and one of mantissa, put where a float32 has them: too small by 2^126.
            const u32 nibble = packed >> 4 * i, bits = (nibble & 7) << 22 | (nibble & 8) << 28;
            v[i] = __fmul_rn(__fmul_rn(__uint_as_float(bits), 0x1p126f), scale);
        }
        saturate(v, scale, 6.0f);
    }
};

// {1e6, -0.1}: as float16 65504 and -0.0999755859375.
template <bool kHalf>
struct Cast {
    static constexpr int kValues = 4, kLanes = 0;
    static constexpr bool kRowScale = false;
    static constexpr float kLargest = kHalf ? 65504.0f : 0x1.fep127f;

    __device__ static float row_scale(u32) { return 0.0f; }
    __device__ static float fitting(float x) { return x != x ? x : clamped(x, kLargest); }
    __device__ static u32 pack(float low, float high) {
        low = fitting(low), high = fitting(high);
        return kHalf ? ptx::pack_f16(low, high) : ptx::pack_bf16(low, high);
    }
    __device__ static void encode(const Unit<4>& x, u32, float, u8* row, int unit, int, bool) {
        reinterpret_cast<Pair*>(row)[unit] =
            Pair{{pack(x.value(0), x.value(1)), pack(x.value(2), x.value(3))}};
    }
    __device__ static void decode(const u8* row, int unit, int, float (&v)[4]) {
        const Pair pair = reinterpret_cast<const Pair*>(row)[unit];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (kHalf)
                ptx::unpack_f16(pair.word[i], v[2 * i], v[2 * i + 1]);
            else
                v[2 * i] = ptx::bf16_low(pair.word[i]), v[2 * i + 1] = ptx::bf16_high(pair.word[i]);
        }
    }
};

#if FORMAT == 0
using Format = Int8<0>;
#elif FORMAT == 1
using Format = Int8<128>;
#elif FORMAT == 2
using Format = Fp8<false>;
#elif FORMAT == 3
using Format = Fp8<true>;
#elif FORMAT == 4
using Format = Int4<NIBBLES>;
#elif FORMAT == 5
using Format = Nvfp4<NIBBLES>;
#else
using Format = Cast<FORMAT == 7>;
#endif

}  // namespace codec
