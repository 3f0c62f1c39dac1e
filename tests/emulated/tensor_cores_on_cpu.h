// What the expert kernels need on top of cuda_on_cpu.h: tiled copies through tensor maps, wgmma, stmatrix, shuffles.
//
// Adversarial like the header below it: the 16-byte pieces of a tiled load land one by one at random later times, a
// product reads its operands when it is issued or only when it is waited for, at random. Memory is checked: a piece that
// lies in no tensor that the test has named fails, and so does a box that lies outside its tensor altogether while the
// descriptor's base is no tensor's (the copy engine then touches the base).
#pragma once
#include "cuda_on_cpu.h"

#include <map>
#include <tuple>
#include <utility>

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

inline std::vector<std::pair<u8*, u8*>> tensors;
// A tensor that begins at 0 stands for all memory.
inline bool trusting() { return !tensors.empty() && tensors[0].first == nullptr; }
inline bool known(const u8* at, i64 bytes) {
    for (auto [begin, end] : tensors)
        if (at >= begin && at + bytes <= end) return true;
    return false;
}
inline bool is_tensor(const u8* base) {
    if (trusting()) return true;
    for (auto [begin, end] : tensors)
        if (base == begin) return true;
    return false;
}
alignas(16) inline const u8 zeros[16] = {};

// Calls `piece(shared address, global address or null)` for all 16-byte pieces of a box.
template <class Piece>
void walk(const TensorMap& map, u32 shared, std::array<int, 4> at, Piece piece) {
    const i64 lines = i64(map.box[1]) * map.box[2] * map.box[3];
    if (shared % (lines == 1 ? 128 : 1024)) fail("a swizzled box is not aligned to 1024 bytes, or one of a line to 128");
    if (map.box[0] * map.size != 128) fail("a swizzled box is not 128 bytes wide");
    for (int d = 0; d < map.rank; ++d)
        if ((at[d] >= map.sizes[d] || at[d] + map.box[d] <= 0) && !is_tensor(map.base)) fail("a box outside its tensor");
    u32 line = 0;
    for (int w = 0; w < map.box[3]; ++w)
        for (int z = 0; z < map.box[2]; ++z)
            for (int y = 0; y < map.box[1]; ++y, ++line)
                for (int x = 0; x * map.size < 128; x += 16 / map.size) {
                    const i64 position[4] = {at[0] + x, at[1] + y, at[2] + z, at[3] + w};
                    u8* global = map.base + position[0] * map.size;
                    bool inside = position[0] >= 0 && position[0] < map.sizes[0];
                    for (int d = 1; d < map.rank; ++d) {
                        inside = inside && position[d] >= 0 && position[d] < map.sizes[d];
                        global += position[d] * map.strides[d - 1];
                    }
                    if (inside && !known(global, 16)) fail("a piece of a box lies in no tensor");
                    piece(swizzled(shared + line * 128 + x * map.size), inside ? global : nullptr);
                }
}

inline std::map<std::pair<const Block*, unsigned>, std::array<u32, 32>> rows_of_warp;
inline std::map<std::pair<const Block*, unsigned>, std::array<std::array<u32, 6>, 32>> fragments;  // of mma

}  // namespace emu

inline u32 exchanged(u32 word, u32 from) {
    auto& words = emu::rows_of_warp[{emu::self().block, emu::self().thread / 32}];
    words[emu::self().thread % 32] = word;
    __syncwarp();
    const u32 result = words[from % 32];
    __syncwarp();
    return result;
}
inline float __shfl_xor_sync(u32, float value, int mask) {
    return __uint_as_float(exchanged(__float_as_uint(value), emu::self().thread % 32 ^ mask));
}

extern "C" inline void forget_tensors() { emu::tensors.clear(); }
extern "C" inline void name_tensor(u8* begin, i64 bytes) { emu::tensors.push_back({begin, begin + bytes}); }

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

inline emu::Block& block_of_cluster(u32 rank) {
    emu::Block& block = *emu::machine->blocks[emu::self().block->first + emu::self().block->index / CLUSTER * CLUSTER + rank];
    if (block.alive == 0) emu::fail("a block of the cluster left before this access to its memory");
    return block;
}
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

