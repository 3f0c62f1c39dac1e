// The ends of the grouped GEMM: a tile from registers, through SwiGLU or weights, to memory.
#pragma once
#ifndef IN_ONE_LAUNCH
#define IN_ONE_LAUNCH 0
#endif
#include "gemm/shape.cuh"

namespace gemm {

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// One 64 x 64 panel from registers to swizzled shared memory; `value(i)` gives the accumulator i of the panel
// (0..31).
template <typename Value>
__device__ __forceinline__ void write_panel(u32 panel, Value value) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int row = 16 * warp + (lane & 7) + 8 * ((lane >> 3) & 1);
    const u32 line = panel + row * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 unit = (2 * i + (lane >> 4)) ^ (row & 7);
        ptx::store_matrix_x4(line + unit * 16, ptx::pack_bf16(value(8 * i), value(8 * i + 1)),
                             ptx::pack_bf16(value(8 * i + 2), value(8 * i + 3)),
                             ptx::pack_bf16(value(8 * i + 4), value(8 * i + 5)),
                             ptx::pack_bf16(value(8 * i + 6), value(8 * i + 7)));
    }
}

// The same of 64 x 32 values in float32.
__device__ __forceinline__ void write_floats(u32 panel, const float* sums) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int line = 16 * warp + lane / 4 + 8 * (i & 1), unit = (i / 2 * 2 + lane % 4 / 2) ^ (line & 7);
        ptx::store_shared_floats(panel + line * 128 + unit * 16 + lane % 2 * 8, sums[2 * i], sums[2 * i + 1]);
    }
}

// Panels leave through PANELS buffers in turn: before one is written again its last store must have been
// read.
template <class C>
struct Stores {
    u32 staging;
    int group, thread;
    u32 turn = 0;
    __device__ __forceinline__ u32 begin() {
        if (thread == 0) ptx::bulk_wait_read<C::kPanels - 1>();
        ptx::named_barrier(1 + group, 128);
        return staging + (turn++ % C::kPanels) * kPanel;
    }
    // All of them, for one commit.
    __device__ __forceinline__ u32 begin_all() {
        if (thread == 0) ptx::bulk_wait_read<0>();
        ptx::named_barrier(1 + group, 128);
        return staging;
    }
    // The next three at once; three commits follow.
    __device__ __forceinline__ void begin(u32 (&panels)[3]) {
        if (thread == 0) ptx::bulk_wait_read < C::kPanels<3 ? 0 : C::kPanels - 3>();
        ptx::named_barrier(1 + group, 128);
#pragma unroll
        for (int i = 0; i < 3; ++i) panels[i] = staging + (turn++ % C::kPanels) * kPanel;
    }
    template <typename Store>
    __device__ __forceinline__ void finish(Store store) {
        ptx::fence_async_shared();
        ptx::named_barrier(1 + group, 128);
        if (thread == 0) {
            store();
            ptx::bulk_commit();
        }
    }
};

__device__ __forceinline__ float load_weight(const float* from) {
#if IN_ONE_LAUNCH  // with what writes them (fused/few.cu)
    return __uint_as_float(ptx::load_relaxed_sys(reinterpret_cast<const u32*>(from)));
#else
    return ptx::load_constant(from);
#endif
}

// The weights of this lane's two rows (Epilogue::kWeighted).
template <class C>
struct RowWeights {
    float of[2] = {1.f, 1.f};
    __device__ __forceinline__ void load(const float* weights, int row, int rows) {
        if constexpr (C::kWeighted) {
            const int mine = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
            for (int i = 0; i < 2; ++i)
                of[i] = mine + 8 * i < rows ? load_weight(weights + row + mine + 8 * i) : 0.f;
        }
    }
};

