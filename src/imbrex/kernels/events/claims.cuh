// Ranks that may do without a late peer: who decides what counts, when a place may be written again, and how
// long one waits.
//
// A claim is a word in the receiver's heap, by peer: 2 n + 1 once a packet (or a reply) of call n is there,
// 2 n once it has come too late. It goes from below 2 n to one of both in one compare-and-swap, by the sender
// behind its rows or by the receiver whose patience is over. Whoever is first has decided; the other learns
// it from the same instruction. Words only grow, and no call is reset.
//
// Places. A packet of home h has one place in the heap of host p, written by h alone: in call n only once p
// has `taken` the last packet that h sent. A reply of p has one place in the heap of h, written by p alone,
// in
// call n only after a packet of call n has come: h sends it when its call n - 1 is over, so h has read what
// was there, or closed it. A sender that comes too late stores in a place that nobody reads before its next
// claim.
//
// `moved`, of h at p: h will send no packet of calls up to this one any more. So p, far behind, waits for no
// packet that h left out.
//
// Patience. A rank waits in three stages: for its turn to write, for packets, for replies. From when no more
// than epsilon peers are missing, those included on whom it gave up before in this call, it waits tau more,
// by the device's clock; then it closes what is still open. Without an end to patience only the fatal
// deadline ends a wait: so it does for a peer on whom one gives up again and again while it makes no call.
#pragma once
#include "peers/protocol.cuh"

