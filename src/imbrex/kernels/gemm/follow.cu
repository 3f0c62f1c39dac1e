// A product whose rows the launch right before it makes, for few rows: it begins beside that one, asks for
// the columns of its first tile, as many steps as it has room for, and only then waits. Where weights are all
// that takes time, those of the first product come while rows cross, and those of the second while the last
// tiles of the first are computed.
//
// What it reads before it waits must be older than the launch right before it, which has waited for all that
// came earlier, or told: a dispatch (exchange/small.cu) makes the last end negative before this launch may
// begin, and writes it when the other ends and the counters are there. The second product has a counter of
// its own: the launch before may still be drawing from its.
#include "gemm/cut.cuh"
#include "gemm/ends.cuh"
#include "gemm/run.cuh"

namespace gemm {

struct Follows {
    static constexpr bool kWaits = true;
    static constexpr u32 kPatience = ptx::kPatience;
    static constexpr int kAhead = C::kStages;  // all are free: nothing of a tile before is left in them
    __device__ __forceinline__ void operator()(const Tile&) const {
        ptx::wait_for_launches();
        ptx::launch_dependents();
    }
};

// The arguments of gemm/gemm.cu.
extern "C" __global__ void __launch_bounds__(C::kThreads, 1)
    product_that_follows(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                         const __grid_constant__ TensorMap map_d, const __grid_constant__ TensorMap map_h,
                         const int* ends, const int* segments, int count, int rows, int columns, int k,
                         const float* weights, u32* counter, u32* status, Scales scales, Slopes slopes,
                         const i64* index, u32* progress) {
    extern __shared__ u8 memory[];
    __shared__ Slot slots[kSlots];
    __shared__ u64 barriers[2 * C::kStages + 2 * kSlots + 2];
    const Shared<C> shared = set_up<C>(memory, slots, barriers, nullptr, map_a, map_b, map_d);
    meet<C>();
    // Consumers have nothing to do before, and would lose patience with rows from afar.
    if (threadIdx.x < 128 * C::kGroups) ptx::wait_for_launches();
    if (threadIdx.x / 32 == 4 * C::kGroups) wait_for_ends(ends, count);
    run<C>({&map_a, &map_b, ends, segments, count, rows, columns, k, weights, counter, status, scales, slopes,
            index},
           shared, Follows{}, StoreTiles{&map_d, &map_h});
    ptx::wait_for_launches();  // a block without a tile: nothing ends before the launch before has
    ptx::launch_dependents();
}

}  // namespace gemm
