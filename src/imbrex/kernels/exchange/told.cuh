// What blocks of a small dispatch have done, for whoever does not wait for its launch: the experts of the
// same launch (fused/few.cu), and the sums behind it (exchange/reduce.cu). Two words, zeros when a call
// begins, which the last block that leaves it sets back.
//
// Example, blocks 0 to 4 that dispatch: 0 to 2 place rows and positions, 3 tells where tokens go, 4 which
// experts have rows, and weights of rows. `placed` counts 0, 1, 2 and 4; `told` has the parts that are told.
#pragma once
#include "peers/protocol.cuh"

namespace exchange {

constexpr u32 kHitsTold = 1, kRowsTold = 2;  // parts of `told`

__device__ __forceinline__ u32* placed_of(const Call& call) { return &call.own->drawn[kSmall][0]; }
__device__ __forceinline__ u32* told_of(const Call& call) { return &call.own->drawn[kSmall][1]; }

// Of so many blocks that dispatch, those that place, which are the first; and those that `placed` counts.
__device__ __forceinline__ int placing_of(int blocks) { return max(1, blocks - 2); }
__device__ __forceinline__ u32 counted_of(int blocks) {
    return static_cast<u32>(min(blocks, placing_of(blocks) + 1));
}

// Whether all that routing writes is there, of a call that has begun: then it is there for this thread.
__device__ __forceinline__ bool is_routed(const Call& call, int blocks) {
    const u32 placed = ptx::load_acquire_gpu(placed_of(call)), told = ptx::load_acquire_gpu(told_of(call));
    return placed >= counted_of(blocks) && told == (kHitsTold | kRowsTold);
}

}  // namespace exchange
