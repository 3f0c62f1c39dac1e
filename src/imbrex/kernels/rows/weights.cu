// The gate weights of expert-major rows, from where every choice's row is, and the counts as experts take
// them, with the plan of their products. Four bytes a choice: one launch is all they cost.
// position {2, -1, 0}, weights {.5, 9, .25}: rows {.25, unset, .5}.
#include "ffn/plan.cuh"
#include "ptx/base.cuh"

namespace rows {

constexpr int THREADS = 256;

struct Weights {
    const int* position;
    const float* weights;
    const int* counts;
    float* weights_R;
    i64* counts_e;
    int choices;
    int rows;
    int slots;
    int* plan;  // `counters` zeros, then where the rows of every slot end; or null
    int counters;
};

__device__ __forceinline__ int first() { return blockIdx.x * THREADS + threadIdx.x; }
__device__ __forceinline__ int stride() { return gridDim.x * THREADS; }

extern "C" __global__ void __launch_bounds__(THREADS) spread_weights(Weights w) {
    ptx::wait_for_launches();
    ptx::launch_dependents();  // the product behind waits for this launch before it reads
    for (int i = first(); i < w.slots; i += stride()) w.counts_e[i] = w.counts[i];
    if (w.plan != nullptr && blockIdx.x == gridDim.x - 1 && threadIdx.x < 32)
        ffn::write_plan(w.counts, w.plan + w.counters, w.plan, w.slots, w.counters);
    for (int i = first(); i < w.choices; i += stride()) {
        const int row = w.position[i];
        if (row >= 0 && row < w.rows) w.weights_R[row] = w.weights[i];
    }
}

}  // namespace rows
