// bf16 rows to e4m3 with a float32 scale for every 128 values, for the fp8 GEMM: scale = amax / 448, value = x / scale
// rounded to nearest. Rows are read in order or from an index, so that quantising replaces a permuted copy.
//
// Example, a block of 4, 448 scaled down to 4: 1 2 -8 0 has scale 2 and values .5 1 -4 0.
#include "experts_plan.cuh"
#include "ptx.cuh"

struct __align__(16) Eight {
    u32 pair[4];
};
struct __align__(8) Bytes {
    u32 word[2];
};

constexpr int kPieces = 4;  // of 256 values each, that a warp has under way

__device__ __forceinline__ float magnitude(u32 packed) {
    const float low = ptx::bf16_low(packed & 0x7fffu), high = ptx::bf16_high(packed & 0x7fff0000u);
    return low > high ? low : high;
}

// rows[r] of x[r], or of x[index[r] / choices], for the rows that the experts have. units: D / 8. A warp has kPieces pieces of a
// row. The first block also plans: `ends` and `num_counters` zeros, for the products that follow.
extern "C" __global__ void __launch_bounds__(256)
    quantise_rows(const Eight* x, const i64* index, int choices, const i64* counts, int experts, int units, Bytes* values,
                  float* scales, int* ends, int* counters, int num_counters) {
    if (blockIdx.x == 0 && threadIdx.x < 32) write_plan(counts, ends, counters, experts, num_counters);
    const int lane = threadIdx.x % 32, rows = static_cast<int>(all_rows(counts, experts));
    const int parts = (units + 32 * kPieces - 1) / (32 * kPieces);
    const i64 stride = gridDim.x * blockDim.x / 32;
    for (i64 work = (blockIdx.x * blockDim.x + threadIdx.x) / 32; work < i64(rows) * parts; work += stride) {
        const i64 row = work / parts, from = index != nullptr ? index[row] / choices : row;
        const int first = static_cast<int>(work % parts) * 32 * kPieces + lane;
        Eight found[kPieces];
#pragma unroll
        for (int i = 0; i < kPieces; ++i) found[i] = x[from * units + (first + 32 * i < units ? first + 32 * i : units - 1)];
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            float most = 0.f;
#pragma unroll
            for (int j = 0; j < 4; ++j) most = fmaxf(most, magnitude(found[i].pair[j]));
#pragma unroll
            for (int offset = 1; offset < 16; offset *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
            const float inverse = most > 1e-30f ? __fdividef(448.f, most) : 0.f;
            const int unit = first + 32 * i;
            if (unit >= units) continue;
            u32 half[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                half[j] = ptx::pack_e4m3(ptx::bf16_low(found[i].pair[j]) * inverse, ptx::bf16_high(found[i].pair[j]) * inverse);
            values[row * units + unit] = Bytes{{half[0] | half[1] << 16, half[2] | half[3] << 16}};
            if (lane % 16 == 0) scales[row * (units / 16) + unit / 16] = most / 448.f;
        }
    }
}
