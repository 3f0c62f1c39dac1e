// A gate after its logits, in one launch: scores, group limit, the best experts, their weights. A warp has a
// token; its lane l has the experts l, l + 32, ... Of equal scores the lowest expert is chosen, as by
// `imbrex.router.gates.best`; sums are taken over a lane's experts first, then between lanes 16, 8, 4, 2 and
// 1 apart, so that the same logits give the same bits on every rank.
//
// With losses the same launch sums what they are made of: a block has a chunk of the tokens of one sequence,
// warp w those at w, w + 8, ..., and the block's sums are those of its warps in order. `losses.cu` adds the
// chunks, in a fixed order too: no sum depends on who came first.
//
// The gradient computes the scores again: the logits are all that a forward keeps, and of the losses a few
// numbers an expert.
//
// Example, softmax, 4 experts, the best 2 of logits {0, ln 2, ln 5, 0}: scores {1/9, 2/9, 5/9, 1/9}, experts
// {2, 1}, weights normalised {5/7, 2/7}. Weights' gradients {7, 0} give scores' {18/7, -45/7} and logits'
// {0, -10/7, 10/7, 0}.
#include "ptx/exchange.cuh"

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

// The softmax of the lane's experts, 0 past the last; returns the logarithm of the sum of exp(logit).
__device__ __forceinline__ float read_softmax(const float* logits, int experts, float (&share)[kValues]) {
    float most = lowest(), sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const int expert = 32 * i + lane();
        share[i] = expert < experts ? logits[expert] : lowest();
        most = fmaxf(most, share[i]);
    }
    most = max_lanes(most);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        share[i] = 32 * i + lane() < experts ? expf(share[i] - most) : 0.0f;
        sum += share[i];
    }
    sum = add_lanes(sum);
#pragma unroll
    for (int i = 0; i < kValues; ++i) share[i] /= sum;
    return most + logf(sum);
}

// Scores of the lane's experts; those past the last are not to be looked at.
__device__ __forceinline__ void read_scores(const float* logits, int experts, float (&score)[kValues]) {
    if (!kSigmoid) {
        read_softmax(logits, experts, score);
    } else {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            const int expert = 32 * i + lane();
            score[i] = expert < experts ? logits[expert] : lowest();
            score[i] = 1.0f / (1.0f + expf(-score[i]));
        }
    }
}

// The sum of sigmoids of a token's experts; those past the last count nothing.
__device__ __forceinline__ float add_scores(const float (&score)[kValues], int experts) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum += 32 * i + lane() < experts ? score[i] : 0.0f;
    return add_lanes(sum);
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

// Chooses for one token, from its scores: its ids and weights [K], written; a bit of `chosen` for every value
// of the lane whose expert is chosen.
__device__ __forceinline__ u32 choose(const Gate& gate, const float (&score)[kValues], const float* bias,
                                      i64* ids, float* weights) {
    float wanted[kValues];
    u32 key[kValues], chosen = 0;
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
            if (its_id == 32 * i + lane()) key[i] = 0, chosen |= 1u << i;
    }
    if (lane() < gate.top_k) {
        ids[lane()] = my_id;
        weights[lane()] = (gate.normalize ? my_score / (sum + kTiny) : my_score) * gate.scale;
    }
    return chosen;
}

// ids, weights [T, K]. bias [E], added for the selection only, may be null, as may kept, bools with a stride
// by token and one by choice: the ids of the others are -1.
extern "C" __global__ void __launch_bounds__(32 * kWarps)
    choose_experts(const float* logits, const float* bias, int tokens, int experts, int top_k, int groups,
                   int open, int best_two, int normalize, float scale, const u8* kept, int token_stride,
                   int choice_stride, i64* ids, float* weights) {
    ptx::wait_for_launches();
    ptx::launch_dependents();
    const Gate gate{experts, top_k, groups, open, best_two, normalize, scale};
    const int token = blockIdx.x * kWarps + threadIdx.x / 32;
    if (token >= tokens) return;
    float score[kValues];
    read_scores(logits + static_cast<i64>(token) * experts, experts, score);
    const i64 at = static_cast<i64>(token) * top_k;
    choose(gate, score, bias, ids + at, weights + at);
    if (kept == nullptr || lane() >= top_k) return;
    if (!kept[static_cast<i64>(token) * token_stride + lane() * choice_stride]) ids[at + lane()] = -1;
}