namespace claims {

using namespace exchange;

constexpr Kind kEvents = static_cast<Kind>(1);  // the only kind of call in these heaps
enum Stage { kTurn = 0, kPackets = 1, kReplies = 2 };
constexpr int kStages = 3;

// Behind the control words of a heap, zeroed once. The host reads it: `kernels.structs`.
struct Words {
    u32 packet[kMaxRanks];  // claims, by peer
    u32 reply[kMaxRanks];
    u32 taken[kMaxRanks];  // call whose packet of mine that peer has read, or will not
    u32 moved[kMaxRanks];  // call of that peer whose packets are sent
    // This rank's own.
    u32 sent[kMaxRanks];        // last call whose packet that peer was sent
    u32 last_moved[kMaxRanks];  // `moved`, when this rank gave up on that peer
    u64 silent_since[kMaxRanks];
    u32 decided[8];  // call, by stage
    u32 ranks[8];    // of whom the stage is fine, a bit each
    u32 behind;      // on whom this rank gave up in this call
    u32 served;      // homes whose reply counts
    u32 left;        // blocks that have done their part of the step
    u32 unused;
};

// How patient a layer is. `memory`: its calls, and 1 + the last one in which it gave somebody up.
struct Patience {
    u64 tau_ns;
    u32* memory;
    u32 epsilon;
    u32 every;
};

// Decides a claim of `call` unless that has been done; whether it was done now. The value before goes to
// `before`.
__device__ __forceinline__ bool claim(u32* word, u32 call, u32 sent, u32& before) {
    before = ptx::load_relaxed_sys(word);
    while (static_cast<int>(before - 2 * call) < 0) {
        const u32 seen = ptx::swap_if_sys(word, before, 2 * call + sent);
        if (seen == before) return true;
        before = seen;
    }
    return false;
}

__device__ __forceinline__ bool is_sent(u32 word, u32 call) { return word == 2 * call + 1; }

__device__ __forceinline__ Words& words_of(const Group& group, i64 at, int rank) {
    return *reinterpret_cast<Words*>(group.heap[rank] + at);
}

// Whether this call may do without somebody: of `every` calls one.
__device__ __forceinline__ bool may_spend(const Patience& patience) {
    const u32 call = patience.memory[0], before = patience.memory[1];
    return before == 0 || before == 1 + call || (before - 1) / patience.every != call / patience.every;
}

// A rank on whom one gave up and that has made no call since, for the time-out, is lost.
__device__ inline bool is_lost(const Call& call, Words& own, int peer) {
    const u64 now = ptx::global_timer();
    const u32 moved = ptx::load_relaxed_sys(&own.moved[peer]);
    if (own.silent_since[peer] == 0 || moved != own.last_moved[peer]) {
        own.silent_since[peer] = now;
        own.last_moved[peer] = moved;
    }
    return now - own.silent_since[peer] > call.group->timeout_ns;
}

// Waits for those in `missing`, as long as patience says: `come(peer)` asks for one, a lane each. Leaves in
// `missing` those on whom to give up. False on failure. All lanes of a warp.
template <class Come>
__device__ inline bool wait_patiently(const Call& call, const Patience& patience, Phase phase, u32 behind,
                                      u32& missing, Come come) {
    const int lane = static_cast<int>(ptx::lane_id());
    const u64 start = ptx::global_timer();
    const bool may = patience.epsilon > 0 && may_spend(patience);
    u64 since = 0;
    stall(call, 1);
#pragma unroll 1
    for (u32 polls = 1;; ++polls) {
        const bool here = (missing >> lane & 1) != 0 && come(lane);
        missing &= ~__ballot_sync(0xffffffffu, here);
        if (missing == 0) return true;
        if (static_cast<u32>(__popc(missing | behind)) <= patience.epsilon) {
            const u64 now = ptx::global_timer();
            if (since == 0) since = now;
            const bool over = (missing & ~behind) == 0 || (may && now - since >= patience.tau_ns);
            // The clock of one lane: they read it at different times.
            if (__shfl_sync(0xffffffffu, over, 0)) return true;
        }
        const bool stop = stop_waiting(call, phase, __ffs(missing) - 1, start, polls);
        if (__ballot_sync(0xffffffffu, stop) != 0) return false;
    }
}

// Notes on whom this rank gives up at last, of whom `behind` were known. False where one of them is lost.
__device__ inline bool give_up_on(const Call& call, Words& own, const Patience& patience, Phase phase,
                                  u32 gone) {
    const int lane = static_cast<int>(ptx::lane_id());
    const bool lost = (gone >> lane & 1) != 0 && is_lost(call, own, lane);
    if (lost) give_up(call, kTimedOut, phase, lane);
    if (lane == 0 && (gone & ~own.behind) != 0) patience.memory[1] = 1 + patience.memory[0];
    __syncwarp();
    if (lane == 0) own.behind |= gone;
    __syncwarp();
    return __ballot_sync(0xffffffffu, lost) == 0;
}

// The ranks of a stage, for all blocks; a failed stage has none. One warp.
__device__ inline void publish(const Call& call, Words& own, Stage stage, u32 ranks) {
    __syncwarp();
    if (ptx::lane_id() == 0) {
        own.ranks[stage] = ranks;
        ptx::fence_gpu();
        ptx::store_release_gpu(&own.decided[stage], call.epoch);
    }
}

// For a block: it ends because the one that decides ends, whatever it finds.
__device__ inline u32 await_decision(const Call& call, Words& own, Stage stage) {
    u32* shared = reinterpret_cast<u32*>(ptx::shared_memory());
    __syncthreads();
    if (threadIdx.x == 0) {
        while (ptx::load_acquire_gpu(&own.decided[stage]) != call.epoch) ptx::pause();
        *shared = own.ranks[stage];
    }
    __syncthreads();
    const u32 ranks = *shared;
    __syncthreads();
    return ranks;
}

// Whether this block is the last to have done its part; what all of them stored is then before what it tells.
__device__ inline bool last_to_leave(const Call& call, Words& own) {
    u32* shared = reinterpret_cast<u32*>(ptx::shared_memory());
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::fence_sys();
        const bool last = ptx::add_acq_rel_gpu(&own.left, 1) + 1 == static_cast<u32>(call.group->blocks);
        if (last) own.left = 0;
        *shared = last;
        ptx::fence_sys();
    }
    __syncthreads();
    const u32 last = *shared;
    __syncthreads();
    return last != 0;
}

}  // namespace claims
