// The inline assembly that only the exchange needs; the rest is in ptx.cuh.
#pragma once
#include "ptx.cuh"

namespace ptx {

__device__ __forceinline__ u8* shared_memory() {
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    return dynamic_shared;
}

__device__ __forceinline__ u32 load_acquire_sys(const u32* word) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ u64 load_acquire_sys(const u64* word) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_release_sys(u32* word, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// One word that carries its own payload: nothing else is ordered by it.
__device__ __forceinline__ void store_relaxed_sys(u64* word, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(u32* word, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_relaxed_sys(const u32* word) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ u32 load_acquire_gpu(const u32* word) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

// Returns the value before.
__device__ __forceinline__ u32 add_acq_rel_gpu(u32* word, u32 value) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
    return before;
}

// Returns the value before; the word becomes `value` if it was 0.
__device__ __forceinline__ u32 claim_zero_sys(u32* word, u32 value) {
    u32 before;
    asm volatile("atom.cas.acq_rel.sys.global.b32 %0, [%1], 0, %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
    return before;
}

// The same within a block, for words in shared memory.
__device__ __forceinline__ u32 load_acquire_block(const u32* word) {
    u32 value;
    asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_release_block(u32* word, u32 value) {
    asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ void sub_release_block(u32* word, u32 value) {
    asm volatile("red.release.cta.add.u32 [%0], %1;" ::"l"(word), "r"(0u - value) : "memory");
}

__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Whether the phase of `parity` is complete, without waiting.
__device__ __forceinline__ bool mbarrier_test(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

// Completes `bytes` on `barrier`.
__device__ __forceinline__ void bulk_load(u32 target, const void* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Joins the bulk group that the next `bulk_commit` closes.
__device__ __forceinline__ void bulk_store(void* target, u32 source, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ uint4 load_shared(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

__device__ __forceinline__ void store_shared(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Two floats to e4m3, round to nearest even, saturating; `low` in the low byte.
__device__ __forceinline__ u32 pack_e4m3(float low, float high) {
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

// Lets a spinning warp give way to the others of its SM.
__device__ __forceinline__ void pause() { __nanosleep(32); }

}  // namespace ptx
