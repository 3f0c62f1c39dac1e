// Rows of bf16 in the mover's ring become rows of the fp8 codec, in place, between the load and the stores.
//
// A warp has one row in turn. It reads 1024 values at once and then, when all lanes have read, writes as many
// bytes, which this or earlier reads have emptied.
#pragma once
#include "codec/fp8.cuh"
#include "exchange/mover.cuh"

namespace mover {

using namespace fp8;

constexpr int kStep = 512;    // values, 16 a lane, 8 lanes a block
constexpr int kTogether = 2;  // steps, so that their chains of dependent instructions overlap

struct Sixteen {
    uint4 half[2];
};

// A lane's two words of 16 bytes side by side. Every other four lanes read the second first, so that eight
// lanes meet all banks.
__device__ __forceinline__ Sixteen read_values(u32 row, int first, int swap) {
    const u32 at = row + 2 * (first + 16 * static_cast<int>(ptx::lane_id()));
    return {{ptx::load_shared(at + 16 * swap), ptx::load_shared(at + 16 * (swap ^ 1))}};
}

__device__ __forceinline__ u32 larger_of(const Sixteen& v) {
    return larger(larger_of_four(v.half[0]), larger_of_four(v.half[1]));
}

template <bool kPlain>
__device__ __forceinline__ void write_values(u32 row, float* scales, int first, int swap, const Sixteen& v,
                                             const Divisor& d, bool wanted = true) {
    const int lane = static_cast<int>(ptx::lane_id());
    const uint2 one = eight_values<kPlain>(v.half[0], d), other = eight_values<kPlain>(v.half[1], d);
    const uint2 low = swap ? other : one, high = swap ? one : other;
    if (wanted) ptx::store_shared(row + first + 16 * lane, {low.x, low.y, high.x, high.y});
    if (wanted && lane % 8 == 0) scales[first / kBlock + lane / 8] = d.scale;
}

// kTogether steps from `first` on, all lanes; the second only where `both`. The maxima of both go through one
// word.
__device__ __forceinline__ void quantise_steps(u32 row, float* scales, int first, bool both) {
    const int swap = static_cast<int>(ptx::lane_id()) >> 2 & 1, second = both ? first + kStep : first;
    const Sixteen v = read_values(row, first, swap), w = read_values(row, second, swap);
    const u32 a = larger_of(v), b = larger_of(w);
    u32 amax = ptx::max_u16x2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
#pragma unroll
    for (int step = 1; step < 8; step *= 2)
        amax = ptx::max_u16x2(amax, __shfl_xor_sync(0xffffffffu, amax, step));
    Divisor d = plain_divisor(amax & 0xffffu), e = plain_divisor(amax >> 16);
    if (__builtin_expect(__all_sync(0xffffffffu, d.plain && e.plain), 1)) {  // every lane has read
        write_values<true>(row, scales, first, swap, v, d);
        write_values<true>(row, scales, second, swap, w, e, both);
        return;
    }
    d.scale = slow_scale(amax & 0xffffu);
    e.scale = slow_scale(amax >> 16);
    write_values<false>(row, scales, first, swap, v, d);
    write_values<false>(row, scales, second, swap, w, e, both);
}

// One row, all lanes; `scales`: of this warp, D / 128 floats.
__device__ inline void quantise_row(u32 row, float* scales, int width) {
    const int lane = static_cast<int>(ptx::lane_id());
    for (int first = 0; first < width; first += kTogether * kStep)
        quantise_steps(row, scales, first, first + kStep < width);
    __syncwarp();
    for (int i = 4 * lane; i < width / kBlock; i += 128)
        ptx::store_shared(row + width + 4 * i,
                          {__float_as_uint(scales[i]), __float_as_uint(scales[i + 1]),
                           __float_as_uint(scales[i + 2]), __float_as_uint(scales[i + 3])});
    ptx::fence_async_shared();
}

// A row of bf16 as the fp8 codec has it, by a warp. `width`: a multiple of kStep.
struct Coded {
    static constexpr bool kCoded = true;
    __device__ __forceinline__ static void stage(u8* to, const u8* from, int width) {
        const int lane = static_cast<int>(ptx::lane_id());
        float* scales = reinterpret_cast<float*>(to + width);
#pragma unroll 1
        for (int first = 16 * lane; first < width; first += kStep) {
            const u8* at = from + 2 * first;
            const Sixteen v = {{ptx::load_once(at, true), ptx::load_once<16>(at, true)}};
            u32 amax = larger_of(v);
#pragma unroll
            for (int step = 1; step < 8; step *= 2)
                amax = ptx::max_u16x2(amax, __shfl_xor_sync(~0u, amax, step));
            const Divisor d = divisor_of(amax);
            const bool plain = __all_sync(~0u, d.plain);
            const uint2 low = eight_values(v.half[0], d, plain), high = eight_values(v.half[1], d, plain);
            *reinterpret_cast<uint4*>(to + first) = {low.x, low.y, high.x, high.y};
            if (lane % 8 == 0) scales[first / kBlock] = d.scale;
        }
    }
};

// A quantising warp; `number` among `warps`, which has every `warps`-th row. The stages are a multiple of the
// warps, so that a slot always meets the same warp: one that met another's could take an older phase for this
// one. `scales`: shared, of this warp.
__device__ inline void quantise_rows(const Call& call, const Ring& ring, int number, int warps,
                                     float* scales) {
    int turn = 0;  // whose the next valid item is
    u32 slot = 0, round = 0;
    for (u32 segment_number = 0;; ++segment_number) {
        const u32 buffer = segment_number % kSegments;
        if (!warp_wait_stage(call, ring.segment_full + 8 * buffer, (segment_number / kSegments) & 1)) return;
        SegmentHead* segment = segment_of(ring, segment_number);
        const int count = segment->count;
        if (count == 0) return;
        for (int i = 0; i < count; ++i) {
            if (item_of(ring, segment, i)->targets == 0) continue;
            if (turn == number) {
                if (!warp_wait_stage(call, ring.slot_loaded + 8 * slot, round & 1)) return;
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

}  // namespace mover