// `blocks`: a bit for each of the cluster that gets it; 0: this block alone.
inline void tiled_load(u32 target, const TensorMap* map, u32 barrier, std::array<int, 4> at, u16 blocks = 0) {
    for (u32 rank = 0; rank < CLUSTER; ++rank) {
        if (blocks ? !(blocks >> rank & 1) : rank != cluster_rank()) continue;
        u8* memory = block_of_cluster(rank).shared;
        emu::walk(*map, target, at, [&](u32 shared, const u8* global) {
            emu::machine->loads.push_back(
                {memory + shared, global ? global : emu::zeros, 16, reinterpret_cast<u64*>(memory + barrier), {}});
        });
    }
}
inline void tma_load_3d_multicast(u32 target, const TensorMap* map, u32 barrier, int x, int y, int z, u16 blocks) {
    tiled_load(target, map, barrier, {x, y, z, 0}, blocks);
}
inline void tma_load_4d_multicast(u32 target, const TensorMap* map, u32 barrier, int x, int y, int z, int w, u16 blocks) {
    tiled_load(target, map, barrier, {x, y, z, w}, blocks);
}
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
inline void tiled_store(const TensorMap* map, u32 source, std::array<int, 4> at) {
    emu::walk(*map, source, at, [&](u32 shared, u8* global) {
        if (global) emu::self().open.push_back({global, shared_memory() + shared, 16, nullptr, {}});
    });
}
inline void tma_store_3d(const TensorMap* map, u32 source, int x, int y, int z) { tiled_store(map, source, {x, y, z, 0}); }
inline void tma_store_4d(const TensorMap* map, u32 source, int x, int y, int z, int w) { tiled_store(map, source, {x, y, z, w}); }

inline void tma_add_3d(const TensorMap* map, u32 source, int x, int y, int z) {
    emu::walk(*map, source, {x, y, z, 0}, [&](u32 shared, u8* global) {
        if (!global) return;
        emu::self().open.push_back({global, shared_memory() + shared, 16, nullptr, {}});
        emu::self().open.back().add = static_cast<int>(map->size);
    });
}
inline void store_shared_floats(u32 address, float first, float second) {
    const float both[2] = {first, second};
    std::memcpy(shared_memory() + address, both, 8);
}

constexpr u64 kOperandHigh = 1ull << 62 | u64(1024 >> 4) << 32;
inline u64 wgmma_operand(u32 address, u32 leading) {
    return 1ull << 62 | u64(1024 >> 4) << 32 | u64(leading >> 4) << 16 | (address & 0x3ffffu) >> 4;
}
inline emu::Products& own_products() { return emu::self().block->products[emu::self().thread / 32]; }
inline void multiply_first(emu::Products& all) {
    emu::multiply(all.left.front());
    all.left.pop_front();
    ++all.done;
}
inline void wgmma_fence() { own_products().fenced = true; }
inline void wgmma_commit() { ++own_products().commits[lane_id()]; }
// The instruction is the whole warp's: no lane goes on before all its products are done.
template <int kPending>
void wgmma_wait() {
    auto& all = own_products();
    const u32 lanes = emu::warp_size(), commits = all.commits[lane_id()];
    if (emu::own_warp().arrived + 1 == lanes) {
        while (!all.left.empty() && all.left.front().group + kPending < commits) multiply_first(all);
        all.mood = emu::machine->random() % 3;
    }
    __syncwarp();
}
// Products are done in their order, the first of them when all lanes ask for it, the last when it is waited for.
inline void queue_product(float* d, int columns, u64 a, u64 b, bool add, bool trans_a, bool trans_b, bool fp8) {
    auto& all = own_products();
    const u32 lane = lane_id(), at = all.asked[lane]++ - all.done;
    if (!all.fenced) emu::fail("wgmma without wgmma_fence");
    if (at == all.left.size()) all.left.push_back({columns, a, b, add, trans_a, trans_b, fp8, all.commits[lane]});
    auto& product = all.left[at];
    if (product.a != a || product.b != b || product.add != add) emu::fail("lanes of a warp want different products");
    product.d[lane] = d;
    if (++product.asked < emu::warp_size() || all.mood == 1 || (all.mood == 2 && emu::machine->random() % 2)) return;
    while (!all.left.empty() && all.left.front().asked == emu::warp_size()) multiply_first(all);
}
template <int kN, int kTransA, int kTransB>
void wgmma_bf16(float (&d)[kN / 2], u64 a, u64 b, u32 add) {
    queue_product(d, kN, a, b, add != 0, kTransA != 0, kTransB != 0, false);
}
template <int kN>
void wgmma_e4m3(float (&d)[kN / 2], u64 a, u64 b, u32 add) {
    queue_product(d, kN, a, b, add != 0, false, false, true);
}
template <int kCount>
void wgmma_results(float (&)[kCount]) {}