// The same, and the sums of a chunk in every block: of probabilities and choices [chunks, E], and of squares
// of logsumexp [chunks]. A sequence has `length` tokens in `chunks` chunks of `chunk`. arrived: becomes 0.
extern "C" __global__ void __launch_bounds__(32 * kWarps)
    choose_and_sum(const float* logits, const float* bias, int experts, int top_k, int groups, int open,
                   int best_two, int normalize, float scale, int length, int chunks, int chunk, i64* ids,
                   float* weights, float* mass, int* counts, float* squares, u32* arrived) {
    const Gate gate{experts, top_k, groups, open, best_two, normalize, scale};
    const int warp = threadIdx.x / 32, width = 32 * kValues;
    const int first = static_cast<int>(blockIdx.x) % chunks * chunk, last = min(first + chunk, length);
    const i64 before = static_cast<i64>(blockIdx.x) / chunks * length;
    if (blockIdx.x == 0 && threadIdx.x == 0) *arrived = 0;
    float of_mine[kValues], square = 0.0f;
    int chosen_of_mine[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) of_mine[i] = 0.0f, chosen_of_mine[i] = 0;
    for (int token = first + warp; token < last; token += kWarps) {
        const i64 row = before + token;
        float score[kValues];
        const float logsum = read_softmax(logits + row * experts, experts, score);
        if (kSigmoid) read_scores(logits + row * experts, experts, score);
        const u32 chosen = choose(gate, score, bias, ids + row * top_k, weights + row * top_k);
        const float total = kSigmoid ? add_scores(score, experts) + kTiny : 1.0f;
        square += logsum * logsum;
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            of_mine[i] += kSigmoid ? score[i] / total : score[i];
            chosen_of_mine[i] += chosen >> i & 1;
        }
    }
    float* masses = reinterpret_cast<float*>(ptx::shared_memory());
    int* chosens = reinterpret_cast<int*>(masses + kWarps * width);
    float* logsums = reinterpret_cast<float*>(chosens + kWarps * width);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        masses[warp * width + 32 * i + lane()] = of_mine[i];
        chosens[warp * width + 32 * i + lane()] = chosen_of_mine[i];
    }
    if (lane() == 0) logsums[warp] = square;
    __syncthreads();
    for (int expert = threadIdx.x; expert < experts; expert += 32 * kWarps) {
        float sum = 0.0f;
        int count = 0;
        for (int w = 0; w < kWarps; ++w)
            sum += masses[w * width + expert], count += chosens[w * width + expert];
        mass[static_cast<i64>(blockIdx.x) * experts + expert] = sum;
        counts[static_cast<i64>(blockIdx.x) * experts + expert] = count;
    }
    if (threadIdx.x != 0) return;
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += logsums[w];
    squares[blockIdx.x] = sum;
}

// The gradients of the lane's scores from those of the token's weights [K], and what the softmax takes from
// each of them. d_weights may be null.
__device__ __forceinline__ float score_gradients(const Gate& gate, const float (&score)[kValues],
                                                 const i64* ids, const float* d_weights,
                                                 float (&d_score)[kValues]) {
    const bool mine = lane() < gate.top_k && d_weights != nullptr;
    const int my_id = mine ? static_cast<int>(ids[lane()]) : 0;
    const float my_d = mine ? d_weights[lane()] * gate.scale : 0.0f;
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
    for (int k = 0; k < gate.top_k && d_weights != nullptr; ++k) {
        const int expert = __shfl_sync(kAll, my_id, k);
        const float its = from_lane(my_d_score, k);
#pragma unroll
        for (int i = 0; i < kValues; ++i)
            if (expert == 32 * i + lane()) d_score[i] = its;
    }
    return mean;
}

// A gradient: into float32 [T, E], or where `parts` is not null as the sum of two bf16 numbers, its first 8
// significant bits and the rest, into `parts` [T, 2E], first numbers first. 1 + 2^-9 becomes 1 and 2^-9.
__device__ __forceinline__ void write_gradient(float value, i64 row, int expert, int experts, float* d_logits,
                                               u16* parts) {
    if (parts == nullptr) {
        d_logits[row + expert] = value;
        return;
    }
    const u32 first = __float_as_uint(value) & 0xffff0000u;
    // an fma, so that no compiler makes one with the product that `value` is
    const float rest = fmaf(__uint_as_float(first), -1.0f, value);
    parts[2 * row + expert] = static_cast<u16>(first >> 16);
    parts[2 * row + experts + expert] = static_cast<u16>(ptx::pack_bf16(rest, 0.0f));
}

