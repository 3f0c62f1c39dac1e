// The memory-bound pieces around the expert GEMMs. Every kernel loops to a count that lies on the device, so
// rows past the experts' rows cost nothing, and every access of rows is 16 bytes a lane.
#include "ffn/plan.cuh"
#include "ptx/base.cuh"

namespace ffn {

struct __align__(16) Eight {
    u32 pair[4];
};

__device__ __forceinline__ float value(const Eight& v, int i) {
    return i & 1 ? ptx::bf16_high(v.pair[i / 2]) : ptx::bf16_low(v.pair[i / 2]);
}

__device__ __forceinline__ Eight pack(const float (&v)[8]) {
    Eight packed;
#pragma unroll
    for (int i = 0; i < 4; ++i) packed.pair[i] = ptx::pack_bf16(v[2 * i], v[2 * i + 1]);
    return packed;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
    return v;
}

__device__ __forceinline__ int first_row() { return (blockIdx.x * blockDim.x + threadIdx.x) / 32; }
__device__ __forceinline__ int row_stride() { return gridDim.x * blockDim.x / 32; }

// Warps share a row by pieces of kPiece units, so that few rows fill the machine and a lane has kDeep loads
// under way.
constexpr int kDeep = 4, kPiece = 32 * kDeep;

// Up to kDeep units of a row, from `first` on in steps of 32; a lane past the end reads the last unit and
// keeps nothing.
__device__ __forceinline__ void load_units(const Eight* row, int first, int units, Eight (&found)[kDeep]) {
#pragma unroll
    for (int i = 0; i < kDeep; ++i) found[i] = row[first + 32 * i < units ? first + 32 * i : units - 1];
}

// One warp.
extern "C" __global__ void plan_groups(const i64* counts, int* ends, int* counters, int experts,
                                       int num_counters) {
    write_plan(counts, ends, counters, experts, num_counters);
}

// act [R, F] = silu(gate) * up, times the row's weight where `weights` is not null; gate_up [R, 2F].
// gate 0, up 2: act 0; gate 1, up 2, weight .5: act = .731 * 2 * .5 = .731.
extern "C" __global__ void __launch_bounds__(256)
    swiglu(const Eight* gate_up, const float* weights, const int* ends, int experts, int units, Eight* act) {
    const u32 parts = (units + kPiece - 1) / kPiece, pieces = static_cast<u32>(ends[experts - 1]) * parts;
    for (u32 work = first_row(); work < pieces; work += row_stride()) {
        const u32 row = work / parts;
        const int first = static_cast<int>(work % parts) * kPiece + threadIdx.x % 32;
        const float weight = weights != nullptr ? weights[row] : 1.f;
        Eight gates[kDeep], ups[kDeep];
        load_units(gate_up + i64(row) * 2 * units, first, units, gates);
        load_units(gate_up + (i64(row) * 2 + 1) * units, first, units, ups);
#pragma unroll
        for (int i = 0; i < kDeep; ++i) {
            if (first + 32 * i >= units) continue;
            float acts[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float gate = value(gates[i], j);
                acts[j] = __fdividef(gate, 1.f + __expf(-gate)) * value(ups[i], j) * weight;
            }
            act[i64(row) * units + first + 32 * i] = pack(acts);
        }
    }
}

// From d_act [R, F] and the kept gate_up [R, 2F]: d_gate_up [R, 2F], act [R, F] (times the row's weight, for
// the weight gradient; `act` null: not written) and d_weight [R] = sum_f act d_act. `weights` null: 1, and
// d_weight is not written.
// A warp a row.
// gate 0, up 2, d_act 3, weight .5: silu 0, silu' .5; d_gate = 3 * .5 * 2 * .5 = 1.5, d_up 0, act 0, d_weight
// 0.
extern "C" __global__ void __launch_bounds__(256)
    swiglu_backward(const Eight* d_act, const Eight* gate_up, const float* weights, const int* ends,
                    int experts, int units, Eight* d_gate_up, Eight* act, float* d_weights) {
    const int rows = ends[experts - 1], lane = threadIdx.x % 32;
    for (int row = first_row(); row < rows; row += row_stride()) {
        const i64 at = i64(row) * units;
        const float weight = weights != nullptr ? weights[row] : 1.f;
        float d_weight = 0.f;
        for (int unit = lane; unit < units; unit += 32) {
            const Eight d = d_act[at + unit], g = gate_up[2 * at + unit], u = gate_up[2 * at + units + unit];
            float d_gate[8], d_up[8], acts[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float gate = value(g, i), up = value(u, i), slope = value(d, i) * weight;
                const float sigmoid = __fdividef(1.f, 1.f + __expf(-gate));
                const float silu = gate * sigmoid;
                d_weight += silu * up * value(d, i);
                d_gate[i] = slope * up * sigmoid * (1.f + gate * (1.f - sigmoid));
                d_up[i] = slope * silu;
                acts[i] = silu * up * weight;
            }
            d_gate_up[2 * at + unit] = pack(d_gate);
            d_gate_up[2 * at + units + unit] = pack(d_up);
            if (act != nullptr) act[at + unit] = pack(acts);
        }
        if (weights != nullptr) {
            d_weight = warp_sum(d_weight);
            if (lane == 0) d_weights[row] = d_weight;
        }
    }
}

// sums [R]: of the parts [count, R] of every row before the last end. Parts four apart are added, then the
// four sums, in order: as torch sums a first dimension.
// parts 1, 2, 4, 8, 16: (1 + 16) + 2 + 4 + 8.
extern "C" __global__ void __launch_bounds__(256)
    add_parts(const float* parts, int count, int room, const int* ends, int experts, float* sums) {
    const int rows = ends[experts - 1];
    for (int row = blockIdx.x * blockDim.x + threadIdx.x; row < rows; row += gridDim.x * blockDim.x) {
        float four[4] = {};
        for (int part = 0; part < count; part += 4)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (part + i < count) four[i] += parts[i64(part + i) * room + row];
        sums[row] = four[0] + four[1] + four[2] + four[3];
    }
}

// rows[r] = x[index[r] / choices] for the rows before the last end.
extern "C" __global__ void __launch_bounds__(256)
    gather_rows(const Eight* x, const i64* index, int choices, const int* ends, int experts, int units,
                Eight* rows) {
    const u32 parts = (units + kPiece - 1) / kPiece, pieces = static_cast<u32>(ends[experts - 1]) * parts;
    for (u32 work = first_row(); work < pieces; work += row_stride()) {
        const u32 row = work / parts;
        const int first = static_cast<int>(work % parts) * kPiece + threadIdx.x % 32;
        Eight found[kDeep];
        load_units(x + i64(static_cast<u32>(index[row]) / static_cast<u32>(choices)) * units, first, units,
                   found);
#pragma unroll
        for (int i = 0; i < kDeep; ++i)
            if (first + 32 * i < units) rows[i64(row) * units + first + 32 * i] = found[i];
    }
}

// The gradient of a weighted sum of rows: d_rows[r] = weight d_y[token], d_weight = sum_d rows[r] d_y[token].
// Row r holds the choice index[r] of token index[r] / choices, and weights and d_weights go by choice;
// `index` null: d_y, weights and d_weights go by row. `weights` null: 1, and d_weights is not written. A warp
// a row.
// weight .5, row (1, 2), d_y (3, 4): d_row (1.5, 2), d_weight 11.
extern "C" __global__ void __launch_bounds__(256)
    weigh_rows(const Eight* d_y, const i64* index, int choices, const Eight* rows, const float* weights,
               const int* ends, int experts, int units, Eight* d_rows, float* d_weights) {
    const int count = ends[experts - 1], lane = threadIdx.x % 32;
    for (int row = first_row(); row < count; row += row_stride()) {
        const u32 choice = index != nullptr ? static_cast<u32>(index[row]) : row;
        const Eight* from = d_y + i64(index != nullptr ? choice / static_cast<u32>(choices) : choice) * units;
        const float weight = weights != nullptr ? weights[choice] : 1.f;
        float d_weight = 0.f;
        for (int first = lane; first < units; first += kPiece) {
            Eight slopes[kDeep], values[kDeep];
            load_units(from, first, units, slopes);
            if (weights != nullptr) load_units(rows + i64(row) * units, first, units, values);
#pragma unroll
            for (int i = 0; i < kDeep; ++i) {
                if (first + 32 * i >= units) continue;
                float scaled[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    scaled[j] = weight * value(slopes[i], j);
                    if (weights != nullptr) d_weight += value(values[i], j) * value(slopes[i], j);
                }
                d_rows[i64(row) * units + first + 32 * i] = pack(scaled);
            }
        }
        if (weights != nullptr) {
            d_weight = warp_sum(d_weight);
            if (lane == 0) d_weights[choice] = d_weight;
        }
    }
}

// Sums ask for kRows rows of a token together: one after the other, each behind the word that says where it
// is, they took longer than all else of a small batch. Of few choices fours are faster than eights
// (docs/LOG.md).

// Of kRows choices from `first` on lane k has that of number `first` + k: its row, -1: none, and weight.
template <int kRows>
struct Sums {
    const Eight* rows;
    const i64* position;
    const float* weights;
    u32 tokens, choices, units;

