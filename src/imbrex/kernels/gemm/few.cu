// The product of few tokens with a weight whose rows are long: y [T, N] = x [T, K] times w [N, K], all bf16,
// sums in float32. With NORMED, x is a sum of two tensors, which is kept, and y the product of its rows
// normed (RMSNorm). Defines:
//   TILES    of 16 tokens: 1 or 2
//   COLUMNS  of a block, in eights
//   CHUNK    values of k that a warp asks for at once: a multiple of 32
//   STAGES   chunks of a warp in shared memory
//   NORMED   0 or 1
//
// Such a product is as long as reading its weights, and what is in its way is when it begins. So a block asks
// for as much of its weights as shared memory holds, all of them in the models timed, before it waits for the
// kernel that makes x. A block has 8 COLUMNS columns and all of k, of which each of eight warps has an eighth:
// a warp waits for nobody until it has its sums, which the block adds in the order of the warps.
//
// A thread reads 16 bytes of a row, eight values of k, of x and of w alike: which of them an instruction takes
// for its k = 0 is all the same while both take the same. Rows in shared memory stand 64 bytes beside a
// multiple of 128, so that two of them, which eight threads read at once, lie in different banks.
//
// The norm's factor of a token is put to its sums: x times the norm's weight is rounded, not that times the
// factor, so the error is no larger.
//
// Example: T = 3, N = 5120, K = 2048, COLUMNS 5, CHUNK 256, STAGES 1: 128 blocks of 40 columns; warp 2 has k
// from 512 to 767 of all of them, 20480 bytes.
#include "ptx/mma.cuh"

namespace gemm {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kTiles = TILES, kEights = COLUMNS, kChunk = CHUNK;
constexpr int kStages = STAGES, kColumns = 8 * kEights, kTokens = 16 * kTiles, kSteps = kChunk / 32;
constexpr bool kNormed = NORMED;
constexpr int kPitch = 2 * kChunk + 64, kStage = kColumns * kPitch, kRing = kStages * kStage;
constexpr int kPieces = kChunk / 8;  // of 16 bytes, of a row of a chunk

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

// A chunk of the weights of this block, `k` values in.
__device__ __forceinline__ void ask(const Few& few, u32 to, int first, int k) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 8
    for (int i = lane; i < kColumns * kPieces; i += 32) {
        const int row = i / kPieces, piece = i % kPieces;
        const u8* from = few.weight + 2 * (static_cast<i64>(first + row) * few.depth + k) + 16 * piece;
        ptx::copy_async_or_zero(to + row * kPitch + 16 * piece, from, first + row < few.columns);
    }
}

__device__ __forceinline__ u32 summed(u32 a, u32 b) {
    return ptx::pack_bf16(ptx::bf16_low(a) + ptx::bf16_low(b), ptx::bf16_high(a) + ptx::bf16_high(b));
}
__device__ __forceinline__ u32 scaled(u32 a, u32 b, float& squares) {
    const float low = ptx::bf16_low(a), high = ptx::bf16_high(a);
    squares = fmaf(low, low, squares), squares = fmaf(high, high, squares);
    return ptx::pack_bf16(low * ptx::bf16_low(b), high * ptx::bf16_high(b));
}

// Tokens of a chunk in registers: of lane l token l / 4 and eight behind it, values from 8 (l % 4) on of every
// 32.
using Tokens = uint4[2 * kTiles][kSteps];

// The bytes before this thread's values; of a token that there is.
__device__ __forceinline__ i64 values_at(const Few& few, int row, int k) {
    const int lane = static_cast<int>(threadIdx.x) % 32, token = min(row + lane / 4, few.tokens - 1);
    return 2 * (static_cast<i64>(token) * few.depth + k + 8 * (lane % 4));
}

__device__ __forceinline__ void load(const Few& few, const u8* from, int k, Tokens& x) {
#pragma unroll
    for (int half = 0; half < 2 * kTiles; ++half)
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            x[half][step] = *reinterpret_cast<const uint4*>(from + values_at(few, 8 * half, k + 32 * step));
}

__device__ __forceinline__ void add(const Few& few, int k, Tokens& x) {
    Tokens more;
    load(few, few.added, k, more);
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int half = 0; half < 2 * kTiles; ++half) {
        const int token = 8 * half + lane / 4;
        const bool kept = token < few.tokens && token % static_cast<int>(gridDim.x) == blockIdx.x;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint4& v = x[half][step];
            const uint4 by = more[half][step];
            v = {summed(v.x, by.x), summed(v.y, by.y), summed(v.z, by.z), summed(v.w, by.w)};
            if (kept) *reinterpret_cast<uint4*>(few.sum + values_at(few, 8 * half, k + 32 * step)) = v;
        }
    }
}

