// Which experts have rows: told by a dispatch to the product that begins beside it (ffn/both.cu), which would
// take 5 us to find its first tile from where rows end.
//
// hits: u32 [4 + 2 experts]: how many experts have rows, negative as an int until the rest is there; a word
// that nobody reads; then of each of them, in order, its number and, 16 bits up, its first unit of 64 rows,
// and its first row; behind the last one the number of all units, 16 bits up, and of all rows.
// Example: experts of 3, 0 and 70 rows: 2, -, {0, 0}, {2 | 1 << 16, 3}, {3 << 16, 73}.
#pragma once
#include "ptx/exchange.cuh"

namespace ffn {

constexpr int kFirstHit = 2;  // word

__device__ __forceinline__ int hit_words(int experts) { return 4 + 2 * experts; }

// One thread, before the product may begin: nothing is told yet.
__device__ __forceinline__ void tell_no_hits(u32* hits) { ptx::store_release_gpu(hits, ~0u); }

// One warp. `rows_of(expert)`: 0 from `experts` on. What was written before is there for who sees the number.
// Of 32 experts together up to 2^19 - 1 rows: they are added up in one word with their units.
template <class RowsOf>
__device__ __forceinline__ void tell_hits(u32* hits, int experts, RowsOf rows_of) {
    const int lane = static_cast<int>(ptx::lane_id());
    uint2* entry = reinterpret_cast<uint2*>(hits + kFirstHit);
    u32 count = 0, units = 0, rows = 0;
#pragma unroll 1
    for (int first = 0; first < experts; first += 32) {
        const u32 mine = static_cast<u32>(rows_of(first + lane)), tiles = (mine + 63) / 64;
        u32 sum = tiles << 19 | mine;
#pragma unroll 1
        for (int step = 1; step < 32; step *= 2) {
            const u32 left = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += left;
        }
        const u32 hit = __ballot_sync(~0u, mine > 0), row_end = rows + (sum & 0x7ffffu),
                  unit_end = units + (sum >> 19);
        if (mine > 0)
            entry[count + __popc(hit & ((1u << lane) - 1))] = {
                static_cast<u32>(first + lane) | (unit_end - tiles) << 16, row_end - mine};
        count += __popc(hit);
        units = __shfl_sync(~0u, unit_end, 31);
        rows = __shfl_sync(~0u, row_end, 31);
    }
    if (lane == 0) entry[count] = {units << 16, rows};
    __syncwarp();
    if (lane == 0) ptx::store_release_gpu(hits, count);
}

// How many experts have rows, as soon as it is told. All lanes. Bounded: whoever has waited for the launch
// before knows it as well.
__device__ __forceinline__ int wait_for_hits(const u32* hits) {
    constexpr int kLooks = 1000;
#pragma unroll 1
    for (int look = 0; look < kLooks; ++look) {
        const int count = static_cast<int>(ptx::load_acquire_gpu(hits));
        if (count >= 0) return count;
        ptx::pause();
    }
    ptx::wait_for_launches();
    return static_cast<int>(ptx::load_acquire_gpu(hits));
}

// How many units there are. By now it is told.
__device__ __forceinline__ int told_units(const u32* hits) {
    return static_cast<int>(hits[kFirstHit + 2 * wait_for_hits(hits)] >> 16);
}

}  // namespace ffn
