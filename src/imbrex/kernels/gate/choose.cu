// A gate after its logits, in one launch: scores, group limit, the best experts, their weights. A warp has a
// token; its lane l has the experts l, l + 32, ... Of equal scores the lowest expert is chosen, as by
// `imbrex.router.gates.best`; sums are taken over a lane's experts first, then between lanes 16, 8, 4, 2 and
// 1 apart, so that the same logits give the same bits on every rank.
//
// The gradient computes the scores again: the logits are all that a forward keeps.
//
// Example, softmax, 4 experts, the best 2 of logits {0, ln 2, ln 5, 0}: scores {1/9, 2/9, 5/9, 1/9}, experts
// {2, 1}, weights normalised {5/7, 2/7}. Weights' gradients {7, 0} give scores' {18/7, -45/7} and logits'
// {0, -10/7, 10/7, 0}.
#include "ptx/base.cuh"

namespace gate {

constexpr int kValues = VALUES;  // experts of a lane
constexpr int kSigmoid = SIGMOID;
constexpr int kWarps = 8;  // tokens of a block
constexpr u32 kAll = 0xffffffffu;
constexpr float kTiny = 1e-20f;  // K sigmoids may all underflow to 0

// 0 groups: no limit. open: groups chosen from. best_two: a group is worth the sum of its two best scores.
struct Gate {
    int experts, top_k, groups, open, best_two, normalize;
    float scale;
};

// Minus infinity.
__device__ __forceinline__ float lowest() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ int lane() { return threadIdx.x % 32; }

// A float as a number of the same order. 0 and -0 are equal, NaN is above all, nothing is 0.
__device__ __forceinline__ u32 ordered(float x) {
    if (x != x) return kAll;
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_lane(float x, int source) {
    return __uint_as_float(__shfl_sync(kAll, static_cast<int>(__float_as_uint(x)), source));
}
__device__ __forceinline__ float across(float x, int mask) {
    return __uint_as_float(__shfl_xor_sync(kAll, __float_as_uint(x), mask));
}
__device__ __forceinline__ float add_lanes(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += across(x, mask);
    return x;
}
__device__ __forceinline__ float max_lanes(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, across(x, mask));
    return x;
}

// Scores of the lane's experts; those past the last are not to be looked at.
__device__ __forceinline__ void read_scores(const float* logits, int experts, float (&score)[kValues]) {
    float most = lowest(), sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const int expert = 32 * i + lane();
        score[i] = expert < experts ? logits[expert] : lowest();
        if (kSigmoid) score[i] = 1.0f / (1.0f + expf(-score[i]));
        most = fmaxf(most, score[i]);
    }
    if (kSigmoid) return;
    most = max_lanes(most);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        score[i] = 32 * i + lane() < experts ? expf(score[i] - most) : 0.0f;
        sum += score[i];
    }
    sum = add_lanes(sum);
#pragma unroll
    for (int i = 0; i < kValues; ++i) score[i] /= sum;
}

// The groups that are chosen from, a bit each.
__device__ __forceinline__ u32 open_groups(const Gate& gate, const float (&wanted)[kValues]) {
    const int size = gate.experts / gate.groups;
    float worth = 0.0f;  // of the group with the lane's number
    for (int group = 0; group < gate.groups; ++group) {
        float first = lowest(), second = lowest();
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            const int expert = 32 * i + lane();
            if (expert < gate.experts && expert / size == group) {
                second = fmaxf(second, fminf(first, wanted[i]));
                first = fmaxf(first, wanted[i]);
            }
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
            const float theirs = across(first, mask), their_second = across(second, mask);
            second = fmaxf(fminf(first, theirs), fmaxf(second, their_second));
            first = fmaxf(first, theirs);
        }
        if (lane() == group) worth = gate.best_two ? first + second : first;
    }
    u32 key = lane() < gate.groups ? ordered(worth) : 0, chosen = 0;
    for (int n = 0; n < gate.open; ++n) {
        const u32 most = __reduce_max_sync(kAll, key);
        const int group = __ffs(__ballot_sync(kAll, key == most)) - 1;
        chosen |= 1u << group;
        if (lane() == group) key = 0;
    }
    return chosen;
}

