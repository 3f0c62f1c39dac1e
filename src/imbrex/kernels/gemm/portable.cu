// Grouped GEMM for GPUs without wgmma, in bf16, from compute capability 8.0 on: mma.sync on tiles that
// cp.async brings. Conventions, layouts and epilogues are those of gemm/gemm.cu, but that SwiGLU's gradient
// is a kernel of its own (ffn/glue.cu) and no other kernel runs beside. Defines:
//   LAYOUT    a number of `Layout`
//   EPILOGUE  a number of `Epilogue`
//   BLOCK_M   rows of a tile: 128, or 32 for few rows an expert; 128 of a weight gradient
//   STAGES    of the ring of loads
//
// Four warps share a tile of BLOCK_M x 128, and go through k in steps of 32. Blocks take tiles in turn, b,
// b + gridDim, ..., in the order of gemm/scheduler.cuh. A sum is one warp's, in the order of k, whatever the
// tile: the same bits by any cut. With SwiGLU a tile has 64 columns of gate and the same 64 of up, and every
// thread has both of its columns.
//
// An operand lies in shared memory as it lies in memory. Where k is contiguous it is lines of 64 bytes, whose
// pieces of 16 are exchanged by line / 2 % 4; where rows or columns are, lines of 256, exchanged by line % 8.
// Eight lines that ldmatrix reads at once then lie in different banks.
//
// Example, forward: 3 rows, 2 experts, ends = {2, 3}, k = 8, 8 columns. Tile 0 has rows 0 and 1 times B[0];
// of its 128 lines of A two are read, the others are zeros, as are pieces from k = 8 on. Tile 1 has row 2.
#include "gemm/kinds.cuh"
#include "gemm/scheduler.cuh"
#include "ptx/mma.cuh"

namespace gemm {

constexpr Layout kLayout = static_cast<Layout>(LAYOUT);
constexpr Epilogue kEpilogue = static_cast<Epilogue>(EPILOGUE);
constexpr bool kWgrad = kLayout == Layout::kWgrad, kForward = kLayout == Layout::kForward;
constexpr bool kSwiglu = kEpilogue == Epilogue::kSwiglu || kEpilogue == Epilogue::kSwigluKeep;
constexpr int kThreads = 128, kBlockM = BLOCK_M, kBlockN = 128, kDepth = 32, kStages = STAGES;
constexpr int kColumns = kSwiglu ? kBlockN / 2 : kBlockN;  // of the output, a tile
constexpr int kWarpsM = kBlockM == 128 ? 2 : 1, kWarpsN = 4 / kWarpsM;
constexpr int kPartsM = kBlockM / kWarpsM / 16, kPartsN = kBlockN / kWarpsN / 8;  // of a warp, 16 x 8 each
constexpr u32 kBytesA = kBlockM * kDepth * 2, kStage = kBytesA + kBlockN * kDepth * 2;

__device__ __forceinline__ float silu_of(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// Pieces of an operand that is contiguous along k: four of each of kLines lines.
template <int kLines>
struct Lines {
    static constexpr int kPieces = kLines / 32;  // of a thread
    const u8* from[kPieces];
    u32 there = 0;

    // `where(line)`: the number of a line of the tile in memory, -1: none.
    template <typename Where>
    __device__ __forceinline__ void find(const u8* base, i64 pitch, Where where) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const i64 line = where(static_cast<int>(threadIdx.x / 4) + 32 * i);
            there |= static_cast<u32>(line >= 0) << i;
            from[i] = base + (line >= 0 ? line : 0) * pitch + threadIdx.x % 4 * 16;
        }
    }
    __device__ __forceinline__ void load(u32 to, int k, int depth) const {
        const int piece = threadIdx.x % 4;
        to += threadIdx.x / 4 * 64 + (piece ^ (threadIdx.x / 8 % 4)) * 16;
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
            ptx::copy_async_or_zero(to + i * 2048, from[i] + 2 * i64(k),
                                    (there >> i & 1) && k + 8 * piece < depth);
    }
};

// Pieces of an operand that is contiguous along rows or columns: 16 of each of 32 lines, one a step of k.
struct Across {
    const u8* from;
    i64 pitch;
    bool there;

    __device__ __forceinline__ void find(const u8* base, i64 bytes, int column, int columns) {
        const int piece = threadIdx.x % 16;
        pitch = bytes, there = 8 * piece < columns - column;
        from = base + 2 * i64(column) + 16 * piece + threadIdx.x / 16 * pitch;
    }
    __device__ __forceinline__ void load(u32 to, int k, int depth) const {
        const int line = threadIdx.x / 16;
        to += line * 256 + (threadIdx.x % 16 ^ line) * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            ptx::copy_async_or_zero(to + i * 2048, from + (k + 8 * i) * pitch,
                                    there && k + 8 * i + line < depth);
    }
};

