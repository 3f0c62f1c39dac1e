// Rows of bf16 in the mover's ring become rows of the fp8 codec, in place, between the load and the stores.
//
// A warp has one row in turn. Steps read 512 values each and then write 512 bytes, which they or earlier ones have read.
#pragma once
#include "exchange_fp8.cuh"
#include "exchange_rows.cuh"

constexpr int kStep = 512;    // values a warp converts at once, 16 a lane, 8 lanes a block

// kSteps steps together, so that their chains of dependent instructions overlap.
template <int kSteps>
__device__ __forceinline__ void quantise_steps(u32 row, float* scales, int first) {
    const int lane = static_cast<int>(ptx::lane_id());
    uint4 value[kSteps][2];
    u32 amax[kSteps];
    Divisor d[kSteps];
    bool plain = true;
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) value[i][j] = ptx::load_shared(row + 2 * (first + i * kStep + 16 * lane) + 16 * j);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) amax[i] = larger(larger_of_four(value[i][0]), larger_of_four(value[i][1]));
    for (int step = 1; step < 8; step *= 2)
#pragma unroll
        for (int i = 0; i < kSteps; ++i) amax[i] = larger(amax[i], __shfl_xor_sync(0xffffffffu, amax[i], step));
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        d[i] = divisor_of(amax[i]);
        plain &= d[i].plain;
    }
    plain = __all_sync(0xffffffffu, plain);  // every lane has read its values, too
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const uint2 low = eight_values(value[i][0], d[i], plain), high = eight_values(value[i][1], d[i], plain);
        ptx::store_shared(row + first + i * kStep + 16 * lane, {low.x, low.y, high.x, high.y});
        if (lane % 8 == 0) scales[(first + i * kStep) / kBlock + lane / 8] = d[i].scale;
    }
}

// One row, all lanes; `scales`: of this warp, D / 128 floats.
__device__ inline void quantise_row(u32 row, float* scales, int width) {
    const int lane = static_cast<int>(ptx::lane_id());
    int first = 0;
    for (; first + 2 * kStep <= width; first += 2 * kStep) quantise_steps<2>(row, scales, first);
    if (first < width) quantise_steps<1>(row, scales, first);
    __syncwarp();
    for (int i = 4 * lane; i < width / kBlock; i += 128)
        ptx::store_shared(row + width + 4 * i, {__float_as_uint(scales[i]), __float_as_uint(scales[i + 1]), __float_as_uint(scales[i + 2]),
                                                __float_as_uint(scales[i + 3])});
    ptx::fence_async_shared();
}

// A quantising warp; `number` among `warps`, which has every `warps`-th row. The stages are a multiple of the warps, so that a
// slot always meets the same warp: one that met another's could take an older phase for this one. `scales`: shared, of this warp.
__device__ inline void quantise_rows(const Call& call, const Ring& ring, int number, int warps, float* scales) {
    int turn = 0;  // whose the next valid item is
    u32 slot = 0, round = 0;
    for (u32 segment_number = 0;; ++segment_number) {
        const u32 buffer = segment_number % kSegments;
        if (!wait_stage(call, ring.segment_full + 8 * buffer, (segment_number / kSegments) & 1)) return;
        SegmentHead* segment = segment_of(ring, segment_number);
        const int count = segment->count;
        if (count == 0) return;
        for (int i = 0; i < count; ++i) {
            if (item_of(ring, segment, i)->targets == 0) continue;
            if (turn == number) {
                if (!wait_stage(call, ring.slot_loaded + 8 * slot, round & 1)) return;
                quantise_row(ring.slots + slot * ring.slot_bytes, scales, ring.row_bytes / 2);
                ptx::mbarrier_arrive(ring.slot_full + 8 * slot);
            }
            turn = turn + 1 < warps ? turn + 1 : 0;
            if (++slot == static_cast<u32>(ring.stages)) {
                slot = 0;
                ++round;
            }
        }
        ptx::mbarrier_arrive(ring.segment_empty + 8 * buffer);
    }
}
