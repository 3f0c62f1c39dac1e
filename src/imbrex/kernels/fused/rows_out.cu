// Gate and up of a dispatch whose rows come meanwhile: three warps of every block's producer group bring them
// (fused/movers.cuh), and a tile waits for its own. In place of the pull and the first product, behind
// exchange/stage.cu. The same bits.
//
// Why idle warps, and what else was tried: docs/fused-kernels.md.
#if BLOCKS_M == 3  // tall tiles leave movers 56 registers, and so half of the words
#define BESIDE 56
#define WORDS (WIRE_FP8 ? 3 : 4)
#else
#define BESIDE 72
#endif
#include "fused/own_rows.cuh"
#include "gemm/cut.cuh"
#include "gemm/parts.cuh"
#include "gemm/run.cuh"

namespace gemm {

constexpr bool kTells = C::kForward && C::kSwiglu;

// Whoever tells of tiles brings rows before.
struct BringAndTell {
    fused::BringAndFind bring;
    TellParts<C> tell;
    __device__ __forceinline__ void operator()() const {
        bring();
        tell();
    }
};

// As `grouped_gemm` (gemm/gemm.cu), and what movers need. `group`: of this rank, with the blocks of this
// launch.
extern "C" __global__ void __launch_bounds__(C::kThreads, 1)
    rows_and_product(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                     const __grid_constant__ TensorMap map_d, const __grid_constant__ TensorMap map_h,
                     const int* ends, const int* segments, int count, int rows, int columns, int k,
                     const float* weights, u32* counter, u32* status, Scales scales, Slopes slopes,
                     const i64* index, u32* progress, const __grid_constant__ fused::Group group,
                     const __grid_constant__ fused::Rows moved) {
    extern __shared__ u8 memory[];
    __shared__ Slot slots[kSlots];
    __shared__ u64 barriers[2 * C::kStages + 2 * kSlots + 2];
    const Shared<C> shared = set_up<C>(memory, slots, barriers, nullptr, map_a, map_b, map_d);
    __shared__ Done done;
    if constexpr (kTells) clear(done);
    ptx::wait_for_launches();
    ptx::launch_dependents();
    meet<C>();
    const Problem problem{&map_a, &map_b, ends, segments, count, rows, columns, k, weights, counter, status,
                          scales, slopes, index};
    const fused::Come<C::kBlockM> ready{group, moved, status};
    const fused::BringAndFind beside{{group, moved}, ends, count};
    if constexpr (kTells)
        run<C>(problem, shared, ready, NoteTiles<C>{&map_d, &map_h, done, count}, EveryBlock<C::kCluster>{},
               BringAndTell{beside, {done, progress}});
    else
        run<C>(problem, shared, ready, StoreTiles{&map_d, &map_h}, EveryBlock<C::kCluster>{}, beside);
}

}  // namespace gemm
