// Expert-major order of the choices of a rank alone: the row of every choice, and of every row its choice,
// token and weight. An expert's rows are in the order of the choices, so the same ids give the same rows
// every time.
//
// A block has 512 ROUNDS choices, a warp of it 32 ROUNDS that follow each other. As many are one launch of
// one block. More are two: `count_choices` writes how many choices of each expert every block has, and each
// block of `place_choices` adds up those before it.
//
// Example, 3 experts, two choices a token, ids {2 0, 2 -1}: rows 0: choice 1, 1: choice 0, 2: choice 2;
// position {1 0, 2 -1}; counts {1 0 2}, ends {1 1 3}.
#include "ptx/exchange.cuh"

namespace rows {

constexpr int kThreads = 512, kWarps = kThreads / 32, kRounds = ROUNDS;

__device__ __forceinline__ int choice_of(int round) {
    return (blockIdx.x * kWarps + threadIdx.x / 32) * (32 * kRounds) + 32 * round + threadIdx.x % 32;
}

// -1 for choices that are dropped, past the end, or of an expert that does not exist (the caller's error,
// looked for under IMBREX_DEBUG=1): nothing is counted where it has no counter.
__device__ __forceinline__ int expert_of(const i64* ids, int choice, int choices, int experts) {
    const i64 id = choice < choices ? ids[choice] : -1;
    return id >= 0 && id < experts ? static_cast<int>(id) : -1;
}

// found[expert] of every warp: its choices of every expert. Zero before.
__device__ __forceinline__ void count_mine(const i64* ids, int choices, int experts, int* found) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        const int expert = expert_of(ids, choice_of(round), choices, experts);
        const u32 same = __match_any_sync(0xffffffffu, expert);
        if (expert >= 0 && __ffs(same) == static_cast<int>(threadIdx.x % 32) + 1)
            found[expert] += __popc(same);
        __syncwarp();
    }
}

// number[blocks][experts]
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    count_choices(const i64* ids, int choices, int experts, int* number) {
    int* found = reinterpret_cast<int*>(ptx::shared_memory());
    for (int i = threadIdx.x; i < kWarps * experts; i += kThreads) found[i] = 0;
    __syncthreads();
    count_mine(ids, choices, experts, found + threadIdx.x / 32 * experts);
    __syncthreads();
    for (int expert = threadIdx.x; expert < experts; expert += kThreads) {
        int sum = 0;
        for (int warp = 0; warp < kWarps; ++warp) sum += found[warp * experts + expert];
        number[blockIdx.x * experts + expert] = sum;
    }
}

// position [choices]: -1 where dropped. choice, token, weight of row [choices]: unset past the last row.
// top_k: choices of a token. number: as above, null where there is one block.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    place_choices(const i64* ids, const float* weights, const int* number, int choices, int top_k,
                  int experts, i64* position, i64* choice_of_row, i64* token_of_row, float* weight_of_row,
                  i64* counts, int* ends) {
    int* found = reinterpret_cast<int*>(ptx::shared_memory());
    int* first = found + kWarps * experts;  // of an expert, of this block
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int* mine = found + warp * experts;
    for (int i = threadIdx.x; i < kWarps * experts; i += kThreads) found[i] = 0;
    __syncthreads();
    count_mine(ids, choices, experts, mine);
    __syncthreads();
    for (int expert = threadIdx.x; expert < experts; expert += kThreads) {
        int before = 0, all = 0;
        if (number == nullptr) {
            for (int w = 0; w < kWarps; ++w) all += found[w * experts + expert];
        } else {
            for (int block = 0; block < static_cast<int>(gridDim.x); ++block) {
                const int there = number[block * experts + expert];
                all += there, before += block < static_cast<int>(blockIdx.x) ? there : 0;
            }
        }
        first[expert] = all;
        for (int w = 0; w < kWarps; ++w) {  // what comes before a warp's choices in this expert
            const int there = found[w * experts + expert];
            found[w * experts + expert] = before, before += there;
        }
    }
    __syncthreads();
    if (warp == 0) {
        int start = 0;
        for (int i = 0; i < experts; i += 32) {
            const int all = i + lane < experts ? first[i + lane] : 0;
            int sum = all;
#pragma unroll
            for (int offset = 1; offset < 32; offset *= 2) {
                const int left = __shfl_up_sync(0xffffffffu, sum, offset);
                if (lane >= offset) sum += left;
            }
            if (i + lane < experts) {
                first[i + lane] = start + sum - all;
                if (blockIdx.x == 0) counts[i + lane] = all, ends[i + lane] = start + sum;
            }
            start += __shfl_sync(0xffffffffu, sum, 31);
        }
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        const int choice = choice_of(round), expert = expert_of(ids, choice, choices, experts);
        const u32 same = __match_any_sync(0xffffffffu, expert), lower = same & ((1u << lane) - 1);
        if (expert >= 0) {
            const int row = first[expert] + mine[expert] + __popc(lower);
            position[choice] = row;
            choice_of_row[row] = choice;
            token_of_row[row] = static_cast<u32>(choice) / static_cast<u32>(top_k);
            weight_of_row[row] = weights[choice];
        } else if (choice < choices) {
            position[choice] = -1;
        }
        __syncwarp();
        if (expert >= 0 && lower == 0) mine[expert] += __popc(same);
        __syncwarp();
    }
}

}  // namespace rows
