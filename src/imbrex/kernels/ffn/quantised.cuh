// Rows of A for an fp8 product of few rows: read as they are and quantised on their way into a stage, by
// warps that are idle beside the one that asks for columns. No launch stands between who writes rows and the
// product, and a tile of gate and up may have fewer than the 128 columns that share a scale: its result stays
// in float32 until all of them are there.
//
//   rows of gate and up   bf16: the bytes and scales of ffn/quantise.cu, which are the codec's
//   rows of down          float32 of SwiGLU: the bytes and scales of `store_block_fp8` (gemm/fp8.cuh)
//
// A row is read again for every tile of its expert, out of L2: of 8 rows an eighth (down: a quarter) of what
// a tile of 128 columns reads of weights. kQuantisers warps take steps in turn, four lanes a row, and have
// the next eight rows under way while they write these. Unrolled no further: code comes from memory as it
// first runs (ffn/both.cu).
#pragma once
#include "codec/fp8.cuh"
#include "gemm/fp8.cuh"

namespace ffn {

constexpr int kLanes = 4, kRowsAtOnce = 32 / kLanes;  // of a row; rows that a warp writes at a time
constexpr int kEights = 128 / 8 / kLanes;             // eights of values of a lane: kLanes apart

struct Quantised {
    uint2 values[kEights];
    float scale;
};

// [R, D] bf16, sixteen bytes each.
struct PlainRows {
    using Values = uint4;  // eight
    const uint4* rows;
    int width;  // D
    __device__ __forceinline__ Values load(int row, int k) const {
        return rows[i64(row) * (width / 8) + k / 8];
    }
    // All lanes of a warp.
    static __device__ __forceinline__ Quantised quantise(const Values (&v)[kEights]) {
        u32 amax = 0;
#pragma unroll
        for (int i = 0; i < kEights; ++i) amax = ptx::max_u16x2(amax, fp8::larger_of_four(v[i]));
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2)
            amax = ptx::max_u16x2(amax, __shfl_xor_sync(~0u, amax, step));
        const fp8::Divisor d = fp8::divisor_of(amax);
        Quantised found;
        found.scale = d.scale;
        if (__all_sync(~0u, d.plain)) {
#pragma unroll
            for (int i = 0; i < kEights; ++i) found.values[i] = fp8::eight_values<true>(v[i], d);
        } else {
#pragma unroll
            for (int i = 0; i < kEights; ++i) found.values[i] = fp8::eight_values<false>(v[i], d);
        }
        return found;
    }
};

// [R, F] float32, which other blocks write while this kernel runs.
struct FloatRows {
    struct Values {
        float4 low, high;
    };
    const float* rows;
    int width;  // F
    __device__ __forceinline__ Values load(int row, int k) const {
        const float4* from = reinterpret_cast<const float4*>(rows + i64(row) * width + k);
        return {from[0], from[1]};
    }
    static __device__ __forceinline__ float larger(float most, const float4& v) {
        return fmaxf(fmaxf(most, fmaxf(fabsf(v.x), fabsf(v.y))), fmaxf(fabsf(v.z), fabsf(v.w)));
    }
    static __device__ __forceinline__ u32 four(const float4& v, float inverse) {
        return ptx::pack_e4m3(v.x * inverse, v.y * inverse) |
               ptx::pack_e4m3(v.z * inverse, v.w * inverse) << 16;
    }
    static __device__ __forceinline__ Quantised quantise(const Values (&v)[kEights]) {
        float most = 0.f;
#pragma unroll
        for (int i = 0; i < kEights; ++i) most = larger(larger(most, v[i].low), v[i].high);
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        const float inverse = gemm::inverse_of(most);
        Quantised found;
        found.scale = gemm::scale_of(most);
#pragma unroll
        for (int i = 0; i < kEights; ++i)
            found.values[i] = {four(v[i].low, inverse), four(v[i].high, inverse)};
        return found;
    }
};

// All lanes of one of kQuantisers warps, numbered `member`: its steps of a tile. `memory`: as `lay_out` took
// it.
template <class C, class Rows>
__device__ __forceinline__ void fill_tile(const Rows& from, const gemm::Shared<C>& shared, u8* memory,
                                          const gemm::Slot& tile, int member, u32& patience) {
    const u32 lane = ptx::lane_id();
    const int line = static_cast<int>(lane) / kLanes, part = static_cast<int>(lane) % kLanes,
              live = gemm::least(tile.rows, C::kBlockM);
    typename Rows::Values next[kEights] = {};
    const auto load = [&](int step, int first) {
        const int row = tile.row + gemm::least(first + line, live - 1), k = step * C::kBlockK + 8 * part;
#pragma unroll
        for (int i = 0; i < kEights; ++i) next[i] = from.load(row, k + 8 * kLanes * i);
    };
    const int turn = static_cast<int>(tile.position % gemm::kQuantisers);
    int step = (member + gemm::kQuantisers - turn) % gemm::kQuantisers, first = 0;
    if (step < tile.steps) load(step, 0);
#pragma unroll 1
    while (step < tile.steps) {
        typename Rows::Values these[kEights];
#pragma unroll
        for (int i = 0; i < kEights; ++i) these[i] = next[i];
        const gemm::Ring<C> ring(tile.position + step);
        const int begin = first, row = begin + line;
        first += kRowsAtOnce;
        if (first >= live) first = 0, step += gemm::kQuantisers;
        if (step < tile.steps) load(step, first);
        const Quantised found = Rows::quantise(these);
        if (begin == 0) ptx::mbarrier_wait(shared.empty + 8 * ring.stage, ring.phase ^ 1, patience);
        if (row < live) {
            // The unit of 16 bytes i of line l lies at i ^ l % 8.
            u8* to = memory + (shared.a_of(ring.stage) - ptx::smem_u32(memory)) + row * 128 + part % 2 * 8;
#pragma unroll
            for (int i = 0; i < kEights; ++i)
                *reinterpret_cast<uint2*>(to + ((kLanes / 2 * i + part / 2) ^ (row & 7)) * 16) =
                    found.values[i];
            if (part == 0) shared.row_scales[ring.stage * C::kBlockM + row] = found.scale;
        }
        if (first != 0) continue;
        ptx::fence_async_shared();
        __syncwarp();
        if (lane < gemm::kReleasing) ptx::mbarrier_arrive(shared.full + 8 * ring.stage);
    }
}

// SwiGLU of 64 rows, the tile's half of its columns each of gate and of up, as it is: `out` [R, width]. All
// threads of the group; ends when all have written.
template <class C>
__device__ __forceinline__ void store_floats(const float (&d)[C::kBlockN / 2], float* out, int width,
                                             const gemm::Slot& tile, int rows) {
    const int thread = static_cast<int>(threadIdx.x % 128), warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = 16 * warp + lane / 4 + 8 * half;
        if (row >= rows) continue;
        float* to = out + i64(tile.row + row) * width + tile.column + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < C::kBlockN / 16; ++i) {
            const float *gate = d + 4 * i + 2 * half, *up = gate + C::kBlockN / 4;
            *reinterpret_cast<float2*>(to + 8 * i) = {gemm::swiglu_fast(gate[0], up[0]),
                                                      gemm::swiglu_fast(gate[1], up[1])};
        }
    }
    ptx::named_barrier(1, 128);
}

}  // namespace ffn