    __device__ __forceinline__ u32 parts() const { return (units + 31) / 32; }
    __device__ __forceinline__ int row_of(u32 work, u32 first) const {
        const u32 k = first + threadIdx.x % 32;
        if (work >= tokens * parts() || k >= choices || k >= first + kRows) return -1;
        return static_cast<int>(position[i64(work / parts()) * choices + k]);
    }
    __device__ __forceinline__ float weight_of(u32 token, u32 first) const {
        const u32 k = first + threadIdx.x % 32;
        return weights != nullptr && k < choices ? weights[i64(token) * choices + k] : 1.f;
    }
};

__device__ __forceinline__ float of_lane(float x, int lane) {
    return __uint_as_float(__shfl_sync(0xffffffffu, static_cast<int>(__float_as_uint(x)), lane));
}

// Adds one unit of kRows rows, times their weights, in fp32 and in the order of the lanes that know them.
template <int kRows>
__device__ __forceinline__ void add_rows(const Eight* units, int row, float weight, u32 pitch,
                                         float (&sum)[8]) {
    Eight found[kRows];
    const u32 there = __ballot_sync(0xffffffffu, row >= 0);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
        const i64 at = __shfl_sync(0xffffffffu, row, k);
        if (there >> k & 1) found[k] = units[at * pitch];
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
        const float of_row = of_lane(weight, k);
        if (there >> k & 1)
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] += of_row * value(found[k], i);
    }
}

