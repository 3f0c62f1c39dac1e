// Which rows of every expert are of this rank's own tokens, for a product that comes later and takes the
// others' first (fused/others_first.cu): found by the movers' warps, behind their rows.
//
// Rows of an expert lie in the order of their tokens' ranks, so own rows are one piece of them. Its ends are
// looked for by a warp each, 32 rows at a time: two or three loads one after the other for 1000 rows.
//
// Example, rank 1 of 3, an expert with rows 10 .. 15 of ranks 0 0 1 1 1 2: own = {12, 15}.
#pragma once
#include "fused/movers.cuh"

namespace fused {

// The first of rows `begin` .. `end` - 1 whose token is `bound` or a later one; `end` without. All lanes.
__device__ __forceinline__ int first_row_from(const int* token, int bound, int begin, int end) {
    const int lane = static_cast<int>(ptx::lane_id());
#pragma unroll 1
    while (begin < end) {
        const int step = (end - begin + 31) / 32, at = begin + lane * step;
        const int before = __popc(__ballot_sync(~0u, at < end && token[at] < bound));
        if (before == 0) break;
        end = gemm::least(end, begin + before * step);
        begin += (before - 1) * step + 1;
    }
    return begin;
}

// What idle warps do: `gemm::run`'s `beside`. `ends`: where every expert's rows end.
struct BringAndFind {
    Bring bring;
    const int* ends;
    int experts;

    __device__ __forceinline__ void operator()() const {
        bring();
        const Rows& rows = bring.rows;
        if (rows.own == nullptr) return;
        const int me = bring.group.first, room = count_rows(rows);
        const int warp = static_cast<int>(blockIdx.x) * 3 + static_cast<int>(threadIdx.x % 128 / 32) - 1;
#pragma unroll 1
        for (int i = warp; i < 2 * experts; i += 3 * static_cast<int>(gridDim.x)) {
            const int expert = i / 2, begin = expert > 0 ? ends[expert - 1] : 0;
            const int found = first_row_from(rows.token, (me + i % 2) * rows.max_tokens,
                                             gemm::least(begin, room), gemm::least(ends[expert], room));
            if (ptx::lane_id() == 0) {
                rows.own[i] = found;
                ptx::fence_gpu();
                ptx::add_relaxed_gpu(rows.bounds, 1);
            }
        }
    }
};

}  // namespace fused