template <bool kAcross, int kLines>
struct Operand {
    using Type = Lines<kLines>;
};
template <int kLines>
struct Operand<true, kLines> {
    using Type = Across;
};
using OperandA = Operand<kWgrad, kBlockM>::Type;
using OperandB = Operand<!kForward, kBlockN>::Type;

__device__ __forceinline__ u32 in_lines(u32 tile, int line, int piece) {
    return tile + line * 64 + (piece ^ (line >> 1 & 3)) * 16;
}
__device__ __forceinline__ u32 in_across(u32 tile, int line, int piece) {
    return tile + line * 256 + (piece ^ (line & 7)) * 16;
}

// A's rows `row` .. `row + 15`, and B's columns `column` .. `column + 15`, of 16 steps of k from 16 `half`.
__device__ __forceinline__ void read_a(u32 tile, int row, int half, u32 (&a)[4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (kWgrad)
        ptx::load_matrix_x4_transposed(
            in_across(tile, 16 * half + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2), a);
    else
        ptx::load_matrix_x4(in_lines(tile, row + lane % 16, 2 * half + lane / 16), a);
}
__device__ __forceinline__ void read_b(u32 tile, int column, int half, u32 (&b)[4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (kForward)
        ptx::load_matrix_x4(in_lines(tile, column + lane % 8 + lane / 16 * 8, 2 * half + lane / 8 % 2), b);
    else
        ptx::load_matrix_x4_transposed(in_across(tile, 16 * half + lane % 16, column / 8 + lane / 16), b);
}

__device__ __forceinline__ int warp_row() { return threadIdx.x / 32 / kWarpsN * kPartsM * 16; }
// Column of the tile, as B lies in shared memory, of the warp's part `part`: with SwiGLU the second half of
// the parts is up, of the columns of the first.
__device__ __forceinline__ int part_column(int part) {
    const int warp = threadIdx.x / 32 % kWarpsN;
    if (!kSwiglu) return (warp * kPartsN + part) * 8;
    constexpr int kHalf = kPartsN / 2;
    return part / kHalf * kColumns + (warp * kHalf + part % kHalf) * 8;
}

using Sums = float[kPartsM][kPartsN][4];

__device__ __forceinline__ void multiply(u32 stage, Sums& sums) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 a[kPartsM][4], b[kPartsN / 2][4];
#pragma unroll
        for (int i = 0; i < kPartsM; ++i) read_a(stage, warp_row() + 16 * i, half, a[i]);
#pragma unroll
        for (int j = 0; j < kPartsN / 2; ++j) read_b(stage + kBytesA, part_column(2 * j), half, b[j]);
#pragma unroll
        for (int i = 0; i < kPartsM; ++i)
#pragma unroll
            for (int j = 0; j < kPartsN; ++j)
                ptx::mma_bf16(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
}

// All of a tile's sums; the same for all threads of the block.
__device__ __forceinline__ void run_steps(u32 memory, const OperandA& a, const OperandB& b, int depth,
                                          Sums& sums) {
    const int steps = (depth + kDepth - 1) / kDepth;
    const auto load = [&](int step) {
        if (step < steps) {
            const u32 to = memory + step % kStages * kStage;
            a.load(to, step * kDepth, depth);
            b.load(to + kBytesA, step * kDepth, depth);
        }
        ptx::copy_commit();
    };
    __syncthreads();  // the tile before is read
#pragma unroll
    for (int step = 0; step < kStages - 1; ++step) load(step);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        ptx::copy_wait<kStages - 2>();
        __syncthreads();  // every thread's pieces are there, and the step before is read
        load(step + kStages - 1);
        multiply(memory + step % kStages * kStage, sums);
    }
}

struct Results {
    u8 *d, *gate_up;
    i64 first;    // row of d with the tile's first
    int columns;  // of d
    const float* weights;
};

// Two columns of a row, from the sums of a plain product.
__device__ __forceinline__ void store_pair(const Results& to, i64 at, float low, float high) {
    if constexpr (kEpilogue == Epilogue::kAddFloat) {
        float2* d = reinterpret_cast<float2*>(to.d + 4 * at);
        const float2 before = *d;
        *d = {before.x + low, before.y + high};
    } else {
        u32* d = reinterpret_cast<u32*>(to.d + 2 * at);
        if constexpr (kEpilogue == Epilogue::kAdd) {
            const u32 before = *d;
            low += ptx::bf16_low(before), high += ptx::bf16_high(before);
        }
        *d = ptx::pack_bf16(low, high);
    }
}

// One row of a part, its two columns of this thread: `half` 0 row lane / 4, 1 eight rows below.
__device__ __forceinline__ void store_row(const Results& to, const Sums& sums, const Tile& tile, int part,
                                          int half, int row) {
    const float weight = kEpilogue == Epilogue::kWeighted ? to.weights[to.first + row] : 1.f;
    const i64 line = to.first + row;
#pragma unroll
    for (int j = 0; j < (kSwiglu ? kPartsN / 2 : kPartsN); ++j) {
        const int column = part_column(j) + threadIdx.x % 4 * 2;
        if (column >= tile.columns) continue;
        const i64 at = line * to.columns + tile.column + column;
        const float low = sums[part][j][2 * half], high = sums[part][j][2 * half + 1];
        if constexpr (kSwiglu) {
            const float* up = sums[part][j + kPartsN / 2] + 2 * half;
            *reinterpret_cast<u32*>(to.d + 2 * at) =
                ptx::pack_bf16(silu_of(low) * up[0], silu_of(high) * up[1]);
            if constexpr (kEpilogue == Epilogue::kSwigluKeep) {
                u8* kept = to.gate_up + 2 * (at + line * to.columns);
                *reinterpret_cast<u32*>(kept) = ptx::pack_bf16(low, high);
                *reinterpret_cast<u32*>(kept + 2 * i64(to.columns)) = ptx::pack_bf16(up[0], up[1]);
            }
        } else {
            store_pair(to, at, low * weight, high * weight);
        }
    }
}

// A's rows where the tile's begin, or through `index`; B's lines, of gate and of up with SwiGLU. A template,
// so that the other layout's branch is not compiled.
template <typename A, typename B>
__device__ __forceinline__ void find_operands(const u8* a, const u8* b, const Tile& tile, int first, int rows,
                                              int columns, int k, const i64* index, A& of_a, B& of_b) {
    if constexpr (kWgrad) {
        of_a.find(a + first * (2 * i64(rows)), 2 * i64(rows), tile.row, rows);
        of_b.find(b + first * (2 * i64(columns)), 2 * i64(columns), tile.column, columns);
        return;
    } else {
        of_a.find(a, 2 * i64(k), [&](int line) {
            if (line >= tile.rows) return i64(-1);
            return index == nullptr ? i64(tile.row + line) : index[tile.row + line];
        });
        const int lines = kSwiglu ? 2 * columns : columns;
        const u8* weight = b + 2 * i64(tile.expert) * lines * k;
        if constexpr (kForward)
            of_b.find(weight, 2 * i64(k), [&](int line) {
                const int column = line % kColumns;
                if (column >= tile.columns) return i64(-1);
                return i64(line / kColumns * columns + tile.column + column);
            });
        else
            of_b.find(weight, 2 * i64(columns), tile.column, columns);
    }
}

// a, b, d: see `Layout`; all bf16 but d of kAddFloat, contiguous, k and columns multiples of 8. rows: of a
// gradient of weights, and `k` is unused there. gate_up: of kSwigluKeep. weights: of kWeighted, a row each.
// index: rows of A, may be null.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    portable_gemm(const u8* a, const u8* b, u8* d, u8* gate_up, const int* ends, int experts, int rows,
                  int columns, int k, const float* weights, const i64* index) {
    extern __shared__ u8 memory[];
    Schedule<kBlockM, kColumns, 8, kWgrad> schedule{ends, nullptr, experts, rows, columns};
    Tile tile;
    for (int number = blockIdx.x; schedule.seek(number, tile); number += gridDim.x) {
        const int first = kWgrad && tile.expert > 0 ? ends[tile.expert - 1] : 0;
        OperandA of_a;
        OperandB of_b;
        find_operands(a, b, tile, first, rows, columns, k, index, of_a, of_b);
        Sums sums = {};
        run_steps(ptx::smem_u32(memory), of_a, of_b, kWgrad ? ends[tile.expert] - first : k, sums);
        const i64 above = kWgrad ? i64(tile.expert) * rows : 0;
        const Results to{d, gate_up, above + tile.row, columns, weights};
#pragma unroll
        for (int part = 0; part < kPartsM; ++part)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = warp_row() + 16 * part + 8 * half + threadIdx.x % 32 / 4;
                if (row < tile.rows) store_row(to, sums, tile, part, half, row);
            }
    }
}

}  // namespace gemm
