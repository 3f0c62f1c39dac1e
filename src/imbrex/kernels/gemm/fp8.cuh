// The fp8 products of the grouped GEMM: e4m3 operands with a float32 scale for every 1 x 128 of A and 128 x
// 128 of B (DeepSeek-V3 technical report, section 3.3.2), and SwiGLU whose result leaves as fp8 again.
//
// The tensor cores keep 14 bits of an fp8 sum, so the sum over 128 of k is taken to the float32 registers,
// times its two scales, before the next one starts (section 3.3.2 again). A group has 128 registers a thread
// of sums (64 x 256) and 64 for products under way:
//   WAVE 128   one product of 64 x 128; while a group adds it, the other group's multiplies (two groups)
//   WAVE 64    two of 64 x 64, of which one multiplies while the other is added (one group)
//
// Example of one value, 4 of k: a = 1 2 -4 0 with scale .5, b = 1 1 1 1 with scale 2: sum -1, times 1, is -1.
//
// Design record, H200. A tile of 128 x 256 in cycles (1.5 GHz while it runs): a step of 128 of k needs 1024
// of the tensor cores and takes 1400; 1240 with the sums left out; 110 of them to see that a stage is full.
// Besides 4300 a tile, a third of the time at F = 768: 340 to learn of it, 1500 to begin and end, 2300 to
// store it (SwiGLU 3900; with one tanh a value 2900).
//
//   us of gate/up, down               Qwen2           Qwen3           DeepSeek-V3    Phi-3.5
//     next tile and its scales asked for before this one is stored, tanh, scales one after the other
//                          before     184, 100        108, 68         854, 451       1454, 724
//                          after      168, 95         103, 61         826, 437       1386, 699
//     SwiGLU's largest magnitude by |x| in the maximum and four chains (748 -> 616 instructions a warp)
//                                     180.1 -> 177.6  113.5 -> 111.6
//     the tile stored at one stroke   101.4 -> 99.6   63.1 -> 61.5
//       in pairs slower: Mixtral 1576 -> 1633, Phi-3.5 702 -> 715, so not there
//   An operand that is not known to be uniform costs four moves to uniform registers a product: 1046 -> 1085
//     TFLOP/s (DeepSeek-V3 gate/up). WAVE 128 and the whole tile staged: 1 to 3 % more.
//   cuBLAS with the same scales, dense 8192^3: 1351 TFLOP/s; without scales 1517.
//
// Rejected (us, against what is here):
//   A from registers (920, 914); groups in turns by step (915 to 920); sums between the instructions of the
//     next wave (919).
//   Tiles of 128 x 128, two blocks an SM (478, 478; Mixtral 1810, 1633: L2).
//   Rows quantised by the producer's idle warps while others multiply, against a kernel before (DeepSeek-V3
//     1516, 1525; Qwen2 352, 324; Qwen3 280, 220): what these warps issue comes out of the products. Of few
//     rows, where weights are all that takes time, they do (ffn/quantised.cuh).
//   The product beside the kernel that quantises its rows, following its flags (Qwen3 197, 200; DeepSeek-V3
//     1504, 1500).
#pragma once
#include "gemm/shape.cuh"
#include "gemm/store.cuh"

namespace gemm {

constexpr int kBlock = 128;        // values that share a scale
constexpr float kLargest = 448.f;  // of e4m3

// a, b: low words of the operands of the first 32 of k; the next 32 lie 32 bytes on, which an operand counts
// in sixteens.
template <class C>
__device__ __forceinline__ void multiply_wave(float (&product)[C::kWave / 2], u32 a, u32 b) {
    constexpr u64 kHigh = ptx::kOperandHigh;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kBlockK / 32; ++i)
        ptx::wgmma_e4m3<C::kWave>(product, kHigh | (a + 2 * i), kHigh | (b + 2 * i), i > 0);
    ptx::wgmma_commit();
}

// Where the scales of a group's 64 rows and of the waves' columns lie, and those of one step in registers.
// Those of rows that are quantised here (kQuantises) come with their stage. kMade: a launch that still runs
// makes those of rows.
template <class C, bool kMade = false>
struct StepScales {
    int row[2], column[C::kScalesN];  // from scales.a and scales.b on
    float a[2], b[C::kScalesN];

