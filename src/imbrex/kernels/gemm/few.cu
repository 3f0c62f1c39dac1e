// The product of few tokens with a weight whose rows are long: y [T, N] = x [T, K] times w [N, K], all bf16,
// sums in float32. With NORMED, x is a sum of two tensors, which is kept, and y the product of its rows
// normed (RMSNorm). Defines:
//   EIGHTS   of tokens: 1, 2 or 4
//   COLUMNS  of a block, in eights
//   CHUNK    values of k that a warp asks for at once: a multiple of 64
//   STAGES   chunks of a warp in shared memory
//   NORMED   0 or 1
//
// Such a product is as long as reading its weights, and what is in its way is when it begins. So a block asks
// for as much of its weights as shared memory holds, all of them in the models timed, before it waits for the
// kernel that makes x. A block has 8 COLUMNS columns and all of k, of which each of eight warps has an
// eighth: a warp waits for nobody until it has its sums, which the block adds in the order of the warps.
//
// Which values of k an instruction takes for its k = 0 is all the same while x and w take the same: thread t
// of four reads 32 bytes, the values from 16 t on of every 64. Rows lie in shared memory as in memory, and
// rows of odd numbers are read second half first, so that eight threads that read at once, of two rows, meet
// in no bank.
//
// The norm's factor of a token is put to its sums: x times the norm's weight is rounded, not that times the
// factor, so the error is no larger.
//
// Example: T = 3, N = 5120, K = 2048, COLUMNS 5, CHUNK 256, STAGES 1: 128 blocks of 40 columns; warp 2 has k
// from 512 to 767 of all of them, 20480 bytes.
#include "ptx/mma.cuh"

namespace gemm {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kEights = EIGHTS, kTiles = (EIGHTS + 1) / 2;
constexpr int kColumns = 8 * COLUMNS, kChunk = CHUNK, kStages = STAGES, kTokens = 8 * kEights;
constexpr bool kNormed = NORMED;
constexpr int kPitch = 2 * kChunk, kStage = kColumns * kPitch, kRing = kStages * kStage;
constexpr int kSteps = kChunk / 64, kSums = kTokens * kColumns;
static_assert(kRing / 4 >= kSums, "a warp leaves its sums where its weights were");

struct Few {
    u8* x;            // [T, K]
    u8* added;        // [T, K], or none: x is the sum already
    u8* norm_weight;  // [K]
    u8* weight;       // [N, K]
    u8* sum;          // [T, K], where something is added
    u8* y;            // [T, N]
    int tokens;
    int columns;
    int depth;
    float eps;
};

// A chunk of the block's weights, `k` values in; columns that there are not are the last one. By a warp.
__device__ __forceinline__ void ask(const Few& few, u32 to, u32 barrier, int first, int k) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane == 0) ptx::mbarrier_expect(barrier, kStage);
    __syncwarp();
    for (int row = lane; row < kColumns; row += 32) {
        const i64 column = min(first + row, few.columns - 1);
        ptx::bulk_load(to + row * kPitch, few.weight + 2 * (column * few.depth + k), kPitch, barrier);
    }
}

// Tokens of a chunk in registers: of lane l, token l / 4 of every eight, both halves of its 32 bytes.
using Tokens = uint4[kEights][kSteps][2];

// The bytes before this thread's values; of a token that there is.
__device__ __forceinline__ i64 values_at(const Few& few, int eight, int k) {
    const int lane = static_cast<int>(threadIdx.x) % 32, token = min(8 * eight + lane / 4, few.tokens - 1);
    return 2 * (static_cast<i64>(token) * few.depth + k + 16 * (lane % 4));
}

__device__ __forceinline__ void load(const Few& few, const u8* from, int k, Tokens& x) {
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight)
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint4* at = reinterpret_cast<const uint4*>(from + values_at(few, eight, k + 64 * step));
            x[eight][step][0] = at[0], x[eight][step][1] = at[1];
        }
}

__device__ __forceinline__ u32 summed(u32 a, u32 b) {
    return ptx::pack_bf16(ptx::bf16_low(a) + ptx::bf16_low(b), ptx::bf16_high(a) + ptx::bf16_high(b));
}

__device__ __forceinline__ void add(const Few& few, int k, Tokens& x) {
    Tokens more;
    load(few, few.added, k, more);
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
        const int token = 8 * eight + lane / 4;
        const bool kept = token < few.tokens && token % static_cast<int>(gridDim.x) == blockIdx.x;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint4& v = x[eight][step][half];
                const uint4 by = more[eight][step][half];
                v = {summed(v.x, by.x), summed(v.y, by.y), summed(v.z, by.z), summed(v.w, by.w)};
                const i64 at = values_at(few, eight, k + 64 * step) + 16 * half;
                if (kept) *reinterpret_cast<uint4*>(few.sum + at) = v;
            }
    }
}

__device__ __forceinline__ u32 scaled(u32 a, u32 b, float& squares) {
    const float low = ptx::bf16_low(a), high = ptx::bf16_high(a);
    squares = fmaf(low, low, squares), squares = fmaf(high, high, squares);
    return ptx::pack_bf16(low * ptx::bf16_low(b), high * ptx::bf16_high(b));
}

