// The end of a backward's product: SwiGLU's gradient on the gradient of its result.
//
// Design record, H200. SwiGLU's gradient here, us of the whole product (in brackets with a kernel of its own
// after it), and of the product alone in those tiles:
//                                    Qwen2      Qwen3      DeepSeek-V3  Mixtral
//   4-byte loads of gate and up      211 (215)  131 (120)  829 (775)    3013 (3140)
//   16 bytes a lane, a panel ahead   190 (215)  120 (121)  840 (798)    3201 (3337)
//   the product alone                145        90         744          2542
// With 4 bytes the epilogue took three times as long as the other group's product, so only part of it was
// hidden; with 16 it still loses with DeepSeek-V3's D of 7168, hence only for D up to 4096. With 256 columns
// its registers spill.
#pragma once
#include "gemm/store.cuh"

namespace gemm {

// Gate and up of the next panel of 64 x 64, on their way from memory while the one before, or the product, is
// computed. A warp has the 16 rows that its lanes' sums belong to; a lane has unit (8 columns) lane % 8 of
// rows lane / 8, 4 + lane / 8, ...
struct Kept {
    uint4 gate[4], up[4];

    // row: the block's first; `panel`: which 64 columns of the tile.
    __device__ __forceinline__ void load(const Slopes& slopes, const Slot& tile, int row, int rows, int f,
                                         int panel) {
        const int lane = threadIdx.x % 32, mine = threadIdx.x % 128 / 32 * 16 + lane / 8,
                  column = 64 * panel + lane % 8 * 8;
        const uint4* from = slopes.gate_up + i64(row + mine) * (f / 4) + (tile.column + column) / 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool wanted = mine + 4 * i < rows && column < tile.columns;
            gate[i] = wanted ? from[i64(i) * f] : uint4{0, 0, 0, 0};
            up[i] = wanted ? from[i64(i) * f + f / 8] : uint4{0, 0, 0, 0};
        }
    }
    __device__ __forceinline__ void store(u32 gates, u32 ups) const {
        const int lane = threadIdx.x % 32, mine = threadIdx.x % 128 / 32 * 16 + lane / 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int line = mine + 4 * i;
            const u32 at = line * 128 + (lane % 8 ^ (line & 7)) * 16;
            ptx::store_shared_16(gates + at, gate[i]);
            ptx::store_shared_16(ups + at, up[i]);
        }
        __syncwarp();
    }
};

// Gate and up of the 64 kBlocksM rows of a group, and of a tile's columns, into L2: a row a thread.
template <class C>
__device__ __forceinline__ void ask_for_kept(const Slopes& slopes, const Slot& tile, int row, int rows, int f,
                                             int thread) {
    if (thread >= least(rows, 64 * C::kBlocksM)) return;
    const uint4* from = slopes.gate_up + i64(row + thread) * (f / 4) + tile.column / 8;
    const u32 bytes = 2 * least(tile.columns, C::kBlockN);
    ptx::prefetch_l2(from, bytes);
    ptx::prefetch_l2(from + f / 8, bytes);
}

struct Pair {
    u32 act, d_gate, d_up;
};

// Two columns of a row. gate 0, up 2, d 3, weight .5: silu 0, silu' .5; d_gate = 3 * .5 * 2 * .5 = 1.5, d_up
// 0, act 0.
__device__ __forceinline__ Pair slopes_of(u32 gates, u32 ups, float d_low, float d_high, float weight,
                                          float& d_weight) {
    float act[2], d_gate[2], d_up[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float gate = i ? ptx::bf16_high(gates) : ptx::bf16_low(gates),
                    up = i ? ptx::bf16_high(ups) : ptx::bf16_low(ups);
        const float d = i ? d_high : d_low, slope = d * weight;
        const float sigmoid = __fdividef(1.f, 1.f + __expf(-gate)), silu = gate * sigmoid;
        d_weight += silu * up * d;
        act[i] = silu * up * weight;
        d_gate[i] = slope * up * sigmoid * (1.f + gate * (1.f - sigmoid));
        d_up[i] = slope * silu;
    }
    return {ptx::pack_bf16(act[0], act[1]), ptx::pack_bf16(d_gate[0], d_gate[1]),
            ptx::pack_bf16(d_up[0], d_up[1])};
}

// 64 rows of a tile of d_act; `row`, `rows` as in store_block, f: columns of d_act. `kept`: of the first
// panel; it gets that of the next block of `next_rows` rows where there is one. Gate and up pass through the
// panels that their gradients leave by.
template <class C, class Sink>
__device__ __forceinline__ void store_slopes(const float (&d)[C::kBlockN / 2], Kept& kept,
                                             const Sink& sink, Stores<C>& stores, const Slot& tile, int row,
                                             int rows, int next_rows, int f, const float* weights,
                                             const Slopes& slopes) {
    const int warp = stores.thread / 32, lane = stores.thread % 32, mine = 16 * warp + lane / 4;
    const bool live[2] = {mine < rows, mine + 8 < rows};
    float weight[2] = {1.f, 1.f}, d_weight[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (weights != nullptr) weight[half] = live[half] ? weights[row + mine + 8 * half] : 0.f;
    const int line = 16 * warp + (lane & 7) + 8 * ((lane >> 3) & 1);
#pragma unroll
    for (int c = 0; c < C::kOutputs; ++c) {
        if (64 * c >= tile.columns) break;
        if (!C::kKeptAhead) kept.load(slopes, tile, row, rows, f, c);
        u32 panels[3];  // of gate, up, act
        stores.begin(panels);
        kept.store(panels[0], panels[1]);
        if constexpr (C::kKeptAhead) {
            if (c + 1 < C::kOutputs && 64 * (c + 1) < tile.columns)
                kept.load(slopes, tile, row, rows, f, c + 1);
            else if (next_rows > 0)
                kept.load(slopes, tile, row + 64, next_rows, f, 0);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // 16 columns
            const u32 at = line * 128 + ((2 * i + (lane >> 4)) ^ (line & 7)) * 16;
            u32 gate[4], up[4], act[4];
            ptx::load_matrix_x4(panels[0] + at, gate);
            ptx::load_matrix_x4(panels[1] + at, up);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* sum = d + 32 * c + 8 * i + 2 * j;
                const Pair pair = slopes_of(gate[j], up[j], sum[0], sum[1], weight[j & 1], d_weight[j & 1]);
                act[j] = pair.act, gate[j] = pair.d_gate, up[j] = pair.d_up;
            }
            ptx::store_matrix_x4(panels[0] + at, gate[0], gate[1], gate[2], gate[3]);
            ptx::store_matrix_x4(panels[1] + at, up[0], up[1], up[2], up[3]);
            ptx::store_matrix_x4(panels[2] + at, act[0], act[1], act[2], act[3]);
        }
        ptx::fence_async_shared();
        ptx::named_barrier(1 + stores.group, 128);
        if (stores.thread == 0) {
            const int column = tile.column + 64 * c;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                sink.half(panels[half], column, half, row, rows);
                ptx::bulk_commit();
            }
            if (slopes.keep) sink.rows(panels[2], column, row, rows);
            ptx::bulk_commit();
        }
    }
    if (weights == nullptr) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int offset = 1; offset < 4; offset *= 2)
            d_weight[half] += __shfl_xor_sync(0xffffffffu, d_weight[half], offset);
        if (lane % 4 == 0 && live[half])
            slopes.d_weight[i64(tile.column / C::kBlockN) * slopes.rows + row + mine + 8 * half] =
                d_weight[half];
    }
}

}  // namespace gemm
