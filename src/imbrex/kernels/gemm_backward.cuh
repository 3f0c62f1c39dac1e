// The ends of the backward's products: SwiGLU's gradient on the gradient of its result, and sums into existing gradients.
#pragma once
#include "gemm_store.cuh"

// gate_up: pairs of bf16 [R, 2F]; act is stored where `keep` is not 0; d_weight [tiles of columns, rows] float32 gets, of
// every tile, sum_f act d_act, where `weights` is given (a fixed order: the sum over tiles is another kernel's).
struct Slopes {
    const u32* gate_up;
    float* d_weight;
    int rows, keep;
};

constexpr int kLoads = 16;  // of gate and of up at once

struct Pair {
    u32 act, d_gate, d_up;
};

// Two columns of a row. gate 0, up 2, d 3, weight .5: silu 0, silu' .5; d_gate = 3 * .5 * 2 * .5 = 1.5, d_up 0, act 0.
__device__ __forceinline__ Pair slopes_of(u32 gates, u32 ups, float d_low, float d_high, float weight, float& d_weight) {
    float act[2], d_gate[2], d_up[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float gate = i ? ptx::bf16_high(gates) : ptx::bf16_low(gates), up = i ? ptx::bf16_high(ups) : ptx::bf16_low(ups);
        const float d = i ? d_high : d_low, slope = d * weight;
        const float sigmoid = __fdividef(1.f, 1.f + __expf(-gate)), silu = gate * sigmoid;
        d_weight += silu * up * d;
        act[i] = silu * up * weight;
        d_gate[i] = slope * up * sigmoid * (1.f + gate * (1.f - sigmoid));
        d_up[i] = slope * silu;
    }
    return {ptx::pack_bf16(act[0], act[1]), ptx::pack_bf16(d_gate[0], d_gate[1]), ptx::pack_bf16(d_up[0], d_up[1])};
}

__device__ __forceinline__ void write_words(u32 panel, int warp, int lane, const u32 (&words)[16]) {
    const int row = 16 * warp + (lane & 7) + 8 * ((lane >> 3) & 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 unit = (2 * i + (lane >> 4)) ^ (row & 7);
        ptx::store_matrix_x4(panel + row * 128 + unit * 16, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    }
}

// 64 rows of a tile of d_act; `row`, `rows` as in store_block. f: columns of d_act.
__device__ __forceinline__ void store_slopes(const float (&d)[kBlockN / 2], const TensorMap* map_act, const TensorMap* map_slopes,
                                             Stores& stores, const Slot& tile, int row, int rows, int f, const float* weights,
                                             const Slopes& slopes) {
    const int warp = stores.thread / 32, lane = stores.thread % 32, mine = 16 * warp + lane / 4;
    const bool live[2] = {mine < rows, mine + 8 < rows};
    float weight[2] = {1.f, 1.f}, d_weight[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (weights != nullptr) weight[half] = live[half] ? weights[row + mine + 8 * half] : 0.f;
    const u32* from[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        from[i][0] = slopes.gate_up + i64(row + (live[i] ? mine + 8 * i : 0)) * f + tile.column / 2 + lane % 4;
        from[i][1] = from[i][0] + f / 2;
    }
#pragma unroll
    for (int c = 0; c < kOutputs; ++c) {
        const int column = tile.column + 64 * c;
        if (64 * c >= tile.columns) break;
        u32 gate[16], up[16], act[16];
#pragma unroll
        for (int first = 0; first < 16; first += kLoads) {
#pragma unroll
            for (int i = first; i < first + kLoads; ++i) {
                const bool wanted = 64 * c + 8 * (i / 2) < tile.columns;
                gate[i] = wanted ? from[i & 1][0][32 * c + 4 * (i / 2)] : 0;
                up[i] = wanted ? from[i & 1][1][32 * c + 4 * (i / 2)] : 0;
            }
#pragma unroll
            for (int i = first; i < first + kLoads; ++i) {
                const Pair pair = slopes_of(gate[i], up[i], d[32 * c + 2 * i], d[32 * c + 2 * i + 1], weight[i & 1], d_weight[i & 1]);
                act[i] = pair.act, gate[i] = pair.d_gate, up[i] = pair.d_up;
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 panel = stores.begin();
            if (half == 0)
                write_words(panel, warp, lane, gate);
            else
                write_words(panel, warp, lane, up);
            stores.finish([&] { ptx::tma_store_4d(map_slopes, panel, column, half, 64 - rows, row + rows); });
        }
        if (slopes.keep) {
            const u32 panel = stores.begin();
            write_words(panel, warp, lane, act);
            stores.finish([&] { ptx::tma_store_3d(map_act, panel, column, 64 - rows, row + rows); });
        }
    }
    if (weights == nullptr) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int offset = 1; offset < 4; offset *= 2) d_weight[half] += __shfl_xor_sync(0xffffffffu, d_weight[half], offset);
        if (lane % 4 == 0 && live[half])
            slopes.d_weight[i64(tile.column / kBlockN) * slopes.rows + row + mine + 8 * half] = d_weight[half];
    }
}

// 64 rows of a weight gradient, added to a float32 one: panels of 32 columns.
__device__ __forceinline__ void add_floats(const float (&d)[kBlockN / 2], const TensorMap* map_d, Stores& stores, const Slot& tile,
                                           int row) {
    const int warp = stores.thread / 32, lane = stores.thread % 32;
#pragma unroll
    for (int c = 0; c < kBlockN / 32; ++c) {
        if (32 * c >= tile.columns) break;
        const u32 panel = stores.begin();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int line = 16 * warp + lane / 4 + 8 * (i & 1), unit = (i / 2 * 2 + lane % 4 / 2) ^ (line & 7);
            ptx::store_shared_floats(panel + line * 128 + unit * 16 + lane % 2 * 8, d[16 * c + 2 * i], d[16 * c + 2 * i + 1]);
        }
        stores.finish([&] { ptx::tma_add_3d(map_d, panel, tile.column + 32 * c, row, tile.expert); });
    }
}
