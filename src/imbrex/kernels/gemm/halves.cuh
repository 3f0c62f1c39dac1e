// The consumers of bf16 tiles of 256 columns: two halves of 128, so that a half is stored while the other is
// multiplied, in the last step of its tile or the first of the next one.
//
//   columns 0..127     |== first ==|                        |== last ==|            |== first ==|
//   columns 128..255               |== first ==|                       |== last ==|             |== first ==|
//   both                                       |== others ==|
//   stores                                                             | 0 .. 127 | 128 .. 255  |
//
// Otherwise the tensor cores stand still while a tile is stored: both groups wait for the same stages, so
// they stay together and store at one time, even if one is begun 4500 cycles later. A half's staging is
// written before its products begin, and sent after: the rest of a store is beside them. The bits are those
// of whole steps: a sum gets the same products in the same order.
//
// ptxas keeps products in flight over code that reads other sums where it knows that all lanes go the same
// way (`uniform`; else C7520, and every product is waited for at once), and where every way through the code
// has waited for what it reads, whatever the values (C7514, C7518): hence the branches of `begun`. No warning
// by NVRTC 13.0 and 13.5.
//
// Design record, H200 at the 1.55 GHz that it holds, cycles of a tile of 22 steps (Qwen2 down); its products
// need 22528:
//   whole tiles                     25500: 8 % of the time neither group multiplies; a store is 2300 to 2700
//   two steps a half, at both ends  25300: the stages they keep are not there for loads, which take two steps
//   one                             24600 to 25400: the first step of the next tile came late
//   and that tile sought earlier    24900 (gemm/load.cuh)
// us of whole tiles and these, 16384 rows in equal parts, in turns:
//              Qwen2        Qwen3        DeepSeek-V3   Phi-3.5        Mixtral
//   gate/up    254, 249     151, 148     1325, 1319    2291, 2252     5322, 5255
//   down       137, 134     88, 84       689, 684      1105, 1098     2475, 2458
//   gradient of down's weights
//              153, 146     93, 86       the others in turns, as before
// All steps are products of 128 columns. With 256 in between, which ptxas compiled in some variants only, two
// more waits for all a tile: 1 to 2 % faster where sums are long.
//
// Rejected:
//   Sums packed into registers first, so that the next products begin before the staging is free, one step or
//     two: 0.99 to 1.01 of the time of whole tiles (this: 0.95 to 0.99).
//   A half's two panels sent at one stroke: 1.00.
//   Gathered rows (1.03 to 1.05): half the columns read A's lines of shared memory twice, and the copies of
//     single rows need what is left of it.
//   In fp8, the next tile's first product begun before this one is stored: 1.00.
#pragma once
#include "gemm/backward.cuh"
#include "gemm/store.cuh"

namespace gemm {

template <class C>
__device__ __forceinline__ Slot take_uniform(const Shared<C>& shared, u32 index, u32& patience) {
    Slot tile = take_slot<C>(shared, index, patience);
    tile.rows = uniform(tile.rows), tile.columns = uniform(tile.columns);
    tile.steps = uniform(tile.steps), tile.position = uniform(tile.position);
    return tile;
}

// 16 of k, half of the columns.
template <class C, int kHalf>
__device__ __forceinline__ void multiply_quarter(float (&d)[C::kSums], u32 a, u32 b, int i, bool first) {
    constexpr u32 kStepA = C::kWgrad ? 16 * 128 : 32, kStepB = C::kForward ? 32 : 16 * 128;
    float (&half)[C::kHalfSums] = *reinterpret_cast<float (*)[C::kHalfSums]>(d + kHalf * C::kHalfSums);
    ptx::wgmma_bf16<C::kBlockN / 2, C::kWgrad, !C::kForward>(
        half, ptx::wgmma_operand(a + i * kStepA, kPanel),
        ptx::wgmma_operand(b + kHalf * (C::kBytesB / 2) + i * kStepB, kPanel), !(first && i == 0));
}

// One step of both halves, under way.
template <class C>
__device__ __forceinline__ void multiply_both(float (&d)[C::kSums], u32 a, u32 b, bool first) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kBlockK / 16; ++i) {
        multiply_quarter<C, 0>(d, a, b, i, first);
        multiply_quarter<C, 1>(d, a, b, i, first);
    }
    ptx::wgmma_commit();
}

// One step of a half, under way.
template <class C, int kHalf>
__device__ __forceinline__ void multiply_half(float (&d)[C::kSums], u32 a, u32 b, bool first) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kBlockK / 16; ++i) multiply_quarter<C, kHalf>(d, a, b, i, first);
    ptx::wgmma_commit();
}

// A tile in which this group has no rows.
template <class C>
__device__ __forceinline__ void pass_tile(const Shared<C>& shared, const Slot& tile, u32& patience) {
    Ring<C> ring(tile.position);
#pragma unroll 1
    for (int step = 0; step < tile.steps; ++step, ring.next()) {
        ptx::mbarrier_wait(shared.full + 8 * ring.stage, ring.phase, patience);
        release_stage<C>(shared.empty + 8 * ring.stage);
    }
}

