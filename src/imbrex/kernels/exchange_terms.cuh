// Weighted sums of rows by one warp, straight from memory into registers: no ring, no barrier between warps.
//
// A warp lists its terms (row addresses and weights, in order) in shared memory and walks over the columns: a lane has
// kColumns columns of 16 bytes of kDepth rows in flight, 6 KB a warp and 96 KB an SM, twice what 50 GB/s an SM need at 1 us.
// Rows a b c with weights 1 2 3 give bf16(3 c + (2 b + (1 a + 0))), one fused multiply-add each, so the same bits every run.
//
// With WIRE_FP8, sums that cross are rows of the fp8 codec: rounded to bf16, then encoded; at home decoded to float32.
#pragma once
#include "exchange.cuh"
#include "exchange_fp8.cuh"

#ifndef WIRE_FP8
#define WIRE_FP8 0
#endif
constexpr int kMostTerms = 52;    // 32 choices, 16 ranks, an addend
constexpr int kColumns = 2;       // of 16 bytes of bf16 that a lane has of a row

#ifndef DEPTH
#define DEPTH (WIRE_FP8 ? 4 : 6)
#endif
constexpr int kDepth = DEPTH;     // terms that a lane has in flight

struct Terms {
    const u8* row[kMostTerms];
    float weight[kMostTerms];
};

// Which terms are rows of the codec: all but `first` to `last`, the own rows, and from `end` on, the addend.
struct Coded {
    int first, last, end;
};

__device__ __forceinline__ bool is_coded(const Coded& coded, int term) {
    return WIRE_FP8 && term < coded.end && (term < coded.first || term >= coded.last);
}

// Lanes with a term append it in the order of the lanes; returns how many terms there are.
__device__ __forceinline__ int append(Terms& terms, int count, bool mine, const u8* row, float weight) {
    const u32 lanes = __ballot_sync(0xffffffffu, mine);
    const int at = count + __popc(lanes & ((1u << ptx::lane_id()) - 1));
    if (mine) {
        terms.row[at] = row;
        terms.weight[at] = weight;
    }
    return count + __popc(lanes);
}

// sum[i] = weight * value[i] + sum[i] over the eight bf16 values of 16 bytes, each rounded once.
__device__ __forceinline__ void add_eight(float (&sum)[8], uint4 value, float weight) {
    const u32 words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] = __fmaf_rn(weight, ptx::bf16_low(words[i]), sum[2 * i]);
        sum[2 * i + 1] = __fmaf_rn(weight, ptx::bf16_high(words[i]), sum[2 * i + 1]);
    }
}

// The same for eight e4m3 values and their scale; their products are rounded first, as the codec decodes.
__device__ __forceinline__ void add_coded(float (&sum)[8], uint4 value) {
    const float scale = __uint_as_float(value.z);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float low, high;
        ptx::unpack_e4m3((i < 2 ? value.x : value.y) >> 16 * (i % 2), low, high);
        sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(low, scale));
        sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(high, scale));
    }
}

// Columns `column`, `column` + 32, ... before `last`.
template <int kNumber = 0>
__device__ __forceinline__ void load_columns(uint4 (&value)[kColumns], const u8* row, const u8* scales, int column, int last, bool coded) {
    if constexpr (kNumber < kColumns) {
        const bool wanted = column + 32 * kNumber < last;
        if (WIRE_FP8 && coded)
            value[kNumber] = ptx::load_coded<256 * kNumber, 8 * kNumber>(row, scales, wanted);
        else
            value[kNumber] = ptx::load_once<512 * kNumber>(row, wanted);
        load_columns<kNumber + 1>(value, row, scales, column, last, coded);
    }
}

// Of one term, or of none where `last` is 0.
__device__ __forceinline__ void load_term(uint4 (&value)[kColumns], const u8* row, int column, int last, int columns, bool coded) {
    const bool narrow = WIRE_FP8 && coded;
    load_columns(value, row + (narrow ? 8 : 16) * column, row + 8 * columns + column / 16 * 4, column, last, coded);
}