// By the norm's weight, and the squares of what was there.
__device__ __forceinline__ void scale(const Few& few, int k, Tokens& x, float (&squares)[2 * kTiles]) {
    uint4 weight[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        weight[step] = *reinterpret_cast<const uint4*>(few.norm_weight + 2 * (k + 32 * step) +
                                                       threadIdx.x % 4 * 16);
#pragma unroll
    for (int half = 0; half < 2 * kTiles; ++half)
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint4& v = x[half][step];
            const uint4 by = weight[step];
            float& all = squares[half];
            v = {scaled(v.x, by.x, all), scaled(v.y, by.y, all), scaled(v.z, by.z, all),
                 scaled(v.w, by.w, all)};
        }
}

using Sums = float[kTiles][kEights][4];

__device__ __forceinline__ void multiply(const Tokens& x, u32 stage, Sums& sums) {
    const u32 lane = threadIdx.x % 32, own = stage + lane / 4 * kPitch + lane % 4 * 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int eight = 0; eight < kEights; ++eight) {
            const uint4 w = ptx::load_shared(own + 8 * eight * kPitch + 64 * step);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                const uint4 low = x[2 * tile][step], high = x[2 * tile + 1][step];
                const u32 first[4] = {low.x, high.x, low.y, high.y};
                const u32 second[4] = {low.z, high.z, low.w, high.w};
                ptx::mma_bf16(sums[tile][eight], first, w.x, w.y);
                ptx::mma_bf16(sums[tile][eight], second, w.z, w.w);
            }
        }
}

// This warp's sums, float32 [tokens][columns], where its weights were.
__device__ __forceinline__ void leave(float* part, const Sums& sums) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int eight = 0; eight < kEights; ++eight)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                part[(16 * tile + lane / 4 + i / 2 * 8) * kColumns + 8 * eight + lane % 4 * 2 + i % 2] =
                    sums[tile][eight][i];
}

// The warp's squares of a token, over the four lanes that have its values.
__device__ __forceinline__ void leave_squares(float* part, const float (&squares)[2 * kTiles]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int half = 0; half < 2 * kTiles; ++half) {
        float all = squares[half];
        all += __shfl_xor_sync(0xffffffffu, all, 1), all += __shfl_xor_sync(0xffffffffu, all, 2);
        if (lane % 4 == 0) part[8 * half + lane / 4] = all;
    }
}

// y of the block, from what the warps have left.
__device__ __forceinline__ void finish(const Few& few, const float* parts, const float* squares, int first) {
    for (int i = static_cast<int>(threadIdx.x); i < kTokens * kColumns; i += kThreads) {
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
    const int warp = static_cast<int>(threadIdx.x) / 32, first = static_cast<int>(blockIdx.x) * kColumns;
    const int own = few.depth / kWarps, begin = warp * own, chunks = own / kChunk;
    const u32 ring = ptx::smem_u32(memory) + warp * kRing;
    ptx::launch_dependents();
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
        if (stage < chunks) ask(few, ring + stage * kStage, first, begin + stage * kChunk);
        ptx::copy_commit();
    }
    ptx::wait_for_launches();
    Sums sums = {};
    float squares[2 * kTiles] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const u32 stage = ring + chunk % kStages * kStage;
        const int k = begin + chunk * kChunk;
        Tokens x;
        load(few, few.x, k, x);
        if constexpr (kNormed) {
            if (few.added != nullptr) add(few, k, x);
            scale(few, k, x, squares);
        }
        ptx::copy_wait<kStages - 1>();
        __syncwarp();
        multiply(x, stage, sums);
        __syncwarp();
        if (chunk + kStages < chunks) ask(few, stage, first, k + kStages * kChunk);
        ptx::copy_commit();
    }
    ptx::copy_wait<0>();
    float* parts = reinterpret_cast<float*>(memory);
    float* all_squares = parts + kWarps * (kRing / 4);  // [warps][tokens]
    leave(parts + warp * (kRing / 4), sums);
    if constexpr (kNormed) leave_squares(all_squares + warp * kTokens, squares);
    __syncthreads();
    finish(few, parts, all_squares, first);
}

}  // namespace gemm
