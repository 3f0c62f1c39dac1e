// Expert-major order of the choices of a rank alone: the row of every choice, and of every row its choice,
// token and weight. An expert's rows are in the order of the choices, so the same ids give the same rows
// every time.
//
// A block has 512 ROUNDS choices, a warp of it 32 ROUNDS that follow each other. As many are one launch of
// one block. More are two: `count_choices` writes how many choices of each expert every block has, and each
// block of `place_choices` adds up those before it.
//
// Of a small batch `order_few` is the whole dispatch: every block orders all choices by itself, which is
// sooner done than waiting for one that does, and copies a share of the tokens to their rows. Its first block
// tells where rows end before they are there, to a product that begins meanwhile (gemm/follow.cu): until then
// the last end is negative, from before the next kernel may begin.
//
// Example, 3 experts, two choices a token, ids {2 0, 2 -1}: rows 0: choice 1, 1: choice 0, 2: choice 2;
// position {1 0, 2 -1}; counts {1 0 2}, ends {1 1 3}.
#include "ffn/hits.cuh"

namespace rows {

constexpr int kThreads = 512, kWarps = kThreads / 32, kRounds = ROUNDS;
constexpr int kDeep = 4, kPiece = 32 * kDeep;

// block: of those that share the choices.
__device__ __forceinline__ int choice_of(int block, int round) {
    return (block * kWarps + threadIdx.x / 32) * (32 * kRounds) + 32 * round + threadIdx.x % 32;
}

// -1 for choices that are dropped, past the end, or of an expert that does not exist (the caller's error,
// looked for under IMBREX_DEBUG=1): nothing is counted where it has no counter.
__device__ __forceinline__ int expert_of(const i64* ids, int choice, int choices, int experts) {
    const i64 id = choice < choices ? ids[choice] : -1;
    return id >= 0 && id < experts ? static_cast<int>(id) : -1;
}

// The experts of a thread's choices, asked for at once: a meeting of the warp would hold the next ones back.
struct Mine {
    int expert[kRounds];
};

__device__ __forceinline__ Mine ask_mine(const i64* ids, int block, int choices, int experts) {
    Mine mine;
#pragma unroll
    for (int round = 0; round < kRounds; ++round)
        mine.expert[round] = expert_of(ids, choice_of(block, round), choices, experts);
    return mine;
}

__device__ __forceinline__ void count_nothing(int experts, int* found) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kWarps * experts; i += kThreads) found[i] = 0;
    __syncthreads();
}

// found[warp][expert], zeros: becomes its choices of every expert. The whole block.
__device__ __forceinline__ void count_mine(const Mine& mine, int experts, int* found) {
    int* here = found + threadIdx.x / 32 * experts;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        const int expert = mine.expert[round];
        const u32 same = __match_any_sync(0xffffffffu, expert);
        if (expert >= 0 && __ffs(same) == static_cast<int>(threadIdx.x % 32) + 1)
            here[expert] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
}

// What a block knows of an expert: its choices, and how many of them blocks before it have.
struct Share {
    int all, before;
};

__device__ __forceinline__ Share sum_warps(const int* found, int expert, int experts) {
    Share share{0, 0};
#pragma unroll 4
    for (int warp = 0; warp < kWarps; ++warp) share.all += found[warp * experts + expert];
    return share;
}

// The whole block. found: becomes the choices of an expert before the warp's. counts [experts]: those of all
// warps; first [experts + 1]: the first row of every expert, and the end of the last. `share(expert)`;
// `tell(expert, all, end)` by the first warp, `beside()` by the second, when all counts are there.
template <class Of, class Tell, class Beside>
__device__ __forceinline__ void place_experts(int* found, int* counts, int* first, int experts, Of share,
                                              Tell tell, Beside beside) {
#pragma unroll 1
    for (int expert = threadIdx.x; expert < experts; expert += kThreads) {
        Share of = share(expert);
        counts[expert] = of.all;
#pragma unroll 4
        for (int warp = 0; warp < kWarps; ++warp) {
            const int there = found[warp * experts + expert];
            found[warp * experts + expert] = of.before, of.before += there;
        }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x;
        int start = 0;
#pragma unroll 1
        for (int i = 0; i < experts; i += 32) {
            const int all = i + lane < experts ? counts[i + lane] : 0;
            int sum = all;
#pragma unroll 1
            for (int offset = 1; offset < 32; offset *= 2) {
                const int left = __shfl_up_sync(0xffffffffu, sum, offset);
                if (lane >= offset) sum += left;
            }
            if (i + lane < experts) {
                first[i + lane] = start + sum - all;
                tell(i + lane, all, start + sum);
            }
            start += __shfl_sync(0xffffffffu, sum, 31);
        }
        if (lane == 0) first[experts] = start;
    } else if (threadIdx.x < 64) {
        beside();
    }
    __syncthreads();
}

// The whole block: `put(choice, row)` for its choices, row -1 where one is dropped.
template <class Put>
__device__ __forceinline__ void place_mine(const Mine& mine, int block, int choices, int experts, int* found,
                                           const int* first, Put put) {
    const int lane = threadIdx.x % 32;
    int* here = found + threadIdx.x / 32 * experts;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        const int choice = choice_of(block, round), expert = mine.expert[round];
        const u32 same = __match_any_sync(0xffffffffu, expert), lower = same & ((1u << lane) - 1);
        if (choice < choices) put(choice, expert < 0 ? -1 : first[expert] + here[expert] + __popc(lower));
        __syncwarp();
        if (expert >= 0 && lower == 0) here[expert] += __popc(same);
        __syncwarp();
    }
}

