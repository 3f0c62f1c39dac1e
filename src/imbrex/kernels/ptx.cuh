// All inline assembly of imbrex, one thin function per instruction. No header is included: NVRTC alone suffices.
// Conventions: shared-memory addresses are 32-bit (`smem_u32`); a function that must run in one thread says so;
// every wait is bounded by a count of polls and reports failure instead of trapping.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct __align__(64) TensorMap {
    u8 raw[128];
};

namespace ptx {

// ---------------------------------------------------------------- addresses, ids, clocks

__device__ __forceinline__ u32 smem_u32(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ u32 lane_id() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Nanoseconds of a clock common to the GPU; coarse (a tick may be a microsecond).
__device__ __forceinline__ u64 global_timer() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// True in exactly one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
    u32 chosen;
    asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
    return chosen != 0;
}

// ---------------------------------------------------------------- registers and barriers of a block

template <int kRegisters>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Named barrier 1..15 over `threads` threads of the block.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// ---------------------------------------------------------------- fences

// Orders this thread's ordinary shared-memory accesses before later ones by the copy engine or the tensor cores.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for all state spaces, global memory included: after an acquired flag, before TMA reads what a peer wrote.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// ---------------------------------------------------------------- mbarrier

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

// Arrive at the barrier at the same offset in block `rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 barrier, u32 rank) {
    asm volatile(
        "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %0, %1;\n"
        " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier), "r"(rank) : "memory");
}

__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes) {
    asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ bool mbarrier_try(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// Wait for the phase of `parity` to complete. Bounded: a try sleeps up to about a microsecond, so 2^24 tries are
// many seconds; false says that the time ran out (a bug: both sides of these barriers live in one kernel).
__device__ __forceinline__ bool mbarrier_wait(u32 barrier, u32 parity) {
#pragma unroll 1
    for (u32 tries = 0; tries < (1u << 24); ++tries)
        if (mbarrier_try(barrier, parity)) return true;
    return false;
}

// ---------------------------------------------------------------- TMA, tiled (tensor maps); one thread

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load_2d(u32 target, const TensorMap* map, u32 barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

__device__ __forceinline__ void tma_load_3d(u32 target, const TensorMap* map, u32 barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// The tile lands at the same offset, and completes on the same barrier, in every block of the cluster in `blocks`.
__device__ __forceinline__ void tma_load_3d_multicast(u32 target, const TensorMap* map, u32 barrier, int x, int y, int z,
                                                      u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ void tma_store_2d(const TensorMap* map, u32 source, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(source), "r"(x),
                 "r"(y)
                 : "memory");
}

__device__ __forceinline__ void tma_store_3d(const TensorMap* map, u32 source, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(source),
                 "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// ---------------------------------------------------------------- bulk groups of stores (tiled and 1-D)

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most `kPending` groups still read shared memory: the source buffer may be written again.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until at most `kPending` groups have not yet completed their writes.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---------------------------------------------------------------- numbers

// Two floats to packed bf16, round to nearest even; `low` in the low half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float bf16_low(u32 packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float bf16_high(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }

}  // namespace ptx
