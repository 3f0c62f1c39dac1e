// What every exchange kernel shares: who I am, flags, bounded waits, the way out.
//
// A launch holds `blocks` blocks for every rank that it carries: one rank per launch between real GPUs, W of
// them on one GPU in the tests (virtual ranks). Block b works for rank `first + b / blocks`. Peers are plain
// pointers.
//
// Flags are words in the heap of the rank that waits; only one peer (and one block of it) writes a given
// word, and only ever larger epochs, compared as differences so that they may wrap (`reached`). The epoch of
// a kind of kernel counts its calls and lives on the device, so a captured graph goes on counting.
#pragma once
#include "ptx/exchange.cuh"

#ifndef SELDOM
#define SELDOM inline  // __noinline__ where instructions that are not run are in the way of those that are
#endif
#ifndef LAST_TRIES
#define LAST_TRIES (1u << 16)  // of a barrier, once the call has failed: a second or so
#endif

namespace exchange {

constexpr int kMaxRanks = 64;
constexpr int kMaxBlocks = 132;
constexpr int kBatch = 8;  // loads that a thread has in flight: no branch stands around one

enum Kind {
    kRoute = 0,
    kPush = 1,
    kPull = 2,
    kCombine = 3,
    kSmall = 4,
    kGather = 5,
    kSmallRows = 6  // only has flags
};
enum Phase {
    kPeerStarted = 1,
    kIdsArrived = 2,
    kRowsArrived = 3,
    kRowsStaged = 4,
    kRowsReduced = 5,
    kOwnBlocks = 6
};
enum Code { kTimedOut = 1, kPeerGaveUp = 2, kBadIds = 3, kOverflow = 4, kOtherCall = 5, kBadInput = 6 };

// The first bytes of every heap. Zeroed once, when the heap is made. The host reads them: `kernels.structs`.
struct Control {
    u32 status[8];  // code, rank, peer, kind, phase, epoch, block, 1 + layer: the first failure of this rank
    u32 gave_up;    // 1 + a peer that failed; written by that peer
    u32 barrier;    // arrivals of this rank's own blocks in the current routing
    u32 overflows;  // calls that did not fit
    u32 unused;
    u32 epoch[8];     // per kind, calls completed
    u32 tickets[8];   // per kind, blocks that have left the current call
    u32 drawn[8][2];  // per kind, pieces of work that warps have drawn in the current call, of two bags
    u32 started[8][kMaxRanks];
    u32 arrived[8][kMaxRanks][kMaxBlocks];
};

// By value into every kernel. The host reads them: `kernels.structs`.
struct Group {
    u8* heap[kMaxRanks];
    u64 timeout_ns;
    u32* host_status;   // pinned host memory: 8 words for every rank of the launch
    i64 staged_flags;   // offset in a heap of u32 [W][flags]: group of tokens staged by that peer
    i64 reduced_flags;  // offset of u32 [W][flags]: group of my tokens reduced by that peer
    int flags;
    int ranks;
    int first;
    int blocks;
    int layer;  // 1 + the layer whose call it is, 0: nobody said
};

struct Call {
    const Group* group;
    Control* own;
    Kind kind;
    int me;      // rank
    int local;   // which of the launch's ranks: index of its slice of the stacked user tensors
    int block;   // among the blocks of this rank
    int blocks;  // of this rank that share the work
    u32 epoch;
};

__device__ __forceinline__ Control* control_of(const Group& group, int rank) {
    return reinterpret_cast<Control*>(group.heap[rank]);
}

// Tests run the protocol with a variant whose threads stall here and there, one of four, for up to STALL_NS.
__device__ __forceinline__ void stall(const Call& call, u32 where) {
#ifdef STALL_NS
    u32 mixed =
        ((call.epoch * kMaxRanks + static_cast<u32>(call.me)) * kMaxBlocks + static_cast<u32>(call.block)) *
            8191 +
        where * 64 + threadIdx.x / 32;
    mixed = (mixed ^ mixed >> 15) * 0x2c1b3c6du;
    mixed = (mixed ^ mixed >> 12) * 0x297a2d39u;
    if (mixed >> 30) return;
    const u64 until = ptx::global_timer() + mixed % STALL_NS;
    while (ptx::global_timer() < until) ptx::pause();
#endif
}

__device__ __forceinline__ u32* flag_of(const Group& group, i64 flags, int at, int from, int index) {
    return reinterpret_cast<u32*>(group.heap[at] + flags) + static_cast<i64>(from) * group.flags + index;
}

// All of a call but its epoch, which nothing may ask for before the kernels before this one have ended.
// `aside`: blocks, the last ones, that do something else.
__device__ __forceinline__ Call name_call(const Group& group, Kind kind, int aside = 0) {
    Call call;
    call.group = &group;
    call.local = static_cast<int>(blockIdx.x) / group.blocks;
    call.me = group.first + call.local;
    call.block = static_cast<int>(blockIdx.x) % group.blocks;
    call.blocks = group.blocks - aside;
    call.kind = kind;
    call.own = control_of(group, call.me);
    call.epoch = 0;
    return call;
}

__device__ __forceinline__ void count_call(Call& call) {
    call.epoch = ptx::load_relaxed_sys(&call.own->epoch[call.kind]) + 1;  // written by a kernel before
    stall(call, 0);
}

__device__ __forceinline__ Call begin_call(const Group& group, Kind kind, int aside = 0) {
    Call call = name_call(group, kind, aside);
    count_call(call);
    return call;
}

constexpr u32 kBroken = 1u << 16;  // added to the tickets by a block whose part is not whole

// The tickets that blocks have left before this one, who takes one more. The last closes the epoch.
__device__ __forceinline__ u32 take_ticket(const Call& call, u32 ticket) {
    const u32 left = ptx::add_acq_rel_gpu(&call.own->tickets[call.kind], ticket);
    if (left % kBroken + 1 == static_cast<u32>(call.group->blocks)) {
        call.own->tickets[call.kind] = 0;
        if (call.kind == kRoute) call.own->barrier = 0;
        call.own->drawn[call.kind][0] = call.own->drawn[call.kind][1] = 0;
        call.own->epoch[call.kind] = call.epoch;
    }
    return left;
}

// The last block of a rank to leave closes the epoch. All threads of the block, of which `thread` does it.
__device__ __forceinline__ void end_call(const Call& call, u32 thread = 0) {
    __syncthreads();
    if (threadIdx.x == thread) take_ticket(call, 1);
}

// `end_call` of a kernel that writes rows. `fine`: what this thread had to do is done. Where some thread of
// the rank's blocks says no, the last block, when all others have stored what they will, makes NaN of the
// result: nobody takes what the memory held for rows.
__device__ __forceinline__ void end_rows(const Call& call, bool fine, void* result, i64 bytes) {
    const bool whole = __syncthreads_and(fine) != 0;
    bool kept = true;
    if (threadIdx.x == 0) {
        const u32 left = take_ticket(call, whole ? 1 : 1 + kBroken);
        kept = left % kBroken + 1 != static_cast<u32>(call.group->blocks) || (whole && left < kBroken);
    }
    if (__syncthreads_and(kept)) return;
    uint4* words = static_cast<uint4*>(result);
#pragma unroll 1
    for (i64 i = threadIdx.x; i < bytes / 16; i += blockDim.x) words[i] = {~0u, ~0u, ~0u, ~0u};
}

// Whether a word says this epoch or one of the next. Not every call writes every word: that of a block or of
// a group of tokens which only large calls have may be 2^31 calls old, and half of all differences would take
// it for a later one. Ranks meet in every routing, so none is ever so many calls ahead.
constexpr u32 kSoon = 1u << 20;
__device__ __forceinline__ bool reached(u32 value, u32 epoch) { return value - epoch < kSoon; }

__device__ __forceinline__ bool failed(const Call& call) {
    return (ptx::load_relaxed_sys(&call.own->status[0]) | ptx::load_relaxed_sys(&call.own->gave_up)) != 0;
}

// Keep the first failure, show it to the host, and let no peer wait for us in vain.
__device__ SELDOM void give_up(const Call call, Code code, Phase phase, int peer) {
    if (ptx::claim_zero_sys(&call.own->status[0], code) != 0) return;
    const u32 what[8] = {static_cast<u32>(code),       static_cast<u32>(call.me),
                         static_cast<u32>(peer),       static_cast<u32>(call.kind),
                         static_cast<u32>(phase),      call.epoch,
                         static_cast<u32>(call.block), static_cast<u32>(call.group->layer)};
#pragma unroll
    for (int i = 7; i >= 1; --i) {
        call.own->status[i] = what[i];
        ptx::store_relaxed_sys(&call.group->host_status[call.local * 8 + i], what[i]);
    }
    ptx::fence_sys();
    ptx::store_relaxed_sys(&call.group->host_status[call.local * 8], what[0]);
    for (int p = 0; p < call.group->ranks; ++p)
        if (p != call.me)
            ptx::store_relaxed_sys(&control_of(*call.group, p)->gave_up, static_cast<u32>(call.me) + 1);
}

// A failure that stands: leave, and tell the host if it was a peer's.
__device__ inline bool leave_if_failed(const Call& call, Phase phase) {
    if (!failed(call)) return false;
    const u32 peer = ptx::load_relaxed_sys(&call.own->gave_up);
    if (peer != 0) give_up(call, kPeerGaveUp, phase, static_cast<int>(peer) - 1);
    return true;
}

// Whether to stop waiting: time is up, or something has failed. `polls` so far.
__device__ inline bool stop_waiting(const Call& call, Phase phase, int peer, u64 start, u32 polls) {
    if ((polls & 31) == 0) {
        if (leave_if_failed(call, phase)) return true;
        if (ptx::global_timer() - start > call.group->timeout_ns) {
            give_up(call, kTimedOut, phase, peer);
            return true;
        }
    }
    ptx::pause();
    return false;
}

// Wait until `word` has reached `epoch`; false after the time-out or any failure. One thread or many.
__device__ inline bool wait_flag(const Call& call, const u32* word, u32 epoch, Phase phase, int peer) {
    stall(call, 1);
    if (reached(ptx::load_acquire_sys(word), epoch)) return true;
    const u64 start = ptx::global_timer();
    for (u32 polls = 1;; ++polls) {
        if (reached(ptx::load_acquire_sys(word), epoch)) return true;
        if (stop_waiting(call, phase, peer, start, polls)) return false;
    }
}

// Wait for a barrier of this block. Its other side ends because the lister's waits do; once the call has
// failed, the other side still leaves through its normal protocol, for which LAST_TRIES are left. A try
// ends when any barrier of the SM changes, and to ask whether the call has failed takes 0.7 us: so not after
// every one.
__device__ inline bool wait_stage(const Call& call, u32 barrier, u32 parity) {
    for (u32 tries = 1; !ptx::mbarrier_try(barrier, parity); ++tries)
        if (tries % 32 == 0 && failed(call)) {
            for (tries = 0; tries < LAST_TRIES; ++tries)
                if (ptx::mbarrier_try(barrier, parity)) return true;
            return false;
        }
    return true;
}

// The same for a warp, all of whose lanes ask: they learn of a failure at different times, and go on
// together.
__device__ __forceinline__ bool warp_wait_stage(const Call& call, u32 barrier, u32 parity) {
    return __all_sync(0xffffffffu, wait_stage(call, barrier, parity));
}

// "My call has begun": whatever I read from, or was given in, earlier buffers is done with. Lanes of one
// warp.
__device__ inline void tell_started(const Call& call, int lane) {
    stall(call, 2);
    ptx::fence_sys();
    for (int p = lane; p < call.group->ranks; p += 32)
        if (p != call.me)
            ptx::store_relaxed_sys(&control_of(*call.group, p)->started[call.kind][call.me], call.epoch);
}

// A buffer last used `lag` calls ago may be written again once every peer has begun the call after that one.
// Lanes of a warp.
__device__ inline bool wait_credit(const Call& call, int lane, u32 lag) {
    bool fine = true;
    for (int p = lane; p < call.group->ranks; p += 32)
        if (p != call.me)
            fine = fine &&
                   wait_flag(call, &call.own->started[call.kind][p], call.epoch + 1 - lag, kPeerStarted, p);
    return __all_sync(0xffffffffu, fine);
}

}  // namespace exchange
