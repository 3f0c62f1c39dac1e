// From the chunks' sums of choose.cu to the losses of a batch, in one launch. A block has 32 experts, a lane
// each; of a sequence's chunks slice i, a warp, adds i, i + slices, ..., then the slices are added in order,
// and then what every team of slices has of its sequences. Few sequences have many slices: the most, a power
// of two, that 32 warps hold for all of them. The last block to come adds what all have.
//
// terms [2E + 4]: of every expert its choices, then its probability; then the sum over sequences of
// E * sum_e f_e P_e, the sum of squares of logsumexp, the tokens, the sequences. Terms of ranks are added.
//
// Example, 2 experts, top 1, one sequence of 4 tokens that all choose expert 0 with probability 3/4: choices
// {4, 0}, probabilities {3, 1}; balance 2 * (4/4 * 3/4 + 0/4 * 1/4) = 1.5, and so the sequence's.
#include "ptx/exchange.cuh"

namespace gate {

constexpr int kLossWarps = 32;
constexpr u32 kEvery = 0xffffffffu;

__device__ __forceinline__ int own_lane() { return threadIdx.x % 32; }
__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2)
        x += __uint_as_float(__shfl_xor_sync(kEvery, __float_as_uint(x), mask));
    return x;
}

// By one warp. Any of the three may be null. An empty batch has loss 0.
__device__ __forceinline__ void write_losses(const float* terms, int experts, int top_k, float* balance,
                                             float* sequence, float* z) {
    const float* rest = terms + 2 * experts;
    const float tokens = fmaxf(rest[2], 1.0f), sequences = fmaxf(rest[3], 1.0f);
    float sum = 0.0f;
    for (int expert = own_lane(); expert < experts; expert += 32)
        sum += terms[expert] / (tokens * top_k) * terms[experts + expert] / tokens;
    sum = sum_lanes(sum);
    if (own_lane() != 0) return;
    if (balance != nullptr) *balance = experts * sum;
    if (sequence != nullptr) *sequence = rest[0] / sequences;
    if (z != nullptr) *z = rest[1] / tokens;
}

// mass, counts [sequences * chunks, E] and squares [sequences * chunks] of choose_and_sum. parts [blocks],
// arrived: 0. counts_of [sequences, E]. Losses are those of this rank alone.
extern "C" __global__ void __launch_bounds__(32 * kLossWarps)
    sum_losses(const float* mass, const int* counts, const float* squares, int chunks, int sequences,
               int length, int experts, int top_k, float* parts, u32* arrived, float* terms,
               float* counts_of, float* balance, float* sequence, float* z) {
    float* shared = reinterpret_cast<float*>(ptx::shared_memory());
    float *masses = shared, *chosens = shared + 1024, *products = shared + 2048;
    const int warp = threadIdx.x / 32, lane = own_lane(), expert = blockIdx.x * 32 + lane;
    int slices = kLossWarps;
    while (slices > 1 && slices * sequences > kLossWarps) slices /= 2;
    const int teams = kLossWarps / slices, team = warp / slices;
    float my_mass = 0.0f, my_count = 0.0f, my_product = 0.0f;
    for (int round = 0; round * teams < sequences; ++round) {
        const int s = round * teams + team;
        float sum = 0.0f;
        int count = 0;
        if (s < sequences && expert < experts)
#pragma unroll 4
            for (int c = warp % slices; c < chunks; c += slices) {
                const i64 at = (static_cast<i64>(s) * chunks + c) * experts + expert;
                sum += mass[at], count += counts[at];
            }
        masses[threadIdx.x] = sum, chosens[threadIdx.x] = static_cast<float>(count);
        __syncthreads();
        if (warp % slices == 0 && s < sequences && expert < experts) {
            float its_mass = 0.0f, its_count = 0.0f;
            for (int i = 0; i < slices; ++i)
                its_mass += masses[threadIdx.x + 32 * i], its_count += chosens[threadIdx.x + 32 * i];
            my_mass += its_mass, my_count += its_count;
            my_product += its_count / (static_cast<float>(length) * top_k) * (its_mass / length);
            counts_of[static_cast<i64>(s) * experts + expert] = its_count;
        }
        __syncthreads();
    }
    masses[threadIdx.x] = my_mass, chosens[threadIdx.x] = my_count, products[threadIdx.x] = my_product;
    __syncthreads();
    if (warp == 0) {
        my_mass = my_count = my_product = 0.0f;
        for (int i = 0; i < teams; ++i) {
            const int at = 32 * i * slices + lane;
            my_mass += masses[at], my_count += chosens[at], my_product += products[at];
        }
        if (expert < experts) terms[expert] = my_count, terms[experts + expert] = my_mass;
        my_product = sum_lanes(my_product);
        if (lane == 0) parts[blockIdx.x] = my_product;
    }
    if (blockIdx.x == 0) {
        float square = 0.0f;
        for (int c = threadIdx.x; c < sequences * chunks; c += 32 * kLossWarps) square += squares[c];
        square = sum_lanes(square);
        __syncthreads();
        if (lane == 0) masses[warp] = square;
        __syncthreads();
        if (threadIdx.x == 0) {
            square = 0.0f;
            for (int i = 0; i < kLossWarps; ++i) square += masses[i];
            float* rest = terms + 2 * experts;
            rest[1] = square, rest[2] = static_cast<float>(sequences) * length, rest[3] = sequences;
        }
    }
    if (warp != 0) return;
    ptx::fence_gpu();
    __syncwarp();
    int last = 0;
    if (lane == 0) last = ptx::add_acq_rel_gpu(arrived, 1) + 1 == gridDim.x;
    if (!__shfl_sync(kEvery, last, 0)) return;
    ptx::fence_gpu();
    if (lane == 0) {
        float sum = 0.0f;
        for (int i = 0; i < static_cast<int>(gridDim.x); ++i) sum += parts[i];
        terms[2 * experts] = experts * sum;
    }
    __syncwarp();
    write_losses(terms, experts, top_k, balance, sequence, z);
}

// The losses of ranks whose terms have been added.
extern "C" __global__ void __launch_bounds__(32)
    losses_of_terms(const float* terms, int experts, int top_k, float* balance, float* sequence, float* z) {
    write_losses(terms, experts, top_k, balance, sequence, z);
}

}  // namespace gate