// Where a product's panels of staging go: to tensors, by the copy engine. `rows`, `half`, `matrix` and `add`
// run in one thread, which commits what it sent. `column`: of the output, the panel's first (64 of bf16, 32
// of float32, 128 of fp8). Another sink (gemm/run.cuh) has the same functions, const.
struct StoreTiles {
    const TensorMap *map_d, *map_h;
    // Rows `row` .. `row + rows - 1` (64 at most); all 64 lines lie in the panel.
    __device__ __forceinline__ void rows(u32 panel, int column, int row, int rows) const {
        ptx::tma_store_3d(map_d, panel, column, 64 - rows, row + rows);
    }
    // The same of gate (half 0) or up, kept beside SwiGLU's result, or of their gradients.
    __device__ __forceinline__ void half(u32 panel, int column, int half, int row, int rows) const {
        ptx::tma_store_4d(map_h, panel, column, half, 64 - rows, row + rows);
    }
    // 64 lines of an expert's gradient of weights; `add`: to what is there.
    __device__ __forceinline__ void matrix(u32 panel, int column, int row, const Slot& tile) const {
        ptx::tma_store_3d(map_d, panel, column, row, tile.expert);
    }
    __device__ __forceinline__ void add(u32 panel, int column, int row, const Slot& tile) const {
        ptx::tma_add_3d(map_d, panel, column, row, tile.expert);
    }
    // (tile, row, rows, thread of 128), all threads of a group in the order of its tiles: its rows of the
    // tile, `row` .. `row + rows - 1`, are sent by thread 0, whose `bulk_wait` tells when they are written.
    __device__ __forceinline__ void sent(const Slot&, int, int, int) const {}
    // The same of a tile in which the group has no rows.
    __device__ __forceinline__ void passed(int) const {}
    // All of the group's tiles are written.
    __device__ __forceinline__ void ended(int) const {}
};

// Part kPart of kParts of 64 rows of a tile, on its way to memory: `open` waits until there is staging,
// `write` reads the sums, `close` sends what is left. Products that take the sums' registers may begin before
// `close`. `row` is the first row of the output and `rows` (1..64) of them exist.
template <class C, class Sink, int kPart, int kParts>
struct Results {
    static constexpr int kPer = C::kKeep ? 3 : 1;  // panels to 64 columns: the result, gate, up
    static constexpr int kPanels = (C::kAddFloats ? C::kBlockN / 32 : kPer * C::kOutputs) / kParts;
    // At one stroke: 1 % of the time of small experts; in pairs of blocks long products lose 3 % by it.
    static constexpr bool kStroke = C::kFp8 && C::kCluster == 1 && !C::kSwiglu && kPanels <= C::kPanels;
    const Sink& sink;
    Stores<C>& stores;
    const Slot& tile;
    int row, rows;
    u32 staging = 0;

    __device__ __forceinline__ void open() { staging = kStroke ? stores.begin_all() : stores.begin(); }

    __device__ __forceinline__ void write(const float (&d)[C::kBlockN / 2], const RowWeights<C>& weights) {
#pragma unroll
        for (int i = 0; i < kPanels; ++i) {
            if (!kStroke && i > 0) {
                stores.finish([&] { send(i - 1, staging); });
                staging = stores.begin();
            }
            fill(i, kStroke ? staging + i * kPanel : staging, d, weights);
        }
    }

    __device__ __forceinline__ void close() {
        stores.finish([&] {
#pragma unroll
            for (int i = kStroke ? 0 : kPanels - 1; i < kPanels; ++i)
                send(i, kStroke ? staging + i * kPanel : staging);
        });
    }

   private:
    __device__ __forceinline__ void fill(int i, u32 panel, const float (&d)[C::kBlockN / 2],
                                         const RowWeights<C>& weights) {
        const int c = (kPart * kPanels + i) / kPer, kept = i % kPer;
        const float* sums = d + (C::kAddFloats ? 16 : C::kApart / 2) * c;
        if constexpr (C::kAddFloats) return write_floats(panel, sums);
        write_panel(panel, [&](int j) {
            if constexpr (C::kWeighted) return sums[j] * weights.of[(j >> 1) & 1];
            if constexpr (C::kSwiglu)
                return kept ? sums[(kept - 1) * C::kUp / 2 + j] : silu(sums[j]) * sums[C::kUp / 2 + j];
            return sums[j];
        });
    }
    __device__ __forceinline__ void send(int i, u32 panel) {
        const int c = (kPart * kPanels + i) / kPer, kept = i % kPer;
        const int first = (C::kAddFloats ? 32 : 64) * c, column = tile.column + first;
        if (first >= tile.columns) return;
        if constexpr (C::kAdds)
            sink.add(panel, column, row, tile);
        else if constexpr (C::kWgrad)
            sink.matrix(panel, column, row, tile);
        else if (kept)
            sink.half(panel, column, kept - 1, row, rows);
        else
            sink.rows(panel, column, row, rows);
    }
};

// All of them.
template <class C, class Sink>
__device__ __forceinline__ void store_block(const float (&d)[C::kBlockN / 2], const Sink& sink,
                                            Stores<C>& stores, const Slot& tile, int row, int rows,
                                            const float* weights) {
    RowWeights<C> mine;
    mine.load(weights, row, rows);
    Results<C, Sink, 0, 1> results{sink, stores, tile, row, rows};
    results.open();
    results.write(d, mine);
    results.close();
}

}  // namespace gemm
