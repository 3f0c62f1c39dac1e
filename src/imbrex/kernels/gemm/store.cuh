// The ends of the grouped GEMM: a tile from registers, through SwiGLU or weights, to memory.
#pragma once
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
struct Stores {
    u32 staging;
    int group, thread;
    u32 turn = 0;
    __device__ __forceinline__ u32 begin() {
        if (thread == 0) ptx::bulk_wait_read<PANELS - 1>();
        ptx::named_barrier(1 + group, 128);
        return staging + (turn++ % PANELS) * kPanel;
    }
    // All of them, for one commit.
    __device__ __forceinline__ u32 begin_all() {
        if (thread == 0) ptx::bulk_wait_read<0>();
        ptx::named_barrier(1 + group, 128);
        return staging;
    }
    // The next three at once; three commits follow.
    __device__ __forceinline__ void begin(u32 (&panels)[3]) {
        if (thread == 0) ptx::bulk_wait_read < PANELS<3 ? 0 : PANELS - 3>();
        ptx::named_barrier(1 + group, 128);
#pragma unroll
        for (int i = 0; i < 3; ++i) panels[i] = staging + (turn++ % PANELS) * kPanel;
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

// The weights of this lane's two rows (EPILOGUE 3).
struct RowWeights {
    float of[2] = {1.f, 1.f};
    __device__ __forceinline__ void load(const float* weights, int row, int rows) {
        if constexpr (EPILOGUE == 3) {
            const int mine = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
            for (int i = 0; i < 2; ++i)
                of[i] = mine + 8 * i < rows ? ptx::load_constant(weights + row + mine + 8 * i) : 0.f;
        }
    }
};

// Part kPart of kParts of 64 rows of a tile, on its way to memory: `open` waits until there is staging,
// `write` reads the sums, `close` sends what is left. Products that take the sums' registers may begin before
// `close`. `row` is the first row of the output and `rows` (1..64) of them exist.
template <int kPart, int kParts>
struct Results {
    static constexpr int kPer = EPILOGUE == 2 ? 3 : 1;  // panels to 64 columns: the result, gate, up
    static constexpr int kPanels = (EPILOGUE == 6 ? kBlockN / 32 : kPer * kOutputs) / kParts;
    // At one stroke: 1 % of the time of small experts; in pairs of blocks long products lose 3 % by it.
    static constexpr bool kStroke = FP8 && CLUSTER == 1 && !kSwiglu && kPanels <= PANELS;
    const TensorMap *map_d, *map_h;
    Stores& stores;
    const Slot& tile;
    int row, rows;
    u32 staging = 0;

    __device__ __forceinline__ void open() { staging = kStroke ? stores.begin_all() : stores.begin(); }

    __device__ __forceinline__ void write(const float (&d)[kBlockN / 2], const RowWeights& weights) {
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
    __device__ __forceinline__ void fill(int i, u32 panel, const float (&d)[kBlockN / 2],
                                         const RowWeights& weights) {
        const int c = (kPart * kPanels + i) / kPer, kept = i % kPer;
        const float* sums = d + (EPILOGUE == 6 ? 16 : kApart / 2) * c;
        if constexpr (EPILOGUE == 6) return write_floats(panel, sums);
        write_panel(panel, [&](int j) {
            if constexpr (EPILOGUE == 3) return sums[j] * weights.of[(j >> 1) & 1];
            if constexpr (kSwiglu)
                return kept ? sums[(kept - 1) * kUp / 2 + j] : silu(sums[j]) * sums[kUp / 2 + j];
            return sums[j];
        });
    }
    __device__ __forceinline__ void send(int i, u32 panel) {
        const int c = (kPart * kPanels + i) / kPer, kept = i % kPer;
        const int first = (EPILOGUE == 6 ? 32 : 64) * c, column = tile.column + first;
        if (first >= tile.columns) return;
        if constexpr (EPILOGUE == 5 || EPILOGUE == 6)
            ptx::tma_add_3d(map_d, panel, column, row, tile.expert);
        else if constexpr (kWgrad)
            ptx::tma_store_3d(map_d, panel, column, row, tile.expert);
        else if (kept)
            ptx::tma_store_4d(map_h, panel, column, kept - 1, 64 - rows, row + rows);
        else
            ptx::tma_store_3d(map_d, panel, column, 64 - rows, row + rows);
    }
};

// All of them.
__device__ __forceinline__ void store_block(const float (&d)[kBlockN / 2], const TensorMap* map_d,
                                            const TensorMap* map_h, Stores& stores, const Slot& tile, int row,
                                            int rows, const float* weights) {
    RowWeights mine;
    mine.load(weights, row, rows);
    Results<0, 1> results{map_d, map_h, stores, tile, row, rows};
    results.open();
    results.write(d, mine);
    results.close();
}

}  // namespace gemm