// ids, weights [T, K]. bias [E], added for the selection only, may be null.
extern "C" __global__ void __launch_bounds__(32 * kWarps)
    choose_experts(const float* logits, const float* bias, int tokens, int experts, int top_k, int groups,
                   int open, int best_two, int normalize, float scale, i64* ids, float* weights) {
    ptx::wait_for_launches();
    ptx::launch_dependents();
    const Gate gate{experts, top_k, groups, open, best_two, normalize, scale};
    const int token = blockIdx.x * kWarps + threadIdx.x / 32;
    if (token >= tokens) return;
    float score[kValues], wanted[kValues];
    u32 key[kValues];
    read_scores(logits + static_cast<i64>(token) * gate.experts, gate.experts, score);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const int expert = 32 * i + lane();
        wanted[i] = bias != nullptr && expert < gate.experts ? score[i] + bias[expert] : score[i];
    }
    const u32 may = gate.groups > 0 ? open_groups(gate, wanted) : kAll;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const int expert = 32 * i + lane();
        const bool closed = gate.groups > 0 && !(may >> expert / (gate.experts / gate.groups) & 1);
        key[i] = expert >= gate.experts ? 0 : ordered(closed ? lowest() : wanted[i]);
    }
    int my_id = 0;
    float my_score = 0.0f, sum = 0.0f;
    for (int k = 0; k < gate.top_k; ++k) {
        u32 best = 0;
        float of_best = 0.0f;
        int at = 0;
#pragma unroll
        for (int i = 0; i < kValues; ++i)
            if (key[i] > best) best = key[i], of_best = score[i], at = i;
        const u32 most = __reduce_max_sync(kAll, best);
        // of equal ones the lowest expert
        const int its_id = ~__reduce_max_sync(kAll, best == most ? ~static_cast<u32>(32 * at + lane()) : 0);
        const float its = from_lane(of_best, its_id % 32);
        sum += its;
        if (lane() == k) my_id = its_id, my_score = its;
#pragma unroll
        for (int i = 0; i < kValues; ++i)
            if (its_id == 32 * i + lane()) key[i] = 0;
    }
    if (lane() >= gate.top_k) return;
    const i64 at = static_cast<i64>(token) * gate.top_k + lane();
    ids[at] = my_id;
    weights[at] = (gate.normalize ? my_score / (sum + kTiny) : my_score) * gate.scale;
}

// d_logits [T, E] from the weights' gradients [T, K].
extern "C" __global__ void __launch_bounds__(32 * kWarps)
    choose_experts_backward(const float* logits, const i64* ids, const float* d_weights, int tokens,
                            int experts, int top_k, int normalize, float scale, float* d_logits) {
    const Gate gate{experts, top_k, 0, 0, 0, normalize, scale};
    const int token = blockIdx.x * kWarps + threadIdx.x / 32;
    if (token >= tokens) return;
    float score[kValues], d_score[kValues];
    const i64 row = static_cast<i64>(token) * gate.experts;
    const i64 at = static_cast<i64>(token) * gate.top_k + lane();
    read_scores(logits + row, gate.experts, score);
    const bool mine = lane() < gate.top_k;
    const int my_id = mine ? static_cast<int>(ids[at]) : 0;
    const float my_d = mine ? d_weights[at] * gate.scale : 0.0f;
    float my_score = 0.0f, sum = 0.0f;
    for (int k = 0; k < gate.top_k; ++k) {
        const int expert = __shfl_sync(kAll, my_id, k);
        float here = 0.0f;
#pragma unroll
        for (int i = 0; i < kValues; ++i)
            if (expert == 32 * i + lane()) here = score[i];
        const float its = from_lane(here, expert % 32);
        sum += its;
        if (lane() == k) my_score = its;
    }
    float my_d_score = my_d;
    if (gate.normalize) {
        const float total = sum + kTiny;
        my_d_score = my_d / total - add_lanes(my_d * my_score) / (total * total);
    }
    if (!mine) my_d_score = 0.0f;
    const float mean = add_lanes(my_d_score * my_score);
#pragma unroll
    for (int i = 0; i < kValues; ++i) d_score[i] = 0.0f;
    for (int k = 0; k < gate.top_k; ++k) {
        const int expert = __shfl_sync(kAll, my_id, k);
        const float its = from_lane(my_d_score, k);
#pragma unroll
        for (int i = 0; i < kValues; ++i)
            if (expert == 32 * i + lane()) d_score[i] = its;
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const int expert = 32 * i + lane();
        if (expert >= gate.experts) continue;
        const float slope = kSigmoid ? d_score[i] * (1.0f - score[i]) : d_score[i] - mean;
        d_logits[row + expert] = slope * score[i];
    }
}

}  // namespace gate