    // Those of a tile's first step. source: where rows of A lie, used where GATHER.
    __device__ __forceinline__ void begin(const Scales& scales, const Slot& tile, const i64* source,
                                          int first_row, int columns) {
        const int thread = threadIdx.x % 128, mine = first_row + 16 * (thread / 32) + thread % 32 / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = tile.row + least(mine + 8 * i, tile.rows - 1);
            row[i] = (C::kGather ? static_cast<int>(source[at]) : at) * scales.stride_a;
        }
        const int blocks_n = columns / kBlock, first = tile.column / kBlock;
#pragma unroll
        for (int i = 0; i < C::kScalesN; ++i) {
            const int block = C::kSwiglu ? first + i * blocks_n : least(first + i, blocks_n - 1);
            column[i] = (tile.expert * (C::kSwiglu ? 2 : 1) * blocks_n + block) * tile.steps;
        }
        load(scales, 0);
    }
    // The same of rows that are quantised here. block: the first block of 128 of B's rows; apart: from it to
    // the next.
    __device__ __forceinline__ void begin(const Scales& scales, int steps, int block, int apart) {
        const int thread = threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < 2; ++i) row[i] = 16 * (thread / 32) + thread % 32 / 4 + 8 * i;
#pragma unroll
        for (int i = 0; i < C::kScalesN; ++i) column[i] = (block + i * apart) * steps;
        load(scales, 0);
    }
    __device__ __forceinline__ void load(const Scales& scales, int ahead) {
        if constexpr (!C::kQuantises) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float* from = scales.a + (row[i] += ahead);
                a[i] = kMade ? ptx::load_told(from) : ptx::load_constant(from);
            }
        }
#pragma unroll
        for (int i = 0; i < C::kScalesN; ++i) b[i] = ptx::load_constant(scales.b + (column[i] += ahead));
    }
    // Products of this step's scales; then the next one's are asked for.
    __device__ __forceinline__ void take(float (&scale)[C::kScalesN][2], const Scales& scales, int ahead) {
#pragma unroll
        for (int i = 0; i < 2 * C::kScalesN; ++i) scale[i / 2][i % 2] = a[i % 2] * b[i / 2];
        load(scales, ahead);
    }
};

// One scale after the other: an operand that the next instruction uses again is not read from the registers
// again.
template <class C, bool kFirst>
__device__ __forceinline__ void add_wave(float* sum, const float (&product)[C::kWave / 2], float low,
                                         float high) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < C::kWave / 2; ++i)
            if (i / 2 % 2 == half) sum[i] = (kFirst ? 0.f : sum[i]) + product[i] * (half ? high : low);
}

// One step of a tile. `next`: its scales, which become those `ahead` steps on.
template <class C, bool kFirst, bool kMade>
__device__ __forceinline__ void multiply_step_fp8(float (&d)[C::kBlockN / 2], const Shared<C>& shared,
                                                  const Ring<C>& ring, u32 rows_a, StepScales<C, kMade>& next,
                                                  const Scales& scales, int ahead, u32& patience) {
    float product[C::kProducts][C::kWave / 2], scale[C::kScalesN][2];
    const int stage = uniform(ring.stage);  // else every operand of every product is moved lane 0's way
    const u32 a = (shared.a_of(stage) + rows_a) >> 4, b = shared.b_of(stage) >> 4;
    if constexpr (!C::kQuantises) next.take(scale, scales, ahead);
    ptx::mbarrier_wait(shared.full + 8 * ring.stage, ring.phase, patience);
#pragma unroll
    for (int wave = 0; wave < C::kProducts - 1; ++wave)
        multiply_wave<C>(product[wave], a, b + wave * C::kWave * 8);
    if constexpr (C::kQuantises) {
#pragma unroll
        for (int i = 0; i < 2; ++i) next.a[i] = shared.row_scales[stage * C::kBlockM + next.row[i]];
        next.take(scale, scales, ahead);
    }
#pragma unroll
    for (int wave = 0; wave < C::kWaves; ++wave) {
        constexpr int kAhead = C::kProducts - 1;
        if (wave + kAhead < C::kWaves) {
            multiply_wave<C>(product[(wave + kAhead) % C::kProducts], a, b + (wave + kAhead) * C::kWave * 8);
            ptx::wgmma_wait<kAhead>();
        } else {
            ptx::wgmma_wait<0>();
        }
        ptx::wgmma_results(product[wave % C::kProducts]);
        if (wave == C::kWaves - 1) release_stage<C>(shared.empty + 8 * ring.stage);
        const float (&times)[2] = scale[wave * C::kScalesN / C::kWaves];
        add_wave<C, kFirst>(d + C::kWave / 2 * wave, product[wave % C::kProducts], times[0], times[1]);
    }
}

