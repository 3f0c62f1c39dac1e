// Weighted sums of rows by one warp, straight from memory into registers: no ring, no barrier between warps.
//
// A warp lists its terms (row addresses and weights, in order) in shared memory and walks over the columns: a lane has
// kColumns columns of 16 bytes of kDepth rows in flight, 6 KB a warp and 96 KB an SM, twice what 50 GB/s an SM need at 1 us.
// Rows a b c with weights 1 2 3 give bf16(3 c + (2 b + (1 a + 0))), one fused multiply-add each, so the same bits every run.
//
// With WIRE_FP8, sums that cross are rounded to bf16 and then encoded (`exchange_wire.cuh`); at home they are decoded to float32.
#pragma once
#include "exchange.cuh"
#include "exchange_wire.cuh"

#ifndef WIRE_FP8
#define WIRE_FP8 0
#endif
constexpr int kMostTerms = 52;    // 32 choices, 16 ranks, an addend
#ifndef COLUMNS
#define COLUMNS 2
#endif
constexpr int kColumns = COLUMNS;  // of 16 bytes of bf16 that a lane has of a row; even

#ifndef DEPTH
#define DEPTH 6
#endif
constexpr int kDepth = DEPTH;     // terms that a lane has in flight

struct Terms {
    const u8* row[kMostTerms];
    float weight[kMostTerms];
};

// Which terms are as the wire has them: all but `first` to `last`, the own rows, and from `end` on, the addend.
struct Coded {
    int first, last, end;
};

__device__ __forceinline__ bool is_coded(const Coded& coded, int term) {
    return term < coded.end && (term < coded.first || term >= coded.last);
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

// Columns `column`, `column` + 32, ... before `last`.
template <int kNumber = 0>
__device__ __forceinline__ void load_columns(uint4 (&value)[kColumns], const u8* row, int column, int last) {
    if constexpr (kNumber < kColumns) {
        value[kNumber] = ptx::load_once<512 * kNumber>(row, column + 32 * kNumber < last);
        load_columns<kNumber + 1>(value, row, column, last);
    }
}

// One step of a term, or of none where `last` is 0; `coded` only where terms are `kMixed`.
template <bool kMixed>
__device__ __forceinline__ void load_term(uint4 (&value)[kColumns], const u8* row, int column, int last, int columns, bool coded) {
    const int mine = column + static_cast<int>(ptx::lane_id());
    if constexpr (kMixed) {
        const u8* values = row + (coded ? 16 * mine - 8 * column : 16 * mine);
        const u8* second = coded ? row + 512 * wire_steps(columns) + column / 4 : row + 16 * mine + 512;
#pragma unroll
        for (int q = 0; q < kColumns; q += 2) {
            const bool any = mine + 32 * q < last;
            value[q] = ptx::load_once(values + (coded ? 256 : 512) * q, any);
            value[q + 1] = ptx::load_once(second + (coded ? 8 : 512) * q, coded ? any : mine + 32 * q + 32 < last);
        }
    } else {
        load_columns(value, row + 16 * mine, mine, last);
    }
}

template <bool kMixed>
__device__ __forceinline__ void add_term(float (&sum)[kColumns][8], const uint4 (&value)[kColumns], float weight, bool coded) {
    if (kMixed && coded) {
#pragma unroll
        for (int q = 0; q < kColumns; q += 2) add_coded(sum[q], sum[q + 1], value[q], value[q + 1]);
    } else {
#pragma unroll
        for (int q = 0; q < kColumns; ++q) add_eight(sum[q], value[q], weight);
    }
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

// Columns `first` to `last` of rows of `columns`; both are multiples of 32 or the end. `store(column, sum)`, all lanes: lane l has
// columns `column` + l, + 32, ..., which may all lie behind the end. kDepth steps are in flight; a step's loads leave when the step kDepth before it has been added.
template <bool kMixed, class Store>
__device__ __forceinline__ void sum_columns(const Terms& terms, int count, const Coded& coded, int first, int last, int columns, Store store) {
    __syncwarp();
    float sum[kColumns][8] = {};
    if (count == 0) {
        for (int column = first; column < last; column += 32 * kColumns) store(column, sum);
        return;
    }
    Step ahead = {first, 0}, step = {first, 0};
    uint4 value[kDepth][kColumns];
    const auto load = [&](uint4 (&into)[kColumns]) {
        load_term<kMixed>(into, terms.row[ahead.term], ahead.column, last, columns, kMixed && is_coded(coded, ahead.term));
        ahead.next(count);
    };
    const auto add = [&](const uint4 (&from)[kColumns]) {
        add_term<kMixed>(sum, from, terms.weight[step.term], kMixed && is_coded(coded, step.term));
        if (step.term == count - 1) {
            store(step.column, sum);
#pragma unroll
            for (int q = 0; q < kColumns; ++q)
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
