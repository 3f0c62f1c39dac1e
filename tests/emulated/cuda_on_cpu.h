// Enough of CUDA to run the exchange kernels on a CPU: what they call, on the fibers of machine_on_cpu.h.
// It stands in for ptx.cuh and ptx_exchange.cuh; memory is sequentially consistent, so fences are not tested here.
#pragma once
#include "machine_on_cpu.h"

#define threadIdx (Index{emu::self().thread})
#define blockIdx (Index{emu::self().block->index})
#define blockDim (Index{emu::self().block->threads})
#define gridDim (Index{emu::self().block->grid})

inline void __syncthreads() { emu::meet(emu::self().block->whole, emu::self().block->threads, true); }
inline int __syncthreads_and(int value) { return emu::meet(emu::self().block->whole, emu::self().block->threads, value != 0); }
inline void __syncwarp() { emu::meet(emu::own_warp(), emu::warp_size(), true); }
inline int __all_sync(u32, int value) { return emu::meet(emu::own_warp(), emu::warp_size(), value != 0); }
inline u32 __ballot_sync(u32, bool value) {
    emu::Block& block = *emu::self().block;
    u32& votes = block.votes[emu::self().thread / 32];
    if (emu::own_warp().arrived == 0) votes = 0;
    votes |= static_cast<u32>(value) << emu::self().thread % 32;
    __syncwarp();
    const u32 result = votes;
    __syncwarp();
    return result;
}
inline int __shfl_sync(u32, int value, int lane) {
    emu::Block& block = *emu::self().block;
    u32* words = block.exchanged + emu::self().thread / 32 * 32;
    words[emu::self().thread % 32] = static_cast<u32>(value);
    __syncwarp();
    const int result = static_cast<int>(words[lane % 32]);
    __syncwarp();
    return result;
}
inline u32 __shfl_xor_sync(u32, u32 value, int mask) {
    emu::Block& block = *emu::self().block;
    u32* words = block.exchanged + emu::self().thread / 32 * 32;
    words[emu::self().thread % 32] = value;
    __syncwarp();
    const u32 result = words[(emu::self().thread % 32) ^ mask];
    __syncwarp();
    return result;
}
inline u32 __match_any_sync(u32, int value) {
    emu::Block& block = *emu::self().block;
    u32* words = block.exchanged + emu::self().thread / 32 * 32;
    words[emu::self().thread % 32] = static_cast<u32>(value);
    __syncwarp();
    u32 same = 0;
    for (u32 lane = 0; lane < emu::warp_size(); ++lane) same |= static_cast<u32>(words[lane] == static_cast<u32>(value)) << lane;
    __syncwarp();
    return same;
}
inline u32 __reduce_max_sync(u32 mask, u32 value) {
    for (int step = 16; step > 0; step /= 2) value = max(value, __shfl_xor_sync(mask, value, step));
    return value;
}
inline u32 __reduce_add_sync(u32 mask, u32 value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(mask, value, step);
    return value;
}
inline int __shfl_up_sync(u32, int value, int step) {
    emu::Block& block = *emu::self().block;
    const int lane = static_cast<int>(emu::self().thread % 32);
    u32* words = block.exchanged + emu::self().thread / 32 * 32;
    words[lane] = static_cast<u32>(value);
    __syncwarp();
    const int result = static_cast<int>(words[max(lane - step, 0)]);
    __syncwarp();
    return lane < step ? value : result;
}
inline u32 atomicAdd(u32* word, u32 value) { u32 before = *word; *word += value; return before; }
inline int atomicAdd(int* word, int value) { int before = *word; *word += value; return before; }
inline u32 __funnelshift_r(u32 low, u32 high, u32 shift) {
    return static_cast<u32>((static_cast<u64>(high) << 32 | low) >> (shift & 31));
}
inline int __ffs(u32 v) { return __builtin_ffs(static_cast<int>(v)); }
inline int __ffsll(i64 v) { return __builtin_ffsll(v); }
inline int __clz(u32 v) { return v ? __builtin_clz(v) : 32; }
inline u32 __byte_perm(u32 low, u32 high, u32 selectors) {
    const u64 both = static_cast<u64>(high) << 32 | low;
    u32 result = 0;
    for (int i = 0; i < 4; ++i) result |= (both >> 8 * (selectors >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
inline u32 atomicSub(u32* word, u32 value) { u32 before = *word; *word -= value; return before; }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline u32 atomicOr(u32* word, u32 bits) { u32 before = *word; *word |= bits; return before; }
inline float __fdiv_rn(float a, float b) {  // a GPU's NaN is another one
    const u32 nan = 0x7fffffff;
    float q = a / b;
    if (std::isnan(q)) std::memcpy(&q, &nan, 4);
    return q;
}
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float __uint_as_float(u32 bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline u32 __float_as_uint(float f) { u32 bits; std::memcpy(&bits, &f, 4); return bits; }

namespace ptx {

inline u8* shared_memory() { return emu::self().block->shared; }
inline u32 smem_u32(const void* pointer) { return static_cast<u32>(static_cast<const u8*>(pointer) - shared_memory()); }
inline u64* barrier_at(u32 address) { return reinterpret_cast<u64*>(shared_memory() + address); }
inline u32 lane_id() { return emu::self().thread % 32; }
u64 global_timer();
void pause();

inline void rest() { pause(); }
inline void forget(u32&) {}

inline void fence_async_shared() {}
inline void fence_async() {}
inline void fence_barrier_init() {}
inline void fence_sys() {}
inline void fence_gpu() {}
inline void launch_dependents() {}
inline void wait_for_launches() {}

inline void named_barrier(int id, int threads) { emu::meet(emu::self().block->named[id], threads, true); }

inline void mbarrier_init(u32 barrier, u32 arrivals) { *barrier_at(barrier) = emu::make_barrier(arrivals, arrivals, 0, 0); }
inline void mbarrier_arrive(u32 barrier) { emu::change(barrier_at(barrier), 1, 0); }
inline void mbarrier_expect(u32 barrier, u32 bytes) { emu::change(barrier_at(barrier), 1, bytes); }
inline bool mbarrier_try(u32 barrier, u32 parity) {
    if (*barrier_at(barrier) >> 63 != parity) return true;
    emu::nap(2);
    return *barrier_at(barrier) >> 63 != parity;
}

inline u32 seen(u32 value) { emu::breathe(); return value; }
u32 load_acquire_sys(const u32* word);
inline u32 load_relaxed_sys(const u32* word) { return *const_cast<volatile const u32*>(word); }
inline u32 load_acquire_gpu(const u32* word) {
    const u32 value = *const_cast<volatile const u32*>(word);
    emu::acquired();
    return seen(value);
}
inline void store_release_gpu(u32* word, u32 value) { *word = value; emu::breathe(); }
void store_relaxed_sys(u32* word, u32 value);
inline void store_relaxed_sys(u64* word, u64 value) { *word = value; emu::breathe(); }
inline u64 load_relaxed_sys(const u64* word) { return *const_cast<volatile const u64*>(word); }
inline bool named_barrier_and(int id, int threads, bool fine) { return emu::meet(emu::self().block->named[id], threads, fine); }
inline u32 add_acq_rel_gpu(u32* word, u32 value) { u32 before = *word; *word += value; return seen(before); }
inline void add_relaxed_gpu(u32* word, u32 value) { *word += value; }
inline void add_release_cta(u32* word, u32 value) { *word += value; emu::breathe(); }
inline u32 take_acquire_cta(u32* word) { u32 value = *word; *word = 0; return seen(value); }
inline u32 swap_if_sys(u32* word, u32 expected, u32 value) {  // of another process's rank, perhaps
    __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return seen(expected);
}
inline u32 claim_zero_sys(u32* word, u32 value) { u32 before = *word; if (!before) *word = value; return before; }

void bulk_load(u32 target, const void* source, u32 bytes, u32 barrier);
void bulk_store(void* target, u32 source, u32 bytes);
void bulk_commit();
void wait_for_reads(int pending);
void wait_for_stores(int pending);
template <int kPending> void bulk_wait_read() { wait_for_reads(kPending); }
template <int kPending> void bulk_wait() { wait_for_stores(kPending); }

// A copy lands when a wait says so, or at once, at random.
void ask_for(u32 to, const u8* from);
void copy_commit();
void wait_for_copies(int pending);
template <int kTo, int kFrom>
void copy_async(u32 to, const void* from, bool wanted) {
    if (wanted) ask_for(to + kTo, static_cast<const u8*>(from) + kFrom);
}
template <int kPending> void copy_wait() { wait_for_copies(kPending); }

template <int kOffset = 0>
uint4 load_once(const void* from, bool wanted) {
    uint4 v{0x7fc07fc0, 0x7fc07fc0, 0x7fc07fc0, 0x7fc07fc0};
    if (wanted) std::memcpy(&v, static_cast<const u8*>(from) + kOffset, 16);
    return v;
}
template <int kOffset = 0>
uint4 load_relaxed_gpu(const void* from, bool wanted) { return load_once<kOffset>(from, wanted); }
inline uint4 load_shared(u32 address) { uint4 v; std::memcpy(&v, shared_memory() + address, 16); return v; }
inline uint2 load_shared_pair(u32 address) { uint2 v; std::memcpy(&v, shared_memory() + address, 8); return v; }
inline void store_shared(u32 address, uint4 v) { std::memcpy(shared_memory() + address, &v, 16); }

inline u32 round_bf16(float f) {
    const u32 bits = __float_as_uint(f);
    if (std::isnan(f)) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }
u32 round_e4m3(float f);
inline u32 pack_e4m3(float low, float high) { return round_e4m3(low) | round_e4m3(high) << 8; }
inline u32 pack_e4m3(float a, float b, float c, float d) { return pack_e4m3(a, b) | pack_e4m3(c, d) << 16; }
inline u32 max_u16x2(u32 a, u32 b) { return max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16; }
float reciprocal(float x);  // to an ulp, either way
float value_e4m3(u32 bits);
inline void unpack_e4m3(u32 packed, float& low, float& high) {
    low = value_e4m3(packed & 0xff);
    high = value_e4m3(packed >> 8 & 0xff);
}
u32 round_f16(float f);
float value_f16(u16 bits);
inline u32 pack_f16(float low, float high) { return round_f16(low) | round_f16(high) << 16; }
inline void unpack_f16(u32 packed, float& low, float& high) {
    low = value_f16(static_cast<u16>(packed));
    high = value_f16(static_cast<u16>(packed >> 16));
}
u32 round_e5m2(float f);
inline u32 pack_e5m2(float low, float high) { return round_e5m2(low) | round_e5m2(high) << 8; }
float value_e5m2(u32 bits);
inline void unpack_e5m2(u32 packed, float& low, float& high) {
    low = value_e5m2(packed & 0xff);
    high = value_e5m2(packed >> 8 & 0xff);
}
inline float bf16_low(u32 packed) { return __uint_as_float(packed << 16); }
inline float bf16_high(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }

}  // namespace ptx
