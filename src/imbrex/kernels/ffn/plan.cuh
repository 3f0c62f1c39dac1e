// Where every expert's rows end, from how many it has.
#pragma once
#include "ptx/base.cuh"

namespace ffn {

// ends[i] = counts[0] + ... + counts[i]; counters zeroed. One warp. counts = {130, 0, 170}: ends = {130, 130,
// 300}.
template <class Count>
__device__ __forceinline__ void write_plan(const Count* counts, int* ends, int* counters, int experts,
                                           int num_counters) {
    const int lane = threadIdx.x % 32;
    for (int i = lane; i < num_counters; i += 32) counters[i] = 0;
    int before = 0;
    for (int first = 0; first < experts; first += 32) {
        int sum = first + lane < experts ? static_cast<int>(counts[first + lane]) : 0;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const int left = __shfl_up_sync(0xffffffffu, sum, offset);
            if (lane >= offset) sum += left;
        }
        if (first + lane < experts) ends[first + lane] = before + sum;
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
}

// The number of all rows, in every lane of a warp.
__device__ __forceinline__ u32 all_rows(const i64* counts, int experts) {
    u32 sum = 0;
    for (int i = threadIdx.x % 32; i < experts; i += 32) sum += static_cast<u32>(counts[i]);
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    return sum;
}

}  // namespace ffn
