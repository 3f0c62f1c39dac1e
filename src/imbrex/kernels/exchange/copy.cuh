// Copies by plain loads and stores of 16 bytes, several in flight.
#pragma once
#include "ptx/exchange.cuh"

namespace mover {

constexpr int kStaged = 7;  // loads that a thread has in flight: a quarter of a row of 7168 values by a warp

// Words `first`, `first` + step, ... before `end`, between two addresses.
template <int kCount>
struct Words {
    uint4 value[kCount];
    __device__ __forceinline__ void load(const u8* from, int first, int step, int end) {
#pragma unroll
        for (int u = 0; u < kCount; ++u)
            value[u] = ptx::load_once(from + 16 * static_cast<i64>(first + u * step), first + u * step < end);
    }
    __device__ __forceinline__ void store(u8* to, int first, int step, int end) const {
#pragma unroll
        for (int u = 0; u < kCount; ++u)
            if (first + u * step < end) reinterpret_cast<uint4*>(to)[first + u * step] = value[u];
    }
};

// `words` words by thread `thread` of `threads`.
__device__ inline void copy_words(u8* to, const u8* from, int words, int thread, int threads) {
    Words<kStaged> held;
    for (int first = thread; first < words; first += kStaged * threads) {
        held.load(from, first, threads, words);
        held.store(to, first, threads, words);
    }
}

}  // namespace mover
