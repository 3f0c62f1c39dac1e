// The inline assembly that only the exchange needs; the rest is in ptx/base.cuh.
#pragma once
#include "ptx/base.cuh"

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

__device__ __forceinline__ void store_release_gpu(u32* word, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Returns the value before.
__device__ __forceinline__ u32 add_acq_rel_gpu(u32* word, u32 value) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(word), "r"(value)
                 : "memory");
    return before;
}

// Orders nothing: a fence before it does.
__device__ __forceinline__ void add_relaxed_gpu(u32* word, u32 value) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Between threads of a block: adds; takes what is there and leaves 0.
__device__ __forceinline__ void add_release_cta(u32* word, u32 value) {
    asm volatile("red.release.cta.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ u32 take_acquire_cta(u32* word) {
    u32 value;
    asm volatile("atom.acquire.cta.exch.b32 %0, [%1], 0;" : "=r"(value) : "l"(word) : "memory");
    return value;
}

// Returns the value before; the word becomes `value` if it was 0.
__device__ __forceinline__ u32 claim_zero_sys(u32* word, u32 value) {
    u32 before;
    asm volatile("atom.cas.acq_rel.sys.global.b32 %0, [%1], 0, %2;"
                 : "=r"(before)
                 : "l"(word), "r"(value)
                 : "memory");
    return before;
}

// Returns the value before; the word becomes `value` if it was `expected`.
__device__ __forceinline__ u32 swap_if_sys(u32* word, u32 expected, u32 value) {
    u32 before;
    asm volatile("atom.cas.acq_rel.sys.global.b32 %0, [%1], %2, %3;"
                 : "=r"(before)
                 : "l"(word), "r"(expected), "r"(value)
                 : "memory");
    return before;
}

// A word whose parts arrive together, so that a count carries its own flag.
__device__ __forceinline__ void store_relaxed_sys(u64* word, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ u64 load_relaxed_sys(const u64* word) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

// A named barrier that tells whether all of its threads are `fine`.
__device__ __forceinline__ bool named_barrier_and(int id, int threads, bool fine) {
    u32 all;
    asm volatile(
        "{\n .reg .pred p, q;\n setp.ne.u32 p, %3, 0;\n barrier.cta.red.and.pred q, %1, %2, p;\n selp.u32 "
        "%0, 1, 0, q;\n}"
        : "=r"(all)
        : "r"(id), "r"(threads), "r"(static_cast<u32>(fine))
        : "memory");
    return all != 0;
}

__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Completes `bytes` on `barrier`.
__device__ __forceinline__ void bulk_load(u32 target, const void* source, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            target),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// Joins the bulk group that the next `bulk_commit` closes.
__device__ __forceinline__ void bulk_store(void* target, u32 source, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ uint4 load_shared(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}

__device__ __forceinline__ uint2 load_shared_pair(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void store_shared(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

// 16 bytes at `from` + kOffset that this thread will not read again; anything where not `wanted`. No branch,
// so a batch of them leaves at once, and the offset is part of the instruction, so they share one address.
template <int kOffset = 0>
__device__ __forceinline__ uint4 load_once(const void* from, bool wanted) {
    uint4 v;
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
        " @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4 + %6];\n}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(from), "r"(static_cast<u32>(wanted)), "n"(kOffset)
        : "memory");
    return v;
}

// The same of what another SM may have written in this launch: past L1.
template <int kOffset = 0>
__device__ __forceinline__ uint4 load_relaxed_gpu(const void* from, bool wanted) {
    uint4 v;
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
        " @p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4 + %6];\n}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(from), "r"(static_cast<u32>(wanted)), "n"(kOffset)
        : "memory");
    return v;
}

// 16 bytes from memory to shared memory, of this thread; nothing where not `wanted`. Offsets are part of the
// instruction.
template <int kTo, int kFrom>
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool wanted) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p cp.async.cg.shared.global [%0 + %3], [%1 + %4], "
        "16;\n}" ::"r"(to),
        "l"(from), "r"(static_cast<u32>(wanted)), "n"(kTo), "n"(kFrom)
        : "memory");
}

// What this thread asked for since the last time is one group.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the latest kPending groups of this thread are there; then it may read them.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// The larger of the low and of the high halves.
__device__ __forceinline__ u32 max_u16x2(u32 a, u32 b) {
    u32 larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// Two e4m3 values, exactly; `low` of the low byte.
__device__ __forceinline__ void unpack_e4m3(u32 packed, float& low, float& high) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<u16>(packed)));
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}"
        : "=f"(low), "=f"(high)
        : "r"(halves));
}

// Lets a spinning warp give way to the others of its SM.
__device__ __forceinline__ void pause() { __nanosleep(32); }
// The same, where many warps look at one word.
__device__ __forceinline__ void rest() { __nanosleep(500); }

}  // namespace ptx
