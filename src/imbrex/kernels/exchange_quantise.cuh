// Rows of bf16 in the mover's ring become rows of the fp8 codec, in place, between the load and the stores.
//
// A wire row is D bytes of e4m3, then a float32 scale for every 128 values (`imbrex.codec.fp8`, to the bit): scale =
// amax / 448, value = x / scale rounded to nearest. A block with NaN or an infinity has a NaN scale and zeros. The
// quotient is exact without a division per value: with the rounded reciprocal r of s, q = x r and q + r (x - q s), both fused, is
// the rounded quotient (Markstein), as long as nothing underflows; tiny scales divide.
//
// A warp has every kQuantisers-th row. A step reads 512 values and then writes 512 bytes, which earlier steps have read.
// Example, a block of 4, 448 scaled down to 4: 1 2 -4 0 has scale 1 and stays; 2 4 -8 0 has scale 2 and gives the same bytes.
#pragma once
#include "exchange_rows.cuh"

// Divides the stages, so that a slot always meets the same warp: one that met another's could run a phase ahead of it.
constexpr int kQuantisers = 7;
constexpr int kBlock = 128;   // values that share a scale
constexpr int kStep = 512;    // values a warp converts at once, 16 a lane, 8 lanes a block
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

// One row, all lanes; `scales`: of this warp, D / 128 floats.
__device__ inline void quantise_row(u32 row, float* scales, int width) {
    const int lane = static_cast<int>(ptx::lane_id());
    for (int first = 0; first < width; first += kStep) {
        const uint4 a = ptx::load_shared(row + 2 * (first + 16 * lane)), b = ptx::load_shared(row + 2 * (first + 16 * lane) + 16);
        u32 amax = larger(larger(larger(larger(0, a.x), a.y), a.z), a.w);
        amax = larger(larger(larger(larger(amax, b.x), b.y), b.z), b.w);
        for (int step = 1; step < 8; step *= 2) amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, step));
        const float scale = scale_of(amax);
        const Divisor d = divisor_of(scale);
        const uint4 bytes = {four_values(a.x, a.y, d), four_values(a.z, a.w, d), four_values(b.x, b.y, d), four_values(b.z, b.w, d)};
        __syncwarp();  // every lane has read its values
        ptx::store_shared(row + first + 16 * lane, bytes);
        if (lane % 8 == 0) scales[first / kBlock + lane / 8] = scale;
    }
    __syncwarp();
    for (int i = 4 * lane; i < width / kBlock; i += 128)
        ptx::store_shared(row + width + 4 * i, {__float_as_uint(scales[i]), __float_as_uint(scales[i + 1]), __float_as_uint(scales[i + 2]),
                                                __float_as_uint(scales[i + 3])});
    ptx::fence_async_shared();
}

// A quantising warp; `number` among them. `scales`: shared, of this warp.
__device__ inline void quantise_rows(const Call& call, const Ring& ring, int number, float* scales) {
    int row = 0;  // valid items so far
    for (u32 segment_number = 0;; ++segment_number) {
        const u32 buffer = segment_number % kSegments;
        if (!wait_stage(call, ring.segment_full + 8 * buffer, (segment_number / kSegments) & 1)) return;
        SegmentHead* segment = segment_of(ring, segment_number);
        const int count = segment->count;
        if (count == 0) return;
        for (int i = 0; i < count; ++i) {
            if (item_of(ring, segment, i)->targets == 0) continue;
            if (row++ % kQuantisers != number) continue;
            const u32 slot = static_cast<u32>(row - 1) % ring.stages, round = static_cast<u32>(row - 1) / ring.stages;
            if (!wait_stage(call, ring.slot_loaded + 8 * slot, round & 1)) return;
            quantise_row(ring.slots + slot * ring.slot_bytes, scales, ring.row_bytes / 2);
            ptx::mbarrier_arrive(ring.slot_full + 8 * slot);
        }
        ptx::mbarrier_arrive(ring.segment_empty + 8 * buffer);
    }
}
