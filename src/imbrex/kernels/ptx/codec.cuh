// The assembly that only the codecs' kernels need.
#pragma once
#include "ptx/exchange.cuh"

namespace ptx {

// Two floats to e5m2, round to nearest even, saturating; `low` in the low byte.
__device__ __forceinline__ u32 pack_e5m2(float low, float high) {
    u16 packed;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

// Two floats to float16, round to nearest even; `low` in the low half.
__device__ __forceinline__ u32 pack_f16(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ void unpack_f16(u32 packed, float& low, float& high) {
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}"
        : "=f"(low), "=f"(high)
        : "r"(packed));
}

// Two e5m2 values, exactly: their bytes are the upper bytes of float16.
__device__ __forceinline__ void unpack_e5m2(u32 packed, float& low, float& high) {
    u32 halves;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(static_cast<u16>(packed)));
    unpack_f16(halves, low, high);
}

}  // namespace ptx
