// Compact rows with the own tokens among them: a token once on each rank that wants it, by source rank, then
// token.
//
// Routing numbers what a rank receives (`recv_row`) and leaves its own tokens out; here they stand between
// those of lower and of higher ranks. A block takes 1024 tokens of one rank; those of the own rank count the
// own tokens before them. The sums of traffic that programs for DeepEP hold are written beside.
//
// Example, 2 ranks, on rank 0: of its tokens 0 and 2 stay, token 1 of rank 1 arrives, recv_row [[-1, -1, -1],
// [-1, 0, -1]]. Rows [[0, -1, 1], [-1, 2, -1]], sources [0, 2, 1, -1, ..], received 3. Its token 2 goes to
// rank 1 alone with token 1: places there 0 and 1.
#include "ptx/exchange.cuh"

namespace rows {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

struct Compact {
    const int* recv_row;  // [W, max_tokens]
    const int* send_row;  // [max_tokens, W]
    const int* traffic;   // [W, W]; tokens of rank `row` that rank `column` wants, its own included
    int* position;        // [W, max_tokens, K]; the row, then -1
    i64* source;          // [rows]; which token of its rank a row is, -1: there is no such row
    int* place;           // [tokens, W]; number of an own token among those for a rank, or -1
    int* received;        // [1]
    int* source_int;      // [rows]; `source`, as programs hold it
    int* sums;            // [W, W] rows that ranks up to `row` send to `column`; [W] sent from here; [W] 0
    int ranks, me, max_tokens, choices, rows, tokens;
};

// Rows of the own tokens, in order; all threads, `here`: this thread's token stays.
__device__ inline int order_of(const Compact& compact, int first, bool here) {
    int* counts = reinterpret_cast<int*>(ptx::shared_memory());
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    if (thread <= kWarps) counts[thread] = 0;
    __syncthreads();
    const u32 mask = __ballot_sync(0xffffffffu, here);
    if (lane == 0) counts[warp] = __popc(mask);
    int before = 0;
    for (int t = thread; t < first; t += kThreads)
        before += compact.send_row[static_cast<i64>(t) * compact.ranks + compact.me] >= 0;
    if (before) atomicAdd(&counts[kWarps], before);
    __syncthreads();
    int order = counts[kWarps] + __popc(mask & ((1u << lane) - 1));
    for (int w = 0; w < warp; ++w) order += counts[w];
    return order;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    place_compact(const __grid_constant__ Compact compact) {
    const int ranks = compact.ranks, me = compact.me, thread = static_cast<int>(threadIdx.x);
    const int per_source = (compact.max_tokens + kThreads - 1) / kThreads;
    const int source = static_cast<int>(blockIdx.x) / per_source,
              first = static_cast<int>(blockIdx.x) % per_source * kThreads;
    const int token = first + thread;
    int lower = 0, all = 0;
    for (int s = 0; s < ranks; ++s) {
        const int count = compact.traffic[s * ranks + me];
        lower += s < me ? count : 0;
        all += count;
    }
    int row = -1;
    if (source == me) {
        const bool here =
            token < compact.tokens && compact.send_row[static_cast<i64>(token) * ranks + me] >= 0;
        const int order = order_of(compact, first, here);
        if (here) row = lower + order;
        for (int p = 0; p < ranks && token < compact.tokens; ++p) {
            const int sent = compact.send_row[static_cast<i64>(token) * ranks + p];
            int base = 0;  // of lower ranks' tokens there
            for (int s = 0; s < me; ++s) base += s == p ? 0 : compact.traffic[s * ranks + p];
            compact.place[static_cast<i64>(token) * ranks + p] = sent < 0  ? -1
                                                                 : p == me ? order
                                                                           : sent - base;
        }
    } else if (token < compact.max_tokens) {
        const int received = compact.recv_row[static_cast<i64>(source) * compact.max_tokens + token];
        if (received >= 0) row = received + (source > me ? compact.traffic[me * ranks + me] : 0);
    }
    if (token < compact.max_tokens)
        for (int k = 0; k < compact.choices; ++k)
            compact.position[(static_cast<i64>(source) * compact.max_tokens + token) * compact.choices + k] =
                k == 0 ? row : -1;
    if (row >= 0 && row < compact.rows) {
        compact.source[row] = token;
        compact.source_int[row] = token;
    }
    const int blocks = ranks * per_source;
    for (int r = all + static_cast<int>(blockIdx.x) * kThreads + thread; r < compact.rows;
         r += blocks * kThreads) {
        compact.source[r] = -1;
        compact.source_int[r] = -1;
    }
    if (blockIdx.x == 0 && thread == 0) compact.received[0] = all;
    if (blockIdx.x == 0 && thread < ranks) {
        int rows = 0;
        for (int s = 0; s < ranks; ++s) {
            rows += compact.traffic[s * ranks + thread];
            compact.sums[s * ranks + thread] = rows;
        }
        compact.sums[ranks * ranks + thread] = compact.traffic[me * ranks + thread];
        compact.sums[ranks * ranks + ranks + thread] = 0;
    }
}

// Where every expert-major row comes from, and its gate weight; the rows that no choice has are as they were.
// position {2, -1, 0, 1}, K = 2, weights {.5, 9, .25, 1}: source {1, 1, 0}, weights {.25, 1, .5}.
extern "C" __global__ void __launch_bounds__(256)
    index_rows(const int* position, const float* weights, int count, int choices, int rows, i64* source,
               float* weights_R, int blocks) {
    for (int i = blockIdx.x * 256 + threadIdx.x; i < count; i += blocks * 256) {
        const int row = position[i];
        if (row < 0 || row >= rows) continue;
        source[row] = i / choices;
        weights_R[row] = weights[i];
    }
}

}  // namespace rows
