// When each block of a small batch's kernels has come where, for `benchmarks/decode_one.py --stamps`, which
// compiles them with STAMPS. Without it these functions are nothing, and machine code is what it was.
//
// A stamp is the clock of the block's multiprocessor: some five instructions, since what runs for the first
// time comes from memory, 30 instructions a microsecond. Clocks of multiprocessors differ, so a block's begin
// and end have the time of the GPU as well, from which the host knows all times (imbrex/bench/stamps.py).
//
// Example: `if (threadIdx.x == 0) ptx::stamp(ptx::kChoices);`. One thread of a block sets each; of several
// turns the last one counts. A stamp older than its block's begin is of a launch before.
#pragma once
#include "ptx/base.cuh"

#ifndef STAMPS
#define STAMPS 0
#endif

namespace ptx {

// In the order in which blocks come by; the host reads the names.
enum Stamp {
    kBeginTime,   // the GPU's time at the begin
    kEndTime,     // the GPU's time at the end
    kBegun,       // begun
    kReleased,    // the launch before has ended
    kChoices,     // all choices have come
    kTells,       // tells who has rows (one block)
    kPlaced,      // its part of the rows placed
    kDispatched,  // dispatch left, fenced
    kKnows,       // knows who has rows
    kTile,        // first tile known
    kAsked,       // its weights asked for
    kSeen,        // rows seen to be placed
    kFenced,      // and fenced for the copy engine
    kRows,        // rows asked for
    kFull,        // first step in shared memory
    kFirst,       // first tile multiplied
    kUps,         // last tile of gate and up counted
    kDownAsked,   // first tile of down: weights asked for
    kDownRows,    // its part seen
    kDownFull,    // its first step in shared memory
    kStored,      // last store has ended
    kEnded,       // ended
    kStamps
};

#if STAMPS
constexpr int kStampedBlocks = 256;
extern "C" {
__device__ u64 stamps[kStampedBlocks * kStamps];

// A copy of all stamps, which are zeros again. One block.
__global__ void read_stamps(u64* to) {
    for (u32 i = threadIdx.x; i < kStampedBlocks * kStamps; i += blockDim.x) to[i] = stamps[i], stamps[i] = 0;
}
}
#endif

__device__ __forceinline__ u64 stamp_clock() {
#ifdef __CUDA_ARCH__
    return clock64();
#else
    return global_timer();  // emulated
#endif
}

__device__ __forceinline__ void stamp_value(Stamp what, u64 value) {
#if STAMPS
    u32 block = blockIdx.x;
    forget(block);  // no address is kept, for which there is no register
    if (block < kStampedBlocks) stamps[block * kStamps + what] = value;
#endif
}

__device__ __forceinline__ void stamp(Stamp what) {
#if STAMPS
    stamp_value(what, stamp_clock());
#endif
}

// One thread, first and last of all.
__device__ __forceinline__ void stamp_begin() {
#if STAMPS
    stamp_value(kBeginTime, global_timer());
    stamp(kBegun);
#endif
}
__device__ __forceinline__ void stamp_end() {
#if STAMPS
    stamp_value(kEndTime, global_timer());
    stamp(kEnded);
#endif
}

}  // namespace ptx
