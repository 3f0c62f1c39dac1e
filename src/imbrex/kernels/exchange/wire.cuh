// Sums that cross NVLink as e4m3 with a float32 scale for every 128 values: those of the fp8 codec, to the
// bit, in another order.
//
// A warp has 64 columns of 8 values at once, a lane columns l and 32 + l. It stores their 16 bytes side by
// side, so that a step is one store and one load of 512 bytes; the four scales of each step follow behind all
// values, ordered by half warp, then column.
// So a term of either kind is two loads of 16 bytes from two addresses, without a branch.
//
// Example, 64 columns: lane 3 has values 24..31 and 280..287 at byte 48 of the row, their scales in words 0
// and 1 at byte 512.
#pragma once
#include "codec/fp8.cuh"

namespace sums {

using namespace fp8;

constexpr int kStepColumns = 64;
constexpr int kColumns = 4;  // of 16 bytes of bf16 that a lane has of a row, 512 bytes apart: two steps

__device__ __forceinline__ int wire_steps(int columns) { return (columns + kStepColumns - 1) / kStepColumns; }

__device__ __forceinline__ void add_decoded(float (&sum)[8], u32 first, u32 second, float scale) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float low, high;
        ptx::unpack_e4m3((i < 2 ? first : second) >> 16 * (i % 2), low, high);
        // the codec decodes before it adds: two roundings
        sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(low, scale));
        sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(high, scale));
    }
}

// `values` and `scales`: the 16 bytes of this lane and of its step.
__device__ __forceinline__ void add_coded(float (&first)[8], float (&second)[8], uint4 values, uint4 scales) {
    const bool upper = ptx::lane_id() >= 16;
    add_decoded(first, values.x, values.y, __uint_as_float(upper ? scales.z : scales.x));
    add_decoded(second, values.z, values.w, __uint_as_float(upper ? scales.w : scales.y));
}

__device__ __forceinline__ uint4 pack_eight(const float (&sum)[8]) {
    return {ptx::pack_bf16(sum[0], sum[1]), ptx::pack_bf16(sum[2], sum[3]), ptx::pack_bf16(sum[4], sum[5]),
            ptx::pack_bf16(sum[6], sum[7])};
}

// Both steps that a warp has, together, so that their chains of dependent instructions overlap; no branch but
// for what is not plain.
// `last`: behind the last column, of which 32 are there. The maxima of a step's two blocks go through one
// word. `scales`: shared, of this row, kept until it is done.
__device__ __forceinline__ void encode_sums(u8* row, float* scales, int column, int last,
                                            const float (&sum)[kColumns][8]) {
    constexpr int kSteps = kColumns / 2;
    const int lane = static_cast<int>(ptx::lane_id());
    uint4 value[kColumns];
    u32 amax[kSteps];
    Divisor d[kColumns];
    bool plain = true;
#pragma unroll
    for (int q = 0; q < kColumns; ++q) value[q] = pack_eight(sum[q]);
    if (column + 32 * kColumns > last)  // blocks behind the end are the first once more
#pragma unroll
        for (int q = 1; q < kColumns; ++q)
            if (column + 32 * q >= last) value[q] = value[0];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const u32 a = larger_of_four(value[2 * i]), b = larger_of_four(value[2 * i + 1]);
        amax[i] = ptx::max_u16x2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
    }
#pragma unroll
    for (int step = 1; step < 16; step *= 2)
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
            amax[i] = ptx::max_u16x2(amax[i], __shfl_xor_sync(0xffffffffu, amax[i], step));
#pragma unroll
    for (int q = 0; q < kColumns; ++q) {
        d[q] = plain_divisor(q % 2 ? amax[q / 2] >> 16 : amax[q / 2] & 0xffffu);
        plain &= d[q].plain;
    }
    uint2 coded[kColumns];
    if (__all_sync(0xffffffffu, plain)) {
#pragma unroll
        for (int q = 0; q < kColumns; ++q) coded[q] = eight_values<true>(value[q], d[q]);
    } else {
#pragma unroll
        for (int q = 0; q < kColumns; ++q) {
            if (!d[q].plain) d[q].scale = slow_scale(q % 2 ? amax[q / 2] >> 16 : amax[q / 2] & 0xffffu);
            coded[q] = eight_values<false>(value[q], d[q]);
        }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        if (column + kStepColumns * i >= last) break;
        reinterpret_cast<uint4*>(row + 8 * column + 512 * i)[lane] = {coded[2 * i].x, coded[2 * i].y,
                                                                      coded[2 * i + 1].x, coded[2 * i + 1].y};
        if (lane % 16 == 0)
            *reinterpret_cast<float2*>(scales + column / 16 + 4 * i + lane / 8) = {d[2 * i].scale,
                                                                                   d[2 * i + 1].scale};
    }
}

// The scales of columns `first` to `last` of a row of `columns`: one store for 32 steps, where each alone
// would be a packet.
__device__ __forceinline__ void store_scales(u8* row, const float* scales, int first, int last, int columns) {
    uint4* to = reinterpret_cast<uint4*>(row + 512 * wire_steps(columns));
    __syncwarp();
    for (int i = first / kStepColumns + static_cast<int>(ptx::lane_id()); i < wire_steps(last); i += 32)
        to[i] = reinterpret_cast<const uint4*>(scales)[i];
    __syncwarp();  // before they are written again
}

}  // namespace sums
