// The ends of the grouped GEMM: a tile from registers, through SwiGLU or weights, to memory.
#pragma once
#include "gemm_shape.cuh"

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// One 64 x 64 panel from registers to swizzled shared memory; `value(i)` gives the accumulator i of the panel
// (0..31).
template <typename Value>
__device__ __forceinline__ void write_panel(u32 panel, int warp, int lane, Value value) {
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

// Stored at one stroke: 1 % of the time of small experts; in pairs of blocks long products lose 3 % by it.
constexpr bool kWhole = FP8 && CLUSTER == 1 && PANELS >= kOutputs && (EPILOGUE == 0 || EPILOGUE == 3);

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

// 64 rows of a tile; `row` is their first row of the output and `rows` (1..64) of them exist.
__device__ __forceinline__ void store_block(const float (&d)[kBlockN / 2], const TensorMap* map_d,
                                            const TensorMap* map_h, Stores& stores, const Slot& tile, int row,
                                            int rows, const float* weights) {
    const int warp = stores.thread / 32, lane = stores.thread % 32;
    float scale[2] = {1.f, 1.f};
    if constexpr (EPILOGUE == 3) {
        const int mine = 16 * warp + lane / 4;
        scale[0] = mine < rows ? weights[row + mine] : 0.f;
        scale[1] = mine + 8 < rows ? weights[row + mine + 8] : 0.f;
    }
    const auto value = [&](int c, int i) {
        if constexpr (kSwiglu) return silu(d[32 * c + i]) * d[kBlockN / 4 + 32 * c + i];
        if constexpr (EPILOGUE == 3) return d[32 * c + i] * scale[(i >> 1) & 1];
        return d[32 * c + i];
    };
    if constexpr (kWhole) {
        const u32 panels = stores.begin_all();
#pragma unroll
        for (int c = 0; c < kOutputs; ++c)
            if (64 * c < tile.columns)
                write_panel(panels + c * kPanel, warp, lane, [&](int i) { return value(c, i); });
        stores.finish([&] {
            for (int c = 0; c < kOutputs && 64 * c < tile.columns; ++c)
                ptx::tma_store_3d(map_d, panels + c * kPanel, tile.column + 64 * c, 64 - rows, row + rows);
        });
    } else {
#pragma unroll
        for (int c = 0; c < kOutputs; ++c) {
            const int column = tile.column + 64 * c;
            if (64 * c >= tile.columns) break;
            u32 panel = stores.begin();
            write_panel(panel, warp, lane, [&](int i) { return value(c, i); });
            stores.finish([&] {
                if constexpr (EPILOGUE == 5)
                    ptx::tma_add_3d(map_d, panel, column, row, tile.expert);
                else if constexpr (kWgrad)
                    ptx::tma_store_3d(map_d, panel, column, row, tile.expert);
                else
                    ptx::tma_store_3d(map_d, panel, column, 64 - rows, row + rows);
            });
            if constexpr (EPILOGUE == 2) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    panel = stores.begin();
                    write_panel(panel, warp, lane,
                                [&](int i) { return d[half * (kBlockN / 4) + 32 * c + i]; });
                    stores.finish(
                        [&] { ptx::tma_store_4d(map_h, panel, column, half, 64 - rows, row + rows); });
                }
            }
        }
    }
}
