// A look at a barrier of shared memory that does not wait, for a thread that has other things to do
// meanwhile: `mbarrier_try` sleeps up to 10 us.
#pragma once
#include "ptx/base.cuh"

namespace ptx {

// Whether the phase of `parity` has completed; then what was released with it is there.
__device__ __forceinline__ bool mbarrier_done(u32 barrier, u32 parity) {
#ifdef __CUDA_ARCH__
    u32 done;
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, "
        "p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
#else
    return mbarrier_try(barrier, parity);  // emulated
#endif
}

}  // namespace ptx
