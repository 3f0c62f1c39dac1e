// The consumers of tiles of 192 rows and 256 columns: each of two groups has one block of 64 rows, and half
// of the columns of the third.
//
//   rows   0 ..  63    group 0, columns 0 .. 255
//   rows  64 .. 127    group 1, columns 0 .. 255
//   rows 128 .. 191    group 0, columns 0 .. 127 | group 1, columns 128 .. 255
//
// A block of the GPU reads 48 KB a step for a tile of 128 rows and multiplies for 1024 cycles, 40 KB for one
// of 64 and 512 cycles: more than L2 gives, so an expert's last tile takes as long with 64 rows as with 128.
// With 192 rows it is 56 KB for 1536 cycles. So an expert's rows are cut into tiles of three blocks and of
// two, and none of one but where the expert has no more.
//
// Four stages of 56 KB are all of shared memory, so a tile leaves through its last step's stage, three panels
// a group, and that is free when they have been read. The next tile's first steps come meanwhile.
//
// A block of rows that a tile does not have is neither loaded nor multiplied. Sums are those of any other
// tile, in the same order.
#pragma once
#include "gemm/halves.cuh"

namespace gemm {

constexpr int kTallBarrier = 3;  // 1 and 2: gemm/store.cuh

// One step, under way; kThird: of the third block as well, whose half of the columns is the group's.
template <class C, bool kThird>
__device__ __forceinline__ void multiply_tall_step(float (&d)[3 * C::kHalfSums], u32 a, u32 third, u32 b,
                                                   int group, bool first) {
    constexpr u32 kStepA = 32, kStepB = C::kForward ? 32 : 16 * 128;
    const u32 mine = b + group * (C::kBytesB / 2);
    float (&own)[C::kSums] = *reinterpret_cast<float (*)[C::kSums]>(d);
    float (&more)[C::kHalfSums] = *reinterpret_cast<float (*)[C::kHalfSums]>(d + C::kSums);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kBlockK / 16; ++i) {
        multiply_quarter<C, 0>(own, a, b, i, first);
        multiply_quarter<C, 1>(own, a, b, i, first);
        if constexpr (kThird)
            ptx::wgmma_bf16<C::kBlockN / 2, false, !C::kForward>(
                more, ptx::wgmma_operand(third + i * kStepA, kPanel),
                ptx::wgmma_operand(mine + i * kStepB, kPanel), !(first && i == 0));
    }
    ptx::wgmma_commit();
}

// All steps of a tile; returns the last one's stage, which is not free yet.
template <class C, bool kThird>
__device__ __forceinline__ u32 multiply_tall(float (&d)[3 * C::kHalfSums], const Shared<C>& shared,
                                             int group, const Slot& tile, u32& patience) {
    Ring<C> ring(tile.position);
    u32 last = 0;
#pragma unroll 1
    for (int step = 0; step < tile.steps; ++step, ring.next()) {
        ptx::mbarrier_wait(shared.full + 8 * ring.stage, ring.phase, patience);
        const u32 a = shared.a_of(ring.stage);
        multiply_tall_step<C, kThird>(d, a + group * kPanel, a + 2 * kPanel, shared.b_of(ring.stage), group,
                                      step == 0);
        ptx::wgmma_wait<1>();
        if (step > 0) release_stage<C>(shared.empty + 8 * last);
        last = ring.stage;
    }
    ptx::wgmma_wait<0>();
    return last;
}

// The group's half of the third block.
template <class C, int kHalf, class Sink>
__device__ __forceinline__ void store_third(const float (&d)[3 * C::kHalfSums], const Sink& sink,
                                            Stores<C>& stores, const Slot& tile, int rows,
                                            const float* weights) {
    RowWeights<C> mine;
    mine.load(weights, tile.row + 128, rows);
    Results<C, Sink, kHalf, 2> results{sink, stores, tile, tile.row + 128, rows};
    // `Results` finds half 1 behind half 0.
    const float* from = d + C::kSums - kHalf * C::kHalfSums;
    results.open();
    results.write(*reinterpret_cast<const float (*)[C::kSums]>(from), mine);
    results.close();
}

template <class C, class Sink>
__device__ __forceinline__ void consume_tall(const Problem& problem, const Shared<C>& shared,
                                             const Sink& sink, u32 patience) {
    const int group = uniform(threadIdx.x / 128), thread = static_cast<int>(threadIdx.x % 128);
    u32 index = 0;
    Stores<C> stores{0, group, thread};
    Slot tile = take_uniform<C>(shared, index, patience);
    while (tile.steps >= 0 && __all_sync(0xffffffffu, patience != 0)) {
        float d[3 * C::kHalfSums];
        const int rows = least(tile.rows - 64 * group, 64), third = least(tile.rows - 128, 64);
        if (rows <= 0) {
            pass_tile<C>(shared, tile, patience);
            sink.passed(thread);
        } else {
            u32 last;
            if (third > 0)
                last = multiply_tall<C, true>(d, shared, group, tile, patience);
            else
                last = multiply_tall<C, false>(d, shared, group, tile, patience);
            if (tile.rows > 64) ptx::named_barrier(kTallBarrier, 256);  // the other group may read it still
            stores.staging = group ? shared.a_of(last) : shared.b_of(last);
            store_block<C>(*reinterpret_cast<const float (*)[C::kSums]>(d), sink, stores, tile,
                           tile.row + 64 * group, rows, problem.weights);
            if (third > 0) {
                if (group == 0)
                    store_third<C, 0>(d, sink, stores, tile, third, problem.weights);
                else
                    store_third<C, 1>(d, sink, stores, tile, third, problem.weights);
            }
            if (thread == 0) ptx::bulk_wait_read<0>();
            ptx::named_barrier(1 + group, 128);
            release_stage<C>(shared.empty + 8 * last);
            // Of the third block's rows each group tells of half: all are told when both have stored theirs.
            const int told = third > 0 ? (third + 1 - group) / 2 : 0;
            sink.sent(tile, tile.row + 64 * group, rows + told, thread);
        }
        tile = take_uniform<C>(shared, ++index, patience);
    }
    if (thread == 0) ptx::bulk_wait<0>();
    sink.ended(thread);
    if (patience == 0) *problem.status = 1;
}

}  // namespace gemm