// All steps of one tile (one at least) for one group that has rows in it; `next`: the scales of its first
// step.
template <class C, bool kMade>
__device__ __forceinline__ void multiply_tile_fp8(float (&d)[C::kBlockN / 2], const Shared<C>& shared,
                                                  int group, const Slot& tile, StepScales<C, kMade>& next,
                                                  const Scales& scales, u32& patience) {
    const u32 rows_a = uniform(group) * kPanel;
    Ring<C> ring(tile.position);
    if constexpr (C::kQuantises) {  // one copy of a step: of few rows code, too, comes from memory
#pragma unroll
        for (int i = 0; i < C::kSums; ++i) d[i] = 0.f;
#pragma unroll 1
        for (int left = tile.steps; left > 0; --left, ring.next())
            multiply_step_fp8<C, false>(d, shared, ring, rows_a, next, scales, left > 1, patience);
    } else {
        multiply_step_fp8<C, true>(d, shared, ring, rows_a, next, scales, tile.steps > 1, patience);
#pragma unroll 1
        for (int left = tile.steps - 1; left > 0; --left) {
            ring.next();
            multiply_step_fp8<C, false>(d, shared, ring, rows_a, next, scales, left > 1, patience);
        }
    }
}

// x / 448 to the last bit: the quotient by the nearest reciprocal is off by an ulp at most, and its rest
// mends it.
__device__ __forceinline__ float scale_of(float largest) {
    constexpr float kInverse = 1.f / kLargest;
    if (!(largest > 1e-24f && largest < 1e24f)) return largest / kLargest;
    const float q = largest * kInverse;
    return __fmaf_rn(-__fmaf_rn(q, kLargest, -largest), kInverse, q);
}

// What brings the largest of 128 to 448, nearly.
__device__ __forceinline__ float inverse_of(float largest) {
    return largest > 1e-30f ? kLargest * ptx::reciprocal(largest) : 0.f;
}

__device__ __forceinline__ float swiglu_fast(float gate, float up) {
    const float half = .5f * gate, both = half * up;  // silu(x) = x / 2 (1 + tanh(x / 2))
    return both * ptx::tanh_fast(half) + both;
}

// SwiGLU of 64 rows x 128 columns, quantised. `row`, `rows` as in store_block.
template <class C, class Sink>
__device__ __forceinline__ void store_block_fp8(float (&d)[C::kBlockN / 2], const Sink& sink,
                                                Stores<C>& stores, const Slot& tile, int row, int rows,
                                                const Scales& scales) {
    const int warp = stores.thread / 32, lane = stores.thread % 32, mine = 16 * warp + lane / 4;
    // Of the low row and the high one; four chains of dependent instructions each.
    float some[2][4] = {}, most[2];
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        d[i] = swiglu_fast(d[i], d[64 + i]);
        float& chain = some[i / 2 % 2][i / 4 % 2 * 2 + i % 2];
        chain = fmaxf(chain, fabsf(d[i]));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) most[i] = fmaxf(fmaxf(some[i][0], some[i][1]), fmaxf(some[i][2], some[i][3]));
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2)
#pragma unroll
        for (int i = 0; i < 2; ++i) most[i] = fmaxf(most[i], __shfl_xor_sync(0xffffffffu, most[i], offset));
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        inverse[i] = inverse_of(most[i]);
        if (lane % 4 == 0 && mine + 8 * i < rows)
            scales.d[i64(row + mine + 8 * i) * scales.stride_d + tile.column / kBlock] = scale_of(most[i]);
    }
    // The unit of 16 bytes i of line l lies at i ^ l % 8; lines l and l + 8 alike.
    const u32 panel = stores.begin(), corner = panel + mine * 128 + (mine & 7) * 16 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 16; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            ptx::store_shared_u16(
                (corner ^ i / 2 * 16) + i % 2 * 8 + half * 1024,
                ptx::pack_e4m3(d[4 * i + 2 * half] * inverse[half], d[4 * i + 2 * half + 1] * inverse[half]));
    stores.finish([&] { sink.rows(panel, tile.column, row, rows); });
}

}  // namespace gemm