// d_logits [T, E], or parts, from the weights' gradients [T, K].
extern "C" __global__ void __launch_bounds__(32 * kWarps)
    choose_experts_backward(const float* logits, const i64* ids, const float* d_weights, int tokens,
                            int experts, int top_k, int normalize, float scale, float* d_logits,
                            u16* parts) {
    const Gate gate{experts, top_k, 0, 0, 0, normalize, scale};
    const int token = blockIdx.x * kWarps + threadIdx.x / 32;
    if (token >= tokens) return;
    float score[kValues], d_score[kValues];
    const i64 row = static_cast<i64>(token) * experts, at = static_cast<i64>(token) * top_k;
    read_scores(logits + row, experts, score);
    const float mean = score_gradients(gate, score, ids + at, d_weights + at, d_score);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const int expert = 32 * i + lane();
        if (expert >= experts) continue;
        const float slope = kSigmoid ? d_score[i] * (1.0f - score[i]) : d_score[i] - mean;
        write_gradient(slope * score[i], row, expert, experts, d_logits, parts);
    }
}

__device__ __forceinline__ float read_or_zero(const float* at) { return at == nullptr ? 0.0f : *at; }

// The same, and the losses' share. Their gradients are scalars, null where there is none, and so may
// d_weights be. terms [2E + 4], of all `ranks`, each of which computes the losses; counts [sequences, E], of
// the sequences of `length` tokens of this rank: as losses.cu writes them.
extern "C" __global__ void __launch_bounds__(32 * kWarps, 2)
    choose_and_losses_backward(const float* logits, const i64* ids, const float* d_weights, int tokens,
                               int experts, int top_k, int normalize, float scale, const float* d_balance,
                               const float* d_sequence, const float* d_z, const float* terms,
                               const float* counts, int length, int ranks, float* d_logits, u16* parts) {
    const Gate gate{experts, top_k, 0, 0, 0, normalize, scale};
    const int token = blockIdx.x * kWarps + threadIdx.x / 32;
    if (token >= tokens) return;
    const float all = fmaxf(terms[2 * experts + 2], 1.0f), sequences = fmaxf(terms[2 * experts + 3], 1.0f);
    const float of_counts = read_or_zero(d_balance) * ranks * experts / (all * top_k) / all;
    const float of_sequence = read_or_zero(d_sequence) * ranks * experts /
                              (static_cast<float>(length) * top_k) / length / sequences;
    const float of_z = read_or_zero(d_z) * ranks * 2.0f / all;
    float score[kValues], share[kValues], d_score[kValues];
    const i64 row = static_cast<i64>(token) * experts, at = static_cast<i64>(token) * top_k;
    const float logsum = read_softmax(logits + row, experts, share);
#pragma unroll
    for (int i = 0; i < kValues; ++i) score[i] = share[i];
    if (kSigmoid) read_scores(logits + row, experts, score);
    const float* d_mine = d_weights == nullptr ? nullptr : d_weights + at;
    float mean = score_gradients(gate, score, ids + at, d_mine, d_score);
    const float total = kSigmoid ? add_scores(score, experts) + kTiny : 1.0f;
    const float* of_token = counts + static_cast<i64>(token / length) * experts;
    float d_probability[kValues], taken = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const int expert = 32 * i + lane();
        const bool there = expert < experts;
        d_probability[i] = there ? of_counts * terms[expert] : 0.0f;
        if (there && d_sequence != nullptr) d_probability[i] += of_sequence * of_token[expert];
        taken += there ? d_probability[i] * score[i] : 0.0f;
    }
    taken = add_lanes(taken);
    mean += taken;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const int expert = 32 * i + lane();
        if (expert >= experts) continue;
        float slope;
        if (kSigmoid) {
            const float d = d_score[i] + d_probability[i] / total - taken / (total * total);
            slope = d * (1.0f - score[i]);
        } else {
            slope = d_score[i] + d_probability[i] - mean;
        }
        const float value = slope * score[i] + of_z * logsum * share[i];
        write_gradient(value, row, expert, experts, d_logits, parts);
    }
}

}  // namespace gate