// Sums of tokens, by warps that have 32 units (256 values) of one each; `row`: of the first one's first
// choices. store(token, unit, sum).
template <int kRows, typename Store>
__device__ __forceinline__ void sum_tokens(const Sums<kRows>& sums, int row, Store store) {
    float sum[8] = {};
    u32 first = 0;
#pragma unroll 1
    for (u32 work = first_row(); work < sums.tokens * sums.parts();) {
        const u32 token = work / sums.parts(), unit = work % sums.parts() * 32 + threadIdx.x % 32;
        const u32 own = unit < sums.units ? unit : sums.units - 1;
        add_rows<kRows>(sums.rows + own, row, sums.weight_of(token, first), sums.units, sum);
        first += kRows;
        if (first >= sums.choices) {
            if (unit < sums.units) store(token, unit, sum);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] = 0.f;
            first = 0, work += row_stride();
        }
        row = sums.row_of(work, first);
    }
}

// y[t] = sum over k of weight[t, k] rows[position[t, k]], in fp32, in order of k; position -1 adds nothing.
// `weights` null: 1. `count`: the tokens that there are, null: all. `addend`: added last. early: the launch
// before makes the rows and has waited for all before it, so positions are there.
template <int kRows>
__device__ __forceinline__ void sum_rounded(Sums<kRows> sums, const int* count, Eight* y, const Eight* addend,
                                            int early) {
    int row = -1;
    if (early) row = sums.row_of(first_row(), 0);
    ptx::wait_for_launches();
    ptx::launch_dependents();
    if (count != nullptr) sums.tokens = *count;
    if (!early) row = sums.row_of(first_row(), 0);
    sum_tokens(sums, row, [&](u32 token, u32 unit, float (&sum)[8]) {
        const i64 at = i64(token) * sums.units + unit;
        if (addend != nullptr) {
            const Eight more = addend[at];
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] += value(more, i);
        }
        y[at] = pack(sum);
    });
}

// Three blocks a multiprocessor, said: left to choose, the compiler of Blackwell spills for a fourth.
extern "C" __global__ void __launch_bounds__(256, 3)
    sum_rows(const Eight* rows, const i64* position, const float* weights, const int* count, int tokens,
             int choices, int units, Eight* y, const Eight* addend, int early) {
    sum_rounded<8>({rows, position, weights, u32(tokens), u32(choices), u32(units)}, count, y, addend, early);
}

// The same, the faster one of up to four choices.
extern "C" __global__ void __launch_bounds__(256)
    sum_four_rows(const Eight* rows, const i64* position, const float* weights, const int* count, int tokens,
                  int choices, int units, Eight* y, const Eight* addend, int early) {
    sum_rounded<4>({rows, position, weights, u32(tokens), u32(choices), u32(units)}, count, y, addend, early);
}

// The same sums, of all tokens and not rounded.
extern "C" __global__ void __launch_bounds__(256)
    sum_rows_exactly(const Eight* rows, const i64* position, const float* weights, int tokens, int choices,
                     int units, float4* y) {
    const Sums<4> sums{rows, position, weights, u32(tokens), u32(choices), u32(units)};
    sum_tokens(sums, sums.row_of(first_row(), 0), [&](u32 token, u32 unit, float (&sum)[8]) {
        float4* to = y + 2 * (i64(token) * units + unit);
        to[0] = {sum[0], sum[1], sum[2], sum[3]};
        to[1] = {sum[4], sum[5], sum[6], sum[7]};
    });
}

// Rows without a source become zero: padding between experts, and what is to spare behind them. A warp a row.
extern "C" __global__ void __launch_bounds__(256)
    clear_rows(const i64* source, int count, int units, Eight* rows) {
    for (int row = first_row(); row < count; row += row_stride()) {
        if (source[row] >= 0) continue;
        for (int unit = threadIdx.x % 32; unit < units; unit += 32) rows[i64(row) * units + unit] = Eight{};
    }
}

}  // namespace ffn
