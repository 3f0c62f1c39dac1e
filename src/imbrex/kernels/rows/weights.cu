// The gate weights of expert-major rows, from where every choice's row is. Four bytes a choice: one launch is
// all they cost.
// position {2, -1, 0}, weights {.5, 9, .25}: rows {.25, unset, .5}.
#include "ptx/base.cuh"

namespace rows {

__device__ __forceinline__ int first() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int stride() { return gridDim.x * blockDim.x; }

extern "C" __global__ void __launch_bounds__(256)
    spread_weights(const int* position, const float* weights, int choices, int rows, float* weights_R) {
    for (int i = first(); i < choices; i += stride()) {
        const int row = position[i];
        if (row >= 0 && row < rows) weights_R[row] = weights[i];
    }
}

}  // namespace rows