// number[blocks][experts]
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    count_choices(const i64* ids, int choices, int experts, int* number) {
    int* found = reinterpret_cast<int*>(ptx::shared_memory());
    const Mine mine = ask_mine(ids, blockIdx.x, choices, experts);
    count_nothing(experts, found);
    count_mine(mine, experts, found);
    for (int expert = threadIdx.x; expert < experts; expert += kThreads)
        number[blockIdx.x * experts + expert] = sum_warps(found, expert, experts).all;
}

// position [choices]: -1 where dropped. choice, token, weight of row [choices]: unset past the last row.
// top_k: choices of a token. number: as above, null where there is one block.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    place_choices(const i64* ids, const float* weights, const int* number, int choices, int top_k,
                  int experts, i64* position, i64* choice_of_row, i64* token_of_row, float* weight_of_row,
                  i64* counts, int* ends) {
    int* found = reinterpret_cast<int*>(ptx::shared_memory());
    int *sums = found + kWarps * experts, *first = sums + experts;
    const Mine mine = ask_mine(ids, blockIdx.x, choices, experts);
    count_nothing(experts, found);
    count_mine(mine, experts, found);
    const auto share = [&](int expert) {
        if (number == nullptr) return sum_warps(found, expert, experts);
        Share of{0, 0};
        for (int block = 0; block < static_cast<int>(gridDim.x); ++block) {
            const int there = number[block * experts + expert];
            of.all += there, of.before += block < static_cast<int>(blockIdx.x) ? there : 0;
        }
        return of;
    };
    const auto tell = [&](int expert, int all, int end) {
        if (blockIdx.x == 0) counts[expert] = all, ends[expert] = end;
    };
    place_experts(found, sums, first, experts, share, tell, [] {});
    place_mine(mine, blockIdx.x, choices, experts, found, first, [&](int choice, int row) {
        position[choice] = row;
        if (row < 0) return;
        choice_of_row[row] = choice;
        token_of_row[row] = static_cast<u32>(choice) / static_cast<u32>(top_k);
        weight_of_row[row] = weights[choice];
    });
}

// Of at most 512 ROUNDS choices. x [tokens][units], rows [choices][units]: 16 bytes. plan [counters +
// experts]: zeros, and where rows end.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    order_few(const uint4* x, const i64* ids, const float* weights, int choices, int top_k, int experts,
              int units, uint4* rows, i64* position, i64* choice_of_row, float* weight_of_row, i64* counts,
              int* plan, int counters, u32* hits) {
    int* found = reinterpret_cast<int*>(ptx::shared_memory());
    int *sums = found + kWarps * experts, *first = sums + experts, *token_of_row = first + experts + 1;
    int* ends = plan + counters;
    const bool tells = blockIdx.x == 0;
    const int thread = static_cast<int>(threadIdx.x);
    count_nothing(experts, found);
    ptx::wait_for_launches();
    const Mine mine = ask_mine(ids, 0, choices, experts);
    u32* last = reinterpret_cast<u32*>(ends + experts - 1);
    if (tells && thread == 0) ptx::store_release_gpu(last, 0xffffffffu);
    if (tells && thread == 32) ffn::tell_no_hits(hits);
    ptx::launch_dependents();
    if (tells && thread < counters) plan[thread] = 0;
    count_mine(mine, experts, found);
    const auto share = [&](int expert) { return sum_warps(found, expert, experts); };
    const auto tell = [&](int expert, int all, int end) {
        if (!tells) return;
        counts[expert] = all;
        if (expert < experts - 1) ends[expert] = end;
    };
    const auto tell_hits = [&] {
        if (tells) ffn::tell_hits(hits, experts, [&](int e) { return e < experts ? sums[e] : 0; });
    };
    place_experts(found, sums, first, experts, share, tell, tell_hits);
    if (tells && thread == 32) ptx::store_release_gpu(last, static_cast<u32>(first[experts]));
    place_mine(mine, 0, choices, experts, found, first, [&](int choice, int row) {
        if (row >= 0) token_of_row[row] = static_cast<u32>(choice) / static_cast<u32>(top_k);
        if (!tells) return;
        position[choice] = row;
        if (row >= 0) choice_of_row[row] = choice, weight_of_row[row] = weights[choice];
    });
    __syncthreads();
    // A warp has a piece of a row: 32 lanes with kDeep loads under way.
    const int parts = (units + kPiece - 1) / kPiece, pieces = first[experts] * parts;
#pragma unroll 1
    for (int piece = blockIdx.x * kWarps + thread / 32; piece < pieces; piece += gridDim.x * kWarps) {
        const int row = piece / parts, unit = piece % parts * kPiece + thread % 32;
        const uint4* from = x + static_cast<i64>(token_of_row[row]) * units;
        uint4* to = rows + static_cast<i64>(row) * units;
        uint4 values[kDeep];
#pragma unroll
        for (int i = 0; i < kDeep; ++i) values[i] = from[unit + 32 * i < units ? unit + 32 * i : units - 1];
#pragma unroll
        for (int i = 0; i < kDeep; ++i)
            if (unit + 32 * i < units) to[unit + 32 * i] = values[i];
    }
}

}  // namespace rows
