// Grouped GEMM for GPUs without wgmma, in bf16, from compute capability 8.0 on: mma.sync on tiles that
// cp.async brings. Conventions, layouts and epilogues are those of gemm/gemm.cu, but that SwiGLU's gradient
// is a kernel of its own (ffn/glue.cu) and no other kernel runs beside. Defines:
//   LAYOUT            a number of `Layout`
//   EPILOGUE          a number of `Epilogue`
//   BLOCK_M, BLOCK_N  rows and columns of a tile, WARP_M and WARP_N of a warp's part of it
//   DEPTH             steps of k that are loaded together: 32 or 64
//   STAGES            of the ring of loads
//   BLOCKS            of a multiprocessor, at least
//
// Blocks take tiles in turn, b, b + gridDim, ..., in the order of gemm/scheduler.cuh. A sum is one warp's, in
// the order of k, whatever the tile: the same bits by any cut. With SwiGLU half of a tile's columns are gate
// and half the same of up, and every thread has both of its columns. What the next product reads comes from
// shared memory while one runs, over the ends of stages too, and the next tile's first stages are asked for
// before a tile is stored.
//
// An operand lies in shared memory as it lies in memory. Where k is contiguous it is lines of DEPTH, else
// panels of 64 rows or columns, DEPTH lines of 128 bytes each. A line's pieces of 16 bytes are exchanged by
// its number, so that eight lines that ldmatrix reads at once lie in different banks.
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
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N, kDepth = DEPTH, kStages = STAGES;
constexpr int kColumns = kSwiglu ? kBlockN / 2 : kBlockN;  // of the output, a tile
constexpr int kWarpsN = kBlockN / WARP_N, kThreads = 32 * kWarpsN * (kBlockM / WARP_M);
constexpr int kPartsM = WARP_M / 16, kPartsN = WARP_N / 8;  // of a warp, 16 x 8 each
constexpr int kPairs = kPartsN / 2, kHalves = kDepth / 16;
constexpr int kPieces = kDepth / 8, kLineBytes = 2 * kDepth;  // of a line along k
constexpr u32 kBytesA = kBlockM * kDepth * 2, kStage = kBytesA + kBlockN * kDepth * 2;
static_assert(kStages >= 2 && kHalves % 2 == 0 && kPartsN % (kSwiglu ? 4 : 2) == 0);