__device__ __forceinline__ void add_term(float (&sum)[kColumns][8], const uint4 (&value)[kColumns], float weight, bool coded) {
#pragma unroll
    for (int q = 0; q < kColumns; ++q)
        if (coded)
            add_coded(sum[q], value[q]);
        else
            add_eight(sum[q], value[q], weight);
}

// What a warp loads next: some columns of one term. Terms turn fastest, so sums complete one after the other.
struct Step {
    int column, term;
    __device__ __forceinline__ void next(int count) {
        if (++term == count) {
            term = 0;
            column += 32 * kColumns;
        }
    }
};

// Columns `first` to `last` of rows of `columns`; both are multiples of 32 or the end. `store(column, sum, inside)`, all lanes.
// kDepth steps are in flight; a step's loads leave when the step kDepth before it has been added.
template <class Store>
__device__ __forceinline__ void sum_columns(const Terms& terms, int count, const Coded& coded, int first, int last, int columns, Store store) {
    __syncwarp();
    const int lane = static_cast<int>(ptx::lane_id());
    if (count == 0) {
        const float zeros[8] = {};
        for (int column = first + lane; column - lane < last; column += 32) store(column, zeros, column < last);
        return;
    }
    Step ahead = {first, 0}, step = {first, 0};
    uint4 value[kDepth][kColumns];
    float sum[kColumns][8] = {};
    const auto load = [&](uint4 (&into)[kColumns]) {
        load_term(into, terms.row[ahead.term], ahead.column + lane, last, columns, is_coded(coded, ahead.term));
        ahead.next(count);
    };
    const auto add = [&](const uint4 (&from)[kColumns]) {
        add_term(sum, from, terms.weight[step.term], is_coded(coded, step.term));
        if (step.term == count - 1)
#pragma unroll
            for (int q = 0; q < kColumns; ++q) {
                const int column = step.column + 32 * q + lane;
                store(column, sum[q], column < last);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[q][i] = 0.0f;
            }
        step.next(count);
    };
#pragma unroll
    for (int d = 0; d < kDepth; ++d) load(value[d]);
    while (step.column < last) {
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
            add(value[d]);
            load(value[d]);
        }
    }
    __syncwarp();  // before the terms are written again
}

__device__ __forceinline__ uint4 pack_eight(const float (&sum)[8]) {
    return {ptx::pack_bf16(sum[0], sum[1]), ptx::pack_bf16(sum[2], sum[3]), ptx::pack_bf16(sum[4], sum[5]), ptx::pack_bf16(sum[6], sum[7])};
}

// Eight values of a row of the codec; 16 neighbouring lanes share a scale, which is kept in `scales` until the row is done.
__device__ __forceinline__ void store_coded(u8* row, float* scales, int column, const float (&sum)[8], bool inside) {
    const uint4 v = inside ? pack_eight(sum) : uint4{0, 0, 0, 0};
    u32 amax = larger_of_four(v);
    for (int step = 1; step < 16; step *= 2) amax = larger(amax, __shfl_xor_sync(0xffffffffu, amax, step));
    const Divisor d = divisor_of(amax);
    const uint2 values = eight_values(v, d, __all_sync(0xffffffffu, d.plain || !inside));
    if (!inside) return;
    reinterpret_cast<uint2*>(row)[column] = values;
    if (column % 16 == 0) scales[column / 16] = d.scale;
}

// The scales of columns `first` to `last` of a row of `columns`: one store for 32 of them, where each alone would be a packet.
__device__ __forceinline__ void store_scales(u8* row, const float* scales, int first, int last, int columns) {
    float* to = reinterpret_cast<float*>(row + 8 * columns);
    __syncwarp();
    for (int i = first / 16 + static_cast<int>(ptx::lane_id()); i < last / 16; i += 32) to[i] = scales[i];
}
