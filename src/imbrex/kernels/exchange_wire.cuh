// Sums that cross NVLink as e4m3 with a float32 scale for every 128 values: those of the fp8 codec, to the bit, in another order.
//
// A warp has 64 columns of 8 values at once, a lane columns l and 32 + l. It stores their 16 bytes side by side, so that a step is
// one store and one load of 512 bytes; the four scales of each step follow behind all values, ordered by half warp, then column.
// So a term of either kind is two loads of 16 bytes from two addresses, without a branch.
//
// Example, 64 columns: lane 3 has values 24..31 and 280..287 at byte 48 of the row, their scales in words 0 and 1 at byte 512.
#pragma once
#include "exchange_fp8.cuh"

constexpr int kStepColumns = 64;

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

// kSteps steps together, so that their chains of dependent instructions overlap; no branch but one. `held`: shared address of the bf16
// of `column`. The maxima of a step's two blocks go through one word. `scales`: shared, of this row, kept until it is done.
template <int kSteps>
__device__ __forceinline__ void encode_steps(u8* row, float* scales, u32 held, int column, int last) {
    const int lane = static_cast<int>(ptx::lane_id());
    uint4 value[kSteps][2];
    u32 amax[kSteps];
    Divisor d[kSteps][2];
    bool plain = true;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const bool both = column + i * kStepColumns + 32 < last;
        value[i][0] = ptx::load_shared(held + 16 * (i * kStepColumns + lane));
        value[i][1] = ptx::load_shared(held + 16 * (i * kStepColumns + lane + (both ? 32 : 0)));  // a lonely block goes twice
        const u32 a = larger_of_four(value[i][0]), b = larger_of_four(value[i][1]);
        amax[i] = ptx::max_u16x2((a & 0xffffu) | b << 16, a >> 16 | (b & 0xffff0000u));
    }
#pragma unroll
    for (int step = 1; step < 16; step *= 2)
#pragma unroll
        for (int i = 0; i < kSteps; ++i) amax[i] = ptx::max_u16x2(amax[i], __shfl_xor_sync(0xffffffffu, amax[i], step));
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            d[i][q] = plain_divisor(q ? amax[i] >> 16 : amax[i] & 0xffffu);
            plain &= d[i][q].plain;
        }
    uint2 coded[kSteps][2];
    if (__all_sync(0xffffffffu, plain)) {
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) coded[i / 2][i % 2] = eight_values<true>(value[i / 2][i % 2], d[i / 2][i % 2]);
    } else {
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) {
            Divisor& slow = d[i / 2][i % 2];
            if (!slow.plain) slow.scale = slow_scale(i % 2 ? amax[i / 2] >> 16 : amax[i / 2] & 0xffffu);
            coded[i / 2][i % 2] = eight_values<false>(value[i / 2][i % 2], slow);
        }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        reinterpret_cast<uint4*>(row + 8 * column + 512 * i)[lane] = {coded[i][0].x, coded[i][0].y, coded[i][1].x, coded[i][1].y};
        if (lane % 16 == 0) *reinterpret_cast<float2*>(scales + column / 16 + 4 * i + lane / 8) = {d[i][0].scale, d[i][1].scale};
    }
}

// The scales of columns `first` to `last` of a row of `columns`: one store for 32 steps, where each alone would be a packet.
__device__ __forceinline__ void store_scales(u8* row, const float* scales, int first, int last, int columns) {
    uint4* to = reinterpret_cast<uint4*>(row + 512 * wire_steps(columns));
    __syncwarp();
    for (int i = first / kStepColumns + static_cast<int>(ptx::lane_id()); i < wire_steps(last); i += 32) to[i] = reinterpret_cast<const uint4*>(scales)[i];
}

// Columns `first` to `last` of a row of `columns`; `held`: shared, the bf16 of these.
__device__ inline void encode_columns(u8* row, float* scales, u32 held, int first, int last, int columns) {
    int column = first;
    for (; column + kStepColumns < last; column += 2 * kStepColumns) encode_steps<2>(row, scales, held + 16 * (column - first), column, last);
    if (column < last) encode_steps<1>(row, scales, held + 16 * (column - first), column, last);
    store_scales(row, scales, first, last, columns);
    __syncwarp();  // before what is held is written again
}
