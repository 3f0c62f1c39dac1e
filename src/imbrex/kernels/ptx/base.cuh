// The inline assembly of imbrex, one thin function per instruction; what only some kernels need is in
// ptx/wgmma.cuh, ptx/exchange.cuh and ptx/codec.cuh. No header is included: NVRTC alone suffices.
// Conventions: shared-memory addresses are 32-bit (`smem_u32`); a function that must run in one thread says
// so; every wait is bounded by a count of polls and reports failure instead of trapping.
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

// Section: addresses, ids, clocks.

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

// The compiler forgets how `value` came about: what was computed from it before is computed again behind
// this, not kept in registers.
__device__ __forceinline__ void forget(u32& value) { asm volatile("" : "+r"(value)); }

// Section: kernels that overlap.

// The next kernel of the stream may be launched once all blocks of this one have said so or ended, if its
// launch allows it. GPUs before Hopper know neither, and begin no kernel before the one before has ended.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until the kernels before this one, which its launch did not wait for, have ended and their writes are
// there.
__device__ __forceinline__ void wait_for_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Section: registers and barriers of a block.

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

// Orders no accesses: what the others are to see needs a fence before it (fence_barrier_init).
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Section: fences.

// Orders this thread's ordinary shared-memory accesses before later ones by the copy engine or the tensor
// cores.
__device__ __forceinline__ void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The same for all state spaces, global memory included: after an acquired flag, before TMA reads what a peer
// wrote.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Section: mbarrier.

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier)
                 : "memory");
}

// Arrive at the barrier at the same offset in block `rank` of the cluster. Orders nothing but this thread's
// accesses to its own block's memory: with `.release.cluster` every arrival would wait for a fence of the
// whole GPU.
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 barrier, u32 rank) {
    asm volatile(
        "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %0, %1;\n"
        " mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes) {
    asm volatile(
        "{\n .reg .b64 state;\n mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier),
        "r"(bytes)
        : "memory");
}

__device__ __forceinline__ bool mbarrier_try(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\n selp.u32 %0, 1, 0, "
        "p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity), "r"(10000u)
        : "memory");
    return done != 0;
}

// Wait for the phase of `parity` to complete. Bounded: a try sleeps up to 10 us, and `patience` counts the
// tries left to this thread for all its waits; at 0 it stops waiting and the caller sets a status word. There
// is no branch around the code that follows: a divergent exit would make ptxas serialise wgmma.
constexpr u32 kPatience = 1u << 20;
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity, u32& patience) {
#pragma unroll 1
    while (!mbarrier_try(barrier, parity) && patience != 0) --patience;
}

// Section: TMA, tiled (tensor maps); one thread.

// `bytes` of memory into L2; both multiples of 16.
__device__ __forceinline__ void prefetch_l2(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load_2d(u32 target, const TensorMap* map, u32 barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

__device__ __forceinline__ void tma_load_3d(u32 target, const TensorMap* map, u32 barrier, int x, int y,
                                            int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
        "%5}], [%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// The same box into L2 alone.
__device__ __forceinline__ void tma_prefetch_3d(const TensorMap* map, int x, int y, int z) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y),
                 "r"(z)
                 : "memory");
}

__device__ __forceinline__ void tma_load_4d(u32 target, const TensorMap* map, u32 barrier, int x, int y,
                                            int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6}], [%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// The same of what is read once: the L2 gives up such lines first, and so keeps instructions, tables and
// rows.
__device__ __forceinline__ void tma_load_3d_once(u32 target, const TensorMap* map, u32 barrier, int x, int y,
                                                 int z) {
    asm volatile(
        "{\n .reg .b64 policy;\n createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        " cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], policy;\n}" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ __forceinline__ void tma_load_4d_once(u32 target, const TensorMap* map, u32 barrier, int x, int y,
                                                 int z, int w) {
    asm volatile(
        "{\n .reg .b64 policy;\n createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        " cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], policy;\n}" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// The tile lands at the same offset, and completes on the same barrier, in every block of the cluster in
// `blocks`.
__device__ __forceinline__ void tma_load_3d_multicast(u32 target, const TensorMap* map, u32 barrier, int x,
                                                      int y, int z, u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ void tma_load_4d_multicast(u32 target, const TensorMap* map, u32 barrier, int x,
                                                      int y, int z, int w, u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ void tma_store_2d(const TensorMap* map, u32 source, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(source), "r"(x), "r"(y)
                 : "memory");
}

__device__ __forceinline__ void tma_store_3d(const TensorMap* map, u32 source, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(source), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ __forceinline__ void tma_store_4d(const TensorMap* map, u32 source, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(source), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// Adds to what is there, in L2, in the tensor map's type (bf16 or float32).
__device__ __forceinline__ void tma_add_3d(const TensorMap* map, u32 source, int x, int y, int z) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::
            "l"(map),
        "r"(source), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// Section: bulk groups of stores (tiled and 1-D).

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

// Section: matrices from registers to shared memory.

// Four 8 x 8 bf16 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0),
                 "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}

// The reverse: the words of this lane, of the four matrices.
__device__ __forceinline__ void load_matrix_x4(u32 address, u32 (&m)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

// To the same place in block `rank` of the cluster; completes 16 bytes on its `barrier`, whose waiters then
// see them.
__device__ __forceinline__ void store_cluster_16(u32 address, u32 barrier, u32 rank, uint4 v) {
    asm volatile(
        "{\n .reg .b32 remote, done;\n mapa.shared::cluster.u32 remote, %0, %2;\n mapa.shared::cluster.u32 "
        "done, %1, %2;\n"
        " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [remote], {%3, %4, %5, %6}, "
        "[done];\n}" ::"r"(address),
        "r"(barrier), "r"(rank), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}

__device__ __forceinline__ void store_shared_16(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

// Memory that no launch under way writes; stays where it stands among the other instructions here.
__device__ __forceinline__ float load_constant(const float* from) {
    float value;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
    return value;
}

// The same of memory that the launch before may write: a thread of the block has seen (`load_acquire_gpu`)
// that this value is there, and told this one. Through L1, of which that has left nothing.
__device__ __forceinline__ float load_told(const float* from) {
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
    return value;
}

// Section: numbers.

// To 2^-11 of the result (PTX ISA, tanh.approx): one operation of the unit that a sigmoid needs twice.
__device__ __forceinline__ float tanh_fast(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// To an ulp, of normal numbers.
__device__ __forceinline__ float reciprocal(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}

// Two floats to packed bf16, round to nearest even; `low` in the low half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Two floats to e4m3, round to nearest even, saturating; `low` in the low byte.
__device__ __forceinline__ u32 pack_e4m3(float low, float high) {
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

// Four, the first in the lowest byte.
__device__ __forceinline__ u32 pack_e4m3(float first, float second, float third, float fourth) {
    u32 packed;
    asm("{\n .reg .b16 low, high;\n cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n cvt.rn.satfinite.e4m3x2.f32 "
        "high, %4, %3;\n"
        " mov.b32 %0, {low, high};\n}"
        : "=r"(packed)
        : "f"(first), "f"(second), "f"(third), "f"(fourth));
    return packed;
}

__device__ __forceinline__ void store_shared_u16(u32 address, u32 value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<u16>(value)) : "memory");
}

__device__ __forceinline__ void store_shared_floats(u32 address, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second) : "memory");
}

__device__ __forceinline__ float bf16_low(u32 packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float bf16_high(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }

}  // namespace ptx
