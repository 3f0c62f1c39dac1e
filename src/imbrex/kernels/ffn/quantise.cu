// bf16 rows to e4m3 with a float32 scale for every 128 values, for the fp8 GEMM: the bytes of the codec `fp8`
// (codec/fp8.cuh), to the bit. Rows are read in order or from an index, so that quantising replaces a
// permuted copy.
//
// A warp has one piece of a row and ends; blocks are as many as it takes. On an H200, us:
//   rows of width                               16384 of 2048   16384 of 7168   65536 of 2048
//   read in order                               27              84              96
//   bytes at the copy rate                      24              84              96
// From an index, each token 8 times, 16384 rows of 2048 take 22; with an approximate reciprocal, whose bytes
// were not the codec's, 19, and as long as now in order. Not faster: a loop in 5 blocks an SM, loads that
// pass L1 by or leave L2 first.
// As a part of the first product: see gemm/fp8.cuh.
//
// Example, a block of 4, 448 scaled down to 4: 1 2 -8 0 has scale 2 and values .5 1 -4 0.
#include "codec/fp8.cuh"
#include "ffn/plan.cuh"

namespace ffn {

using namespace fp8;

constexpr int kPieces = 4;  // of 256 values each, 8 a lane, that a warp has under way

// The larger half of `a`, then that of `b`.
__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
    return ptx::max_u16x2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
}

// kPieces pieces of a row, `left` units of 8 values of it from lane 0's first on. To values and scales from
// there on.
__device__ __forceinline__ void quantise(const uint4* row, int left, uint2* values, float* scales) {
    const int lane = threadIdx.x % 32;
    uint4 found[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) found[i] = row[32 * i + lane < left ? 32 * i + lane : left - 1];
    u32 most[kPieces / 2];
#pragma unroll
    for (int i = 0; i < kPieces / 2; ++i)
        most[i] = larger_halves(larger_of_four(found[2 * i]), larger_of_four(found[2 * i + 1]));
#pragma unroll
    for (int step = 1; step < 16; step *= 2)
#pragma unroll
        for (int i = 0; i < kPieces / 2; ++i)
            most[i] = ptx::max_u16x2(most[i], __shfl_xor_sync(0xffffffffu, most[i], step));
    // All lanes know the largest magnitudes of their four blocks.
    const auto largest = [&](int i) { return i & 1 ? most[i / 2] >> 16 : most[i / 2] & 0xffffu; };
    bool plain = true;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) plain = plain && largest(i) - kLeast < kPlain;
    plain = __all_sync(0xffffffffu, plain);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        const int at = 32 * i + lane;
        if (at >= left) continue;
        Divisor d = plain_divisor(largest(i));
        if (!plain && !d.plain) d.scale = slow_scale(largest(i));
        if (lane % 16 == 0) scales[2 * i + lane / 16] = d.scale;
        values[at] = eight_values(found[i], d, plain);
    }
}

// rows[r] of x[r], or of x[index[r] / choices], for the rows that the experts have, or the first `every` (-1:
// those). units: D / 8. The first block also plans: `ends` and `num_counters` zeros, for the products that
// follow.
extern "C" __global__ void __launch_bounds__(256)
    quantise_rows(const uint4* x, const i64* index, int choices, const i64* counts, int experts, int units,
                  uint2* values, float* scales, int* ends, int* counters, int num_counters, int every) {
    ptx::launch_dependents();
    if (blockIdx.x == 0 && threadIdx.x < 32) write_plan(counts, ends, counters, experts, num_counters);
    const u32 parts = (units + 32 * kPieces - 1) / (32 * kPieces), stride = gridDim.x * blockDim.x / 32;
    const u32 pieces = (every >= 0 ? every : all_rows(counts, experts)) * parts;
    for (u32 work = (blockIdx.x * blockDim.x + threadIdx.x) / 32; work < pieces; work += stride) {
        const u32 row = work / parts, first = (work - row * parts) * 32 * kPieces;
        const i64 from = index != nullptr ? static_cast<u32>(index[row]) / static_cast<u32>(choices) : row;
        const i64 to = i64(row) * units + first;
        quantise(x + from * units + first, units - first, values + to, scales + to / 16);
    }
}

}  // namespace ffn