inline void store_shared_u16(u32 address, u32 value) {
    const u16 half = static_cast<u16>(value);
    std::memcpy(shared_memory() + address, &half, 2);
}
inline void store_matrix_x4(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    auto& rows = emu::rows_of_warp[{emu::self().block, emu::self().thread / 32}];
    const u32 lane = emu::self().thread % 32, words[4] = {m0, m1, m2, m3};
    rows[lane] = address;
    __syncwarp();
    for (u32 m = 0; m < 4; ++m) std::memcpy(shared_memory() + rows[8 * m + lane / 4] + lane % 4 * 4, &words[m], 4);
    __syncwarp();
}

inline void load_matrix_x4(u32 address, u32 (&m)[4]) {
    auto& rows = emu::rows_of_warp[{emu::self().block, emu::self().thread / 32}];
    const u32 lane = emu::self().thread % 32;
    rows[lane] = address;
    __syncwarp();
    for (u32 i = 0; i < 4; ++i) std::memcpy(&m[i], shared_memory() + rows[8 * i + lane / 4] + lane % 4 * 4, 4);
    __syncwarp();
}
inline void load_matrix_x4_transposed(u32 address, u32 (&m)[4]) {
    auto& rows = emu::rows_of_warp[{emu::self().block, emu::self().thread / 32}];
    const u32 lane = emu::self().thread % 32;
    rows[lane] = address;
    __syncwarp();
    for (u32 i = 0; i < 4; ++i) {
        u16 both[2];
        for (u32 j = 0; j < 2; ++j)
            std::memcpy(&both[j], shared_memory() + rows[8 * i + lane % 4 * 2 + j] + lane / 4 * 2, 2);
        m[i] = both[0] | static_cast<u32>(both[1]) << 16;
    }
    __syncwarp();
}
// Lands like copy_async.
inline void copy_async_or_zero(u32 to, const void* from, bool wanted) {
    const u8* source = wanted ? static_cast<const u8*>(from) : emu::zeros;
    if (wanted && !emu::known(source, 16)) emu::fail("a piece lies in no tensor");
    emu::check_bulk(source, to, 16);
    emu::self().asked.push_back({shared_memory() + to, source, 16, nullptr, {}});
    if (emu::machine->random() % 2) emu::finish_store(emu::self().asked.back());
}
// Sums go through k in its order. PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type".
inline void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    auto& words = emu::fragments[{emu::self().block, emu::self().thread / 32}];
    const u32 lane = emu::self().thread % 32, mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    std::memcpy(words[lane].data(), mine, sizeof mine);
    __syncwarp();
    const auto number = [&](u32 thread, u32 word, u32 k) {
        return k % 2 ? bf16_high(words[thread][word]) : bf16_low(words[thread][word]);
    };
    for (u32 i = 0; i < 4; ++i) {
        const u32 row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = 0;
        for (u32 k = 0; k < 16; ++k)
            sum += number(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k) * number(column * 4 + k % 8 / 2, 4 + k / 8, k);
        d[i] += sum;
    }
    __syncwarp();
}
inline float load_constant(const float* from) { return *from; }
inline float tanh_fast(float x) { return std::tanh(x); }
inline void store_shared_16(u32 address, uint4 v) { store_shared(address, v); }

}  // namespace ptx
