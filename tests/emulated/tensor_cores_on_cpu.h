// What the expert kernels need on top of cuda_on_cpu.h: tiled copies through tensor maps, wgmma, stmatrix, shuffles.
//
// Adversarial like the header below it: the 16-byte pieces of a tiled load land one by one at random later times, a
// product reads its operands when it is issued or only when it is waited for, at random. Memory is checked: a piece that
// lies in no tensor that the test has named fails, and so does a box that lies outside its tensor altogether while the
// descriptor's base is no tensor's (the copy engine then touches the base).
#pragma once
#include "cuda_on_cpu.h"

#define __align__(bytes) alignas(bytes)
#ifndef CLUSTER
#define CLUSTER 1
#endif
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }

// As the tests write it: sizes in elements of `size` bytes, innermost first; strides in bytes, that of the innermost left out.
struct TensorMap {
    u8* base;
    i64 rank, size;
    i64 sizes[4];
    i64 strides[3];
    int box[4];
};

namespace emu {

// `cluster`: blocks of it; `blocks`: a bit for each of them that gets it; 0: this block alone.
void tiled_load(u32 target, const TensorMap& map, u32 barrier, const int (&at)[4], u32 blocks, u32 cluster);
void tiled_store(const TensorMap& map, u32 source, const int (&at)[4], bool add);
Block& block_of_cluster(u32 rank, u32 cluster);
void fence_products();
void commit_products();
void wait_products(u32 pending);
void queue_product(float* d, int columns, u64 a, u64 b, bool add, bool trans_a, bool trans_b, bool fp8);

}  // namespace emu

u32 exchanged(u32 word, u32 from);
inline float __shfl_xor_sync(u32, float value, int mask) {
    return __uint_as_float(exchanged(__float_as_uint(value), emu::self().thread % 32 ^ mask));
}

namespace ptx {

constexpr u32 kPatience = 1 << 15;
template <int> void more_registers() {}
template <int> void fewer_registers() {}
inline void prefetch_map(const TensorMap*) {}
inline void prefetch_l2(const void*, u32) {}
inline void mbarrier_wait(u32 barrier, u32 parity, u32& patience) {
    while (!mbarrier_try(barrier, parity) && patience != 0) --patience;
}

inline bool elect_one() { return emu::self().thread % 32 == 0; }

inline emu::Block& block_of_cluster(u32 rank) { return emu::block_of_cluster(rank, CLUSTER); }
inline u32 cluster_rank() { return emu::self().block->index % CLUSTER; }
inline void cluster_arrive() {}
inline void cluster_wait() { emu::meet(block_of_cluster(0).named[15], CLUSTER * emu::self().block->threads, true); }
inline void mbarrier_arrive_cluster(u32 barrier, u32 rank) {
    emu::change(reinterpret_cast<u64*>(block_of_cluster(rank).shared + barrier), 1, 0);
}
inline void store_cluster_16(u32 address, u32 barrier, u32 rank, uint4 v) {
    u8* memory = block_of_cluster(rank).shared;
    std::memcpy(memory + address, &v, 16);
    emu::change(reinterpret_cast<u64*>(memory + barrier), 0, -16);
}

inline void tiled_load(u32 target, const TensorMap* map, u32 barrier, const int (&at)[4], u16 blocks = 0) {
    emu::tiled_load(target, *map, barrier, at, blocks, CLUSTER);
}
inline void tma_load_3d_multicast(u32 target, const TensorMap* map, u32 barrier, int x, int y, int z, u16 blocks) {
    tiled_load(target, map, barrier, {x, y, z, 0}, blocks);
}
inline void tma_load_4d_multicast(u32 target, const TensorMap* map, u32 barrier, int x, int y, int z, int w, u16 blocks) {
    tiled_load(target, map, barrier, {x, y, z, w}, blocks);
}
inline void tma_prefetch_3d(const TensorMap*, int, int, int) {}
inline void tma_load_2d(u32 target, const TensorMap* map, u32 barrier, int x, int y) {
    tiled_load(target, map, barrier, {x, y, 0, 0});
}
inline void tma_load_3d(u32 target, const TensorMap* map, u32 barrier, int x, int y, int z) {
    tiled_load(target, map, barrier, {x, y, z, 0});
}
inline void tma_load_4d(u32 target, const TensorMap* map, u32 barrier, int x, int y, int z, int w) {
    tiled_load(target, map, barrier, {x, y, z, w});
}
inline void tma_load_3d_once(u32 target, const TensorMap* map, u32 barrier, int x, int y, int z) {
    tma_load_3d(target, map, barrier, x, y, z);
}
inline void tma_load_4d_once(u32 target, const TensorMap* map, u32 barrier, int x, int y, int z, int w) {
    tma_load_4d(target, map, barrier, x, y, z, w);
}
inline void tma_store_3d(const TensorMap* map, u32 source, int x, int y, int z) { emu::tiled_store(*map, source, {x, y, z, 0}, false); }
inline void tma_store_4d(const TensorMap* map, u32 source, int x, int y, int z, int w) {
    emu::tiled_store(*map, source, {x, y, z, w}, false);
}
inline void tma_add_3d(const TensorMap* map, u32 source, int x, int y, int z) { emu::tiled_store(*map, source, {x, y, z, 0}, true); }
inline void store_shared_floats(u32 address, float first, float second) {
    const float both[2] = {first, second};
    std::memcpy(shared_memory() + address, both, 8);
}

constexpr u64 kOperandHigh = 1ull << 62 | u64(1024 >> 4) << 32;
inline u64 wgmma_operand(u32 address, u32 leading) {
    return 1ull << 62 | u64(1024 >> 4) << 32 | u64(leading >> 4) << 16 | (address & 0x3ffffu) >> 4;
}
inline void wgmma_fence() { emu::fence_products(); }
inline void wgmma_commit() { emu::commit_products(); }
template <int kPending> void wgmma_wait() { emu::wait_products(kPending); }
template <int kN, int kTransA, int kTransB>
void wgmma_bf16(float (&d)[kN / 2], u64 a, u64 b, u32 add) {
    emu::queue_product(d, kN, a, b, add != 0, kTransA != 0, kTransB != 0, false);
}
template <int kN>
void wgmma_e4m3(float (&d)[kN / 2], u64 a, u64 b, u32 add) {
    emu::queue_product(d, kN, a, b, add != 0, false, false, true);
}
template <int kCount>
void wgmma_results(float (&)[kCount]) {}

inline void store_shared_u16(u32 address, u32 value) {
    const u16 half = static_cast<u16>(value);
    std::memcpy(shared_memory() + address, &half, 2);
}
void store_matrix_x4(u32 address, u32 m0, u32 m1, u32 m2, u32 m3);
void load_matrix_x4(u32 address, u32 (&m)[4]);
void load_matrix_x4_transposed(u32 address, u32 (&m)[4]);
void copy_async_or_zero(u32 to, const void* from, bool wanted);
void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
inline float load_constant(const float* from) { return emu::load_line(from, true); }
inline float load_told(const float* from) { return emu::load_line(from, false); }
inline float tanh_fast(float x) { return std::tanh(x); }
inline void store_shared_16(u32 address, uint4 v) { store_shared(address, v); }

}  // namespace ptx