__device__ __forceinline__ float silu_of(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// Where a piece of 16 bytes lies: of an operand along k, and of one along rows or columns.
__device__ __forceinline__ u32 in_lines(u32 tile, int line, int piece) {
    return tile + line * kLineBytes + (piece ^ (line / (8 / kPieces) % kPieces)) * 16;
}
__device__ __forceinline__ u32 in_panels(u32 tile, int line, int piece) {
    return tile + (piece / 8 * kDepth + line) * 128 + (piece % 8 ^ line % 8) * 16;
}

// Pieces of an operand that is contiguous along k: kPieces of each of kLines lines.
template <int kLines>
struct Lines {
    static constexpr int kStride = kThreads / kPieces, kCount = kLines / kStride;  // lines, of a thread
    static constexpr int kCopies = kCount;
    static_assert(kCount * kStride == kLines && kStride % 8 == 0);
    const u8* from;    // this thread's piece of line 0 in memory
    u32 pitch;         // bytes
    int line[kCount];  // in memory, -1: none

    // `where(line)`: the number of a line of the tile in memory, -1: none.
    template <typename Where>
    __device__ __forceinline__ void find(const u8* base, i64 bytes, Where where) {
        from = base + threadIdx.x % kPieces * 16, pitch = static_cast<u32>(bytes);
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            line[i] = where(static_cast<int>(threadIdx.x) / kPieces + kStride * i);
    }
    __device__ __forceinline__ void copy(int i, u32 to, int k, int depth) const {
        const int piece = threadIdx.x % kPieces;
        ptx::copy_async_or_zero(in_lines(to, threadIdx.x / kPieces, piece) + i * kStride * kLineBytes,
                                from + 2 * i64(k) + u64(static_cast<u32>(line[i])) * pitch,
                                k + 8 * piece < depth && line[i] >= 0);
    }
};

// Pieces of an operand that is contiguous along rows or columns: panels of eight, a line a step of k.
template <int kLines>
struct Across {
    static constexpr int kStride = kThreads / 8, kCount = kDepth / kStride;  // lines, of a thread in a panel
    static constexpr int kCopies = kCount * (kLines / 64);
    static_assert(kCount * kStride == kDepth && kLines % 64 == 0);
    const u8* from;
    u32 pitch;
    int left;  // rows or columns from this thread's first on

    __device__ __forceinline__ void find(const u8* base, i64 bytes, int column, int columns) {
        const int first = column + 8 * (threadIdx.x % 8);
        pitch = static_cast<u32>(bytes), left = columns - first;
        from = base + 2 * i64(first) + threadIdx.x / 8 * bytes;
    }
    __device__ __forceinline__ void copy(int i, u32 to, int k, int depth) const {
        const int panel = i / kCount, line = threadIdx.x / 8 + kStride * (i % kCount);
        ptx::copy_async_or_zero(
            in_panels(to, threadIdx.x / 8, threadIdx.x % 8) + (panel * kDepth + i % kCount * kStride) * 128,
            from + u64(static_cast<u32>(k + i % kCount * kStride)) * pitch + panel * 128,
            64 * panel < left && k + line < depth);
    }
};

template <bool kAcross, int kLines>
struct Operand {
    using Type = Lines<kLines>;
};
template <int kLines>
struct Operand<true, kLines> {
    using Type = Across<kLines>;
};
using OperandA = Operand<kWgrad, kBlockM>::Type;
using OperandB = Operand<!kForward, kBlockN>::Type;

// A's rows `row` .. `row + 15`, and B's columns `column` .. `column + 15`, of 16 steps of k from 16 `half`.
__device__ __forceinline__ void read_a(u32 tile, int row, int half, u32 (&a)[4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (kWgrad)
        ptx::load_matrix_x4_transposed(
            in_panels(tile, 16 * half + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2), a);
    else
        ptx::load_matrix_x4(in_lines(tile, row + lane % 16, 2 * half + lane / 16), a);
}
__device__ __forceinline__ void read_b(u32 tile, int column, int half, u32 (&b)[4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (kForward)
        ptx::load_matrix_x4(in_lines(tile, column + lane % 8 + lane / 16 * 8, 2 * half + lane / 8 % 2), b);
    else
        ptx::load_matrix_x4_transposed(in_panels(tile, 16 * half + lane % 16, column / 8 + lane / 16), b);
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

// What a warp has in registers: A of 16 steps of k, and B of two parts and of the next two.
struct Fragments {
    u32 a[kPartsM][4], b[2][4];
};

// A stage's products. What the first ones want is in `f`; the last ones bring what those of `next` want,
// behind `turn`, after which `next` is there. A part of A is read again behind the last product that wants
// it. `beside(n)` is called kSlots times on the way.
constexpr int kSlots = kHalves * kPairs - 1;
template <typename Beside, typename Turn>
__device__ __forceinline__ void multiply(u32 stage, u32 next, Fragments& f, Sums& sums, Beside beside,
                                         Turn turn) {
#pragma unroll
    for (int number = 0; number <= kSlots; ++number) {
        const int half = number / kPairs, pair = number % kPairs;
        const bool last = pair == kPairs - 1, end = number == kSlots;
        if (end) turn();
        const u32 after = end ? next : stage;
        const int half_after = last ? (half + 1) % kHalves : half;
        read_b(after + kBytesA, part_column(last ? 0 : 2 * pair + 2), half_after, f.b[(number + 1) % 2]);
        if (!end) beside(number);
        const u32(&b)[4] = f.b[number % 2];
#pragma unroll
        for (int i = 0; i < kPartsM; ++i) {
            ptx::mma_bf16(sums[i][2 * pair], f.a[i], b[0], b[1]);
            ptx::mma_bf16(sums[i][2 * pair + 1], f.a[i], b[2], b[3]);
            if (last) read_a(after, warp_row() + 16 * i, half_after, f.a[i]);
        }
    }
}

// The ring of one tile; the same for all threads of the block.
struct Ring {
    u32 memory;
    OperandA a;
    OperandB b;
    int depth;
    static constexpr int kCopies = OperandA::kCopies + OperandB::kCopies;  // of a thread, a stage

    // Of a stage that begins at `k`; zeros behind the last.
    __device__ __forceinline__ void copy(int i, u32 stage, int k) const {
        if (i < OperandA::kCopies)
            a.copy(i, stage, k, depth);
        else
            b.copy(i - OperandA::kCopies, stage + kBytesA, k, depth);
    }
    // The first stages, where nobody reads the tile before any more and nothing of it is on the way.
    __device__ __forceinline__ void begin() const {
        ptx::copy_wait<0>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < kStages - 1; ++step) {
#pragma unroll
            for (int i = 0; i < kCopies; ++i) copy(i, memory + step * kStage, step * kDepth);
            ptx::copy_commit();
        }
    }
    // All sums of a tile that `begin` was called for.
    __device__ __forceinline__ void run(Sums& sums) const {
        Fragments f;
        ptx::copy_wait<kStages - 2>();
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kPartsM; ++i) read_a(memory, warp_row() + 16 * i, 0, f.a[i]);
        read_b(memory + kBytesA, part_column(0), 0, f.b[0]);
        u32 stage = memory, next = memory + kStage, free = memory + (kStages - 1) * kStage;
#pragma unroll 1
        for (int k = 0; k < depth; k += kDepth) {
            const auto beside = [&](int slot) {
#pragma unroll
                for (int i = 0; i < kCopies; ++i)
                    if (i * kSlots / kCopies == slot) copy(i, free, k + (kStages - 1) * kDepth);
            };
            multiply(stage, next, f, sums, beside, [] {
                ptx::copy_commit();
                ptx::copy_wait<kStages - 2>();
                __syncthreads();  // every thread's pieces of the next stage are there, and this one is read
            });
            free = stage, stage = next;
            next = next + kStage == memory + kStages * kStage ? memory : next + kStage;
        }
    }
};

struct Results {
    u8 *d, *gate_up;
    i64 first;    // row of d with the tile's first
    int columns;  // of d
    const float* weights;
};

// Two columns of each of two parts that are neighbours become four of one: of the even part on even lanes, of
// the odd one on odd ones. What a quad stores of a line then lies together.
__device__ __forceinline__ float4 exchange(const float* even, const float* odd) {
    const bool first = threadIdx.x % 2 == 0;
    const float low = __shfl_xor_sync(0xffffffffu, first ? odd[0] : even[0], 1);
    const float high = __shfl_xor_sync(0xffffffffu, first ? odd[1] : even[1], 1);
    return first ? float4{even[0], even[1], low, high} : float4{low, high, odd[0], odd[1]};
}
// The first of them in the tile, of the parts `part` and `part + 1`.
__device__ __forceinline__ int four_column(int part) {
    return part_column(part) + threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4;
}

__device__ __forceinline__ void store_four(u8* to, float4 v) {
    *reinterpret_cast<uint2*>(to) = {ptx::pack_bf16(v.x, v.y), ptx::pack_bf16(v.z, v.w)};
}
// Of a plain product, from column `at` of all on.
__device__ __forceinline__ void store_plain(const Results& to, i64 at, float4 v) {
    if constexpr (kEpilogue == Epilogue::kAddFloat) {
        float4* d = reinterpret_cast<float4*>(to.d + 4 * at);
        const float4 before = *d;
        *d = {before.x + v.x, before.y + v.y, before.z + v.z, before.w + v.w};
    } else if constexpr (kEpilogue == Epilogue::kAdd) {
        const uint2 before = *reinterpret_cast<const uint2*>(to.d + 2 * at);
        store_four(to.d + 2 * at, {ptx::bf16_low(before.x) + v.x, ptx::bf16_high(before.x) + v.y,
                                   ptx::bf16_low(before.y) + v.z, ptx::bf16_high(before.y) + v.w});
    } else {
        store_four(to.d + 2 * at, v);
    }
}

// Four columns of SwiGLU, of the parts `part` and `part + 1`; `gate` and `up`: of the two parts, this lane's.
__device__ __forceinline__ void store_swiglu(const Results& to, i64 at, i64 line, bool wanted,
                                             const float* gate, const float* gate_odd, const float* up,
                                             const float* up_odd) {
    const float even[2] = {silu_of(gate[0]) * up[0], silu_of(gate[1]) * up[1]};
    const float odd[2] = {silu_of(gate_odd[0]) * up_odd[0], silu_of(gate_odd[1]) * up_odd[1]};
    const float4 act = exchange(even, odd);
    if (wanted) store_four(to.d + 2 * at, act);
    if constexpr (kEpilogue == Epilogue::kSwigluKeep) {
        const float4 of_gate = exchange(gate, gate_odd), of_up = exchange(up, up_odd);
        u8* kept = to.gate_up + 2 * (at + line * to.columns);
        if (wanted) store_four(kept, of_gate), store_four(kept + 2 * i64(to.columns), of_up);
    }
}

// One row of a part: `half` 0 row lane / 4, 1 eight rows below.
__device__ __forceinline__ void store_row(const Results& to, const Sums& sums, const Tile& tile, int part,
                                          int half) {
    const int row = warp_row() + 16 * part + 8 * half + threadIdx.x % 32 / 4;
    const i64 line = to.first + row;
    const bool there = row < tile.rows;
    const float weight = kEpilogue == Epilogue::kWeighted && there ? to.weights[line] : 1.f;
#pragma unroll
    for (int j = 0; j < (kSwiglu ? kPartsN / 2 : kPartsN); j += 2) {
        const int column = four_column(j);
        const bool wanted = there && column < tile.columns;
        const i64 at = line * to.columns + tile.column + column;
        const auto sum = [&](int of) { return sums[part][of] + 2 * half; };
        if constexpr (kSwiglu) {
            constexpr int kUp = kPartsN / 2;
            store_swiglu(to, at, line, wanted, sum(j), sum(j + 1), sum(j + kUp), sum(j + kUp + 1));
        } else {
            const float4 v = exchange(sum(j), sum(j + 1));
            if (wanted) store_plain(to, at, {v.x * weight, v.y * weight, v.z * weight, v.w * weight});
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
            if (line >= tile.rows) return -1;
            return index == nullptr ? tile.row + line : static_cast<int>(index[tile.row + line]);
        });
        const int lines = kSwiglu ? 2 * columns : columns;
        const u8* weight = b + 2 * i64(tile.expert) * lines * k;
        if constexpr (kForward)
            of_b.find(weight, 2 * i64(k), [&](int line) {
                const int column = line % kColumns;
                return column < tile.columns ? line / kColumns * columns + tile.column + column : -1;
            });
        else
            of_b.find(weight, 2 * i64(columns), tile.column, columns);
    }
}

// a, b, d: see `Layout`; all bf16 but d of kAddFloat, contiguous, k and columns multiples of 8. rows: of a
// gradient of weights, and `k` is unused there. gate_up: of kSwigluKeep. weights: of kWeighted, a row each.
// index: rows of A, may be null.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    portable_gemm(const u8* a, const u8* b, u8* d, u8* gate_up, const int* ends, int experts, int rows,
                  int columns, int k, const float* weights, const i64* index) {
    extern __shared__ u8 memory[];
    Schedule<kBlockM, kColumns, 8, kWgrad> schedule{ends, nullptr, experts, rows, columns};
    Tile tile;
    Ring ring;
    ring.memory = ptx::smem_u32(memory);
    const auto begin = [&](int number) {
        if (!schedule.seek(number, tile)) return false;
        const int first = kWgrad && tile.expert > 0 ? ends[tile.expert - 1] : 0;
        ring.depth = kWgrad ? ends[tile.expert] - first : k;
        find_operands(a, b, tile, first, rows, columns, k, index, ring.a, ring.b);
        ring.begin();
        return true;
    };
    int number = blockIdx.x;
    for (bool more = begin(number); more;) {
        Sums sums = {};
        ring.run(sums);
        const Tile done = tile;
        const i64 above = kWgrad ? i64(done.expert) * rows : 0;
        const Results to{d, gate_up, above + done.row, columns, weights};
        more = begin(number += gridDim.x);
#pragma unroll
        for (int part = 0; part < kPartsM; ++part)
#pragma unroll
            for (int half = 0; half < 2; ++half) store_row(to, sums, done, part, half);
    }
}

}  // namespace gemm