// A tile of this group, all steps but `begun`: the last one is under way, as two commits, and the stages of
// the others are free. The ring is at the last one.
template <class C>
__device__ __forceinline__ Ring<C> multiply_steps(float (&d)[C::kSums], const Shared<C>& shared, u32 rows_a,
                                               const Slot& tile, bool begun, u32& patience) {
    Ring<C> ring(tile.position);
    u32 before = ring.stage;  // of the step before
    if (begun) ring.next();
#pragma unroll 1
    for (int step = begun; step < tile.steps - 1; ++step, ring.next()) {
        ptx::mbarrier_wait(shared.full + 8 * ring.stage, ring.phase, patience);
        multiply_both<C>(d, shared.a_of(ring.stage) + rows_a, shared.b_of(ring.stage), step == 0);
        ptx::wgmma_wait<1>();
        if (step > 0) release_stage<C>(shared.empty + 8 * before);
        before = ring.stage;
    }
    ptx::mbarrier_wait(shared.full + 8 * ring.stage, ring.phase, patience);
    multiply_half<C, 0>(d, shared.a_of(ring.stage) + rows_a, shared.b_of(ring.stage), tile.steps == 1);
    multiply_half<C, 1>(d, shared.a_of(ring.stage) + rows_a, shared.b_of(ring.stage), tile.steps == 1);
    ptx::wgmma_wait<2>();
    if (tile.steps > 1) release_stage<C>(shared.empty + 8 * before);
    return ring;
}

// Stores a tile whose last step is under way at `last`, and begins the next one where this group has rows in
// it: `begun`.
template <class C, class Sink>
__device__ __forceinline__ void store_tile(float (&d)[C::kSums], const Shared<C>& shared, u32 rows_a,
                                           Results<C, Sink, 0, 2> low, Results<C, Sink, 1, 2> high,
                                           const RowWeights<C>& weights, u32 last, const Slot& then,
                                           bool begun, u32& patience) {
    const Ring<C> first(then.position);
    const u32 a = shared.a_of(first.stage) + rows_a, b = shared.b_of(first.stage);
    low.open();
    ptx::wgmma_wait<1>();
    low.write(d, weights);
    if (begun) {
        ptx::mbarrier_wait(shared.full + 8 * first.stage, first.phase, patience);
        multiply_half<C, 0>(d, a, b, true);
        low.close();
        high.open();
        ptx::wgmma_wait<1>();
    } else {
        low.close();
        high.open();
        ptx::wgmma_wait<0>();
    }
    release_stage<C>(shared.empty + 8 * last);
    high.write(d, weights);
    if (begun) multiply_half<C, 1>(d, a, b, true);
    high.close();
}

template <class C, class Sink>
__device__ __forceinline__ void consume_halves(const Problem& problem, const Shared<C>& shared,
                                               const Sink& sink, u32 patience) {
    const float* weights = problem.weights;
    const int group = uniform(threadIdx.x / 128);
    const u32 rows_a = group * kPanel;
    u32 index = 0;
    Stores<C> stores{shared.staging + group * C::kPanels * kPanel, group,
                     static_cast<int>(threadIdx.x % 128)};
    float d[C::kSums];
    bool begun = false;  // the first step of `tile` is under way
    Slot tile = take_uniform<C>(shared, index, patience);
    while (tile.steps >= 0 && __all_sync(0xffffffffu, patience != 0)) {
        const int row = tile.row + 64 * group, rows = least(tile.rows - 64 * group, 64);
        if (rows <= 0 || (C::kWgrad && tile.steps == 0)) {
            if (rows <= 0) {
                pass_tile<C>(shared, tile, patience);
                sink.passed(stores.thread);
            }
            if (C::kWgrad && rows > 0 && C::kEpilogue == Epilogue::kPlain) {
                const float zeros[C::kSums] = {};
                store_block<C>(zeros, sink, stores, tile, row, rows, weights);
                sink.sent(tile, row, rows, stores.thread);
            }
            tile = take_uniform<C>(shared, ++index, patience);
            continue;
        }
        RowWeights<C> mine;
        mine.load(weights, row, rows);
        const Ring<C> last = multiply_steps<C>(d, shared, rows_a, tile, begun, patience);
        const Slot then = take_uniform<C>(shared, ++index, patience);
        begun = then.steps > 1 && then.rows > 64 * group;
        store_tile<C, Sink>(d, shared, rows_a, {sink, stores, tile, row, rows},
                            {sink, stores, tile, row, rows}, mine, last.stage, then, begun, patience);
        sink.sent(tile, row, rows, stores.thread);
        tile = then;
    }
    if (stores.thread == 0) ptx::bulk_wait<0>();
    sink.ended(stores.thread);
    if (patience == 0) *problem.status = 1;
}

}  // namespace gemm
