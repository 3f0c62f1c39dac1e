// The gate weights of expert-major rows, from where every choice's row is, and the counts as experts take
// them. Four bytes a choice: one launch is all they cost.
// position {2, -1, 0}, weights {.5, 9, .25}: rows {.25, unset, .5}.
#include "ptx/base.cuh"

namespace rows {

__device__ __forceinline__ int first() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int stride() { return gridDim.x * blockDim.x; }

extern "C" __global__ void __launch_bounds__(256)
    spread_weights(const int* position, const float* weights, const int* counts, int choices, int rows,
                   int slots, float* weights_R, long long* counts_e) {
    for (int i = first(); i < slots; i += stride()) counts_e[i] = counts[i];
    for (int i = first(); i < choices; i += stride()) {
        const int row = position[i];
        if (row >= 0 && row < rows) weights_R[row] = weights[i];
    }
}

}  // namespace rows