// By the norm's weight, and the squares of what was there, in four sums.
__device__ __forceinline__ void scale(const Few& few, int k, Tokens& x, float (&squares)[kEights][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u8* from = few.norm_weight + 2 * (k + 64 * step) + threadIdx.x % 4 * 32 + 16 * half;
            const uint4 by = *reinterpret_cast<const uint4*>(from);
#pragma unroll
            for (int eight = 0; eight < kEights; ++eight) {
                uint4& v = x[eight][step][half];
                float(&all)[4] = squares[eight];
                v = {scaled(v.x, by.x, all[0]), scaled(v.y, by.y, all[1]), scaled(v.z, by.z, all[2]),
                     scaled(v.w, by.w, all[3])};
            }
        }
}

using Sums = float[kTiles][COLUMNS][4];

__device__ __forceinline__ uint4 either(bool first, const uint4& a, const uint4& b) {
    return {first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w};
}

// 32 values of k of every 64: eight of each of four threads.
__device__ __forceinline__ void multiply(const Tokens& x, int step, int half, const uint4& w, int column,
                                         Sums& sums) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        const uint4 low = x[2 * tile][step][half];
        const uint4 high = kEights > 1 ? x[kEights > 1 ? 2 * tile + 1 : 0][step][half] : uint4{};
        const u32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
        ptx::mma_bf16(sums[tile][column], first, w.x, w.y);
        ptx::mma_bf16(sums[tile][column], second, w.z, w.w);
    }
}

__device__ __forceinline__ void multiply(const Tokens& x, u32 stage, Sums& sums) {
    const u32 lane = threadIdx.x % 32, row = lane / 4;
    const u32 odd = row % 2;
    const u32 own = stage + row * kPitch + lane % 4 * 32;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            const u32 at = own + 8 * column * kPitch + 128 * step;
            const uint4 a = ptx::load_shared(at + 16 * odd), b = ptx::load_shared(at + 16 - 16 * odd);
            multiply(x, step, 0, either(odd != 0, b, a), column, sums);
            multiply(x, step, 1, either(odd != 0, a, b), column, sums);
        }
}

// This warp's sums, float32 [tokens][columns], where its weights were.
__device__ __forceinline__ void leave(float* part, const Sums& sums) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight)
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                part[(8 * eight + lane / 4) * kColumns + 8 * column + lane % 4 * 2 + i] =
                    sums[eight / 2][column][eight % 2 * 2 + i];
}

// The warp's squares of a token, over the four lanes that have its values.
__device__ __forceinline__ void leave_squares(float* part, const float (&squares)[kEights][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
        const float(&own)[4] = squares[eight];
        float all = (own[0] + own[1]) + (own[2] + own[3]);
        all += __shfl_xor_sync(0xffffffffu, all, 1), all += __shfl_xor_sync(0xffffffffu, all, 2);
        if (lane % 4 == 0) part[8 * eight + lane / 4] = all;
    }
}

// y of the block, from what the warps have left.
__device__ __forceinline__ void finish(const Few& few, const float* parts, const float* squares, int first) {
    for (int i = static_cast<int>(threadIdx.x); i < kSums; i += kThreads) {
        const int token = i / kColumns, column = first + i % kColumns;
        if (token >= few.tokens || column >= few.columns) continue;
        float y = 0.0f, all = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) y += parts[warp * (kRing / 4) + i];
        if constexpr (kNormed) {
#pragma unroll
            for (int warp = 0; warp < kWarps; ++warp) all += squares[warp * kTokens + token];
            y /= sqrtf(all / static_cast<float>(few.depth) + few.eps);
        }
        u16* to = reinterpret_cast<u16*>(few.y) + static_cast<i64>(token) * few.columns + column;
        *to = static_cast<u16>(ptx::pack_bf16(y, 0.0f));
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) product_of_few(const __grid_constant__ Few few) {
    u8* memory = ptx::shared_memory();
    float* parts = reinterpret_cast<float*>(memory);
    float* all_squares = parts + kWarps * (kRing / 4);  // [warps][tokens], and behind them barriers
    const int warp = static_cast<int>(threadIdx.x) / 32, first = static_cast<int>(blockIdx.x) * kColumns;
    const int own = few.depth / kWarps, begin = warp * own, chunks = own / kChunk;
    const u32 ring = ptx::smem_u32(memory) + warp * kRing;
    const u32 barriers = ptx::smem_u32(all_squares + kWarps * kTokens) + warp * kStages * 8;
    ptx::launch_dependents();
    if (threadIdx.x % 32 == 0) {
        for (int stage = 0; stage < kStages; ++stage) ptx::mbarrier_init(barriers + 8 * stage, 1);
        ptx::fence_barrier_init();
        ptx::fence_async_shared();
    }
    __syncwarp();
    for (int chunk = 0; chunk < min(kStages, chunks); ++chunk)
        ask(few, ring + chunk * kStage, barriers + 8 * chunk, first, begin + chunk * kChunk);
    ptx::wait_for_launches();
    Sums sums = {};
    float squares[kEights][4] = {};
    u32 patience = ptx::kPatience;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int stage = chunk % kStages, k = begin + chunk * kChunk;
        Tokens x;
        load(few, few.x, k, x);
        if constexpr (kNormed) {
            if (few.added != nullptr) add(few, k, x);
            scale(few, k, x, squares);
        }
        ptx::mbarrier_wait(barriers + 8 * stage, chunk / kStages & 1, patience);
        multiply(x, ring + stage * kStage, sums);
        __syncwarp();
        if (chunk + kStages < chunks)
            ask(few, ring + stage * kStage, barriers + 8 * stage, first, k + kStages * kChunk);
    }
    leave(parts + warp * (kRing / 4), sums);
    if constexpr (kNormed) leave_squares(all_squares + warp * kTokens, squares);
    __syncthreads();
    finish(few, parts, all_squares, first);
}

}  // namespace gemm
