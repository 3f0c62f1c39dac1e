// Where rows end, told by a dispatch that has not ended (exchange/small.cu).
#pragma once
#include "ptx/exchange.cuh"

namespace gemm {

// Until it is known where rows end. Bounded: whoever has waited for the launch before knows it as well.
__device__ __forceinline__ void wait_for_ends(const int* ends, int experts) {
    constexpr int kLooks = 1000;
    for (int look = 0; look < kLooks; ++look) {
        if (static_cast<int>(ptx::load_acquire_gpu(reinterpret_cast<const u32*>(ends) + experts - 1)) >= 0)
            return;
        ptx::pause();
    }
    ptx::wait_for_launches();
}

}  // namespace gemm
