// The second product of experts, which begins in the last wave of the first: gemm/parts.cuh. What it reads
// besides is older than the first product, which has waited for all that came earlier.
//
// It ends when the launch before has, so that nobody behind it need look further back, and sets the counters
// back to zero.
#define WAITS 1
#include "gemm/cut.cuh"
#include "gemm/parts.cuh"
#include "gemm/run.cuh"

namespace gemm {

// The arguments of gemm/gemm.cu, where `progress` is what is waited for, and `tiles`: of columns, of the
// product that tells.
extern "C" __global__ void __launch_bounds__(C::kThreads, 1)
    product_behind(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                   const __grid_constant__ TensorMap map_d, const __grid_constant__ TensorMap map_h,
                   const int* ends, const int* segments, int count, int rows, int columns, int k,
                   const float* weights, u32* counter, u32* status, Scales scales, Slopes slopes,
                   const i64* index, u32* progress, int tiles) {
    extern __shared__ u8 memory[];
    __shared__ Slot slots[kSlots];
    __shared__ u64 barriers[2 * C::kStages + 2 * kSlots + 2];
    const Shared<C> shared = set_up<C>(memory, slots, barriers, nullptr, map_a, map_b, map_d);
    meet<C>();
    run<C>({&map_a, &map_b, ends, segments, count, rows, columns, k, weights, counter, status, scales, slopes,
            index},
           shared, PartMade{progress, ends, count, tiles, status}, StoreTiles{&map_d, &map_h});
    const bool loads = threadIdx.x == 128 * C::kGroups;  // and has waited for all parts that the block needs
    if (loads && atomicAdd(progress + kParts, 1u) == gridDim.x - 1)
        for (int i = 0; i <= kParts; ++i) progress[i] = 0;
    // Lanes that load nothing would hold up the one that does. In fp8 they end: a barrier of a warp anywhere
    // makes the compiler doubt that warps are whole in every step of a product.
    if constexpr (!C::kFp8)
        __syncwarp();
    else if (threadIdx.x / 32 == 4 * C::kGroups && !loads)
        return;
    ptx::wait_for_launches();
    ptx::launch_dependents();
}

}  // namespace gemm
