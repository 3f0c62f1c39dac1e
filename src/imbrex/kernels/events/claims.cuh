// Ranks that may do without a late peer: who decides what counts, when a place may be written again, and how
// long one waits.
//
// A claim is a word in the receiver's heap, by peer: 2 n + 1 once a packet (or a reply) of call n is there,
// 2 n once it has come too late. It goes from below 2 n to one of both in one compare-and-swap, by the sender
// behind its rows or by the receiver whose patience is over. Whoever is first has decided; the other learns
// it from the same instruction. Words only grow, and no call is reset.
//
// Places. Packets of home h for host p have one place for their choices in the heap of p, and one for their
// rows in the heap of h, both written by h alone: in call n only once p has `taken` the last packet that h
// sent. A reply of p has one place in the heap of h, written by p alone, in call n only after a packet of
// call n has come: h sends it when its call n - 1 is over, so h has read what was there, or closed it. A
// sender that comes too late stores in a place that nobody reads before its next claim.
//
// `moved`, of h at p: h will send no packet of calls up to this one any more. So p, far behind, waits for no
// packet that h left out.
//
// A backward is a call whose peers are known before: a home claims the packets of hosts that counted, and a
// host waits for the homes that it served. Both sides of a claim say the same, so nobody waits in vain.
//
// Patience. A rank waits in three stages: for its turn to write, for packets, for replies. From when no more
// than epsilon peers are missing, those included on whom it gave up before in this call, it waits tau more,
// by the device's clock; then it closes what is still open. Without an end to patience only the fatal
// deadline ends a wait: so it does for a peer on whom one gives up again and again while it makes no call.
//
// Learnt patience. A layer remembers its last waits for packets and for replies, or how long its calls had
// taken when these were there. `learn` makes the limits of both of them, beside other work of a call: the
// quantile that is asked for, times a factor. The turn to write has that of packets, since it is part of the
// same wait. A wait that was given up counts as endless, so that no more than the rest is ever given up.
//
// A budget of dropped choices, in 1 / kWhole of one. Every call earns a share of this rank's choices and pays
// for those that the last one dropped; with each packet goes a part of what is left, as a number of all that
// went that way so far, so that one that comes too late takes nothing with it for good. What it is for says
// overlap/events/budget.py, which does the same on the host.
//
// Example, p75 of the waits 3 1 9 2 us: 3 us, while none of them was given up.
#pragma once
#include "peers/protocol.cuh"

namespace claims {

using namespace exchange;

constexpr Kind kEvents = static_cast<Kind>(1);  // the only kind of call in these heaps
enum Stage { kTurn = 0, kPackets = 1, kReplies = 2, kCounts = 3 };
enum Wait { kForTurn = 1, kForPacket = 2, kForReply = 3 };  // phases of these heaps

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
    u32 left;        // blocks that have done their part of the step
    u32 counted;     // warps that have counted their part of the choices
};

// Of a block's shared memory: a word for what one thread tells the others, behind a ring's barriers.
constexpr int kToldAt = 1008, kBehindWords = 1024;

constexpr int kMemory = 200;  // waits that are remembered
constexpr int kFewest = 20;   // from which on a limit is learnt
constexpr int kLearnt = 2;    // waits that have limits: for packets, for replies
constexpr u32 kEndless = 0xffffffff;
constexpr u32 kWhole = 100000;  // of a share
constexpr int kShift = 6;       // waits are in units of 64 ns
constexpr int kMostPeers = 16;

// A layer's, zeroed once. The host reads it: `kernels.structs`.
struct Memory {
    u32 calls;
    u32 gave_up;         // 1 + the last call in which it gave somebody up
    u64 began;           // the call under way
    u64 limit[kLearnt];  // ns; 0: none was learnt yet
    i64 earned;             // less what dropped choices took
    i64 gift;               // to each peer, in the call under way
    i64 given[kMostPeers];  // so far, by peer
    i64 got[kMostPeers];
    i64 loads[kMostPeers];  // choices of a call, by rank
    u32 dropped;         // choices that are not paid for
    u32 seen[kLearnt];   // waits so far
    u32 waits[kLearnt][kMemory];
};

// How patient a layer is.
struct Patience {
    u64 tau_ns;
    Memory* memory;
    u32 epsilon;
    u32 every;
    u32 budget;    // share of all choices that may be dropped, in 1 / kWhole; kWhole: any
    u32 share;     // of the waits that are shorter than what is learnt, in 1 / kWhole; 0: tau is given
    float factor;  // times of a usual call, from its begin; 0: waits count from when few are missing
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
    const u32 call = patience.memory->calls, before = patience.memory->gave_up;
    return before == 0 || before == 1 + call || (before - 1) / patience.every != call / patience.every;
}

// What is left of the budget here.
__device__ __forceinline__ i64 left_of(const Memory& memory) {
    i64 left = memory.earned;
#pragma unroll 1
    for (int p = 0; p < kMostPeers; ++p) left += memory.got[p] - memory.given[p];
    return left;
}

// Of a packet or a reply: of an even packet of the largest rank, as far as its peers have told.
__device__ __forceinline__ i64 price_of(const Memory& memory, int ranks) {
    i64 largest = 0;
#pragma unroll 1
    for (int p = 0; p < kMostPeers; ++p) largest = max(largest, memory.loads[p]);
    return static_cast<i64>(kWhole) * largest / ranks;
}

// Whether so many packets and replies may be done without.
__device__ __forceinline__ bool covers(const Patience& patience, int ranks, int pairs) {
    if (patience.budget == kWhole) return true;
    __syncwarp();  // what other lanes received
    const Memory& memory = *patience.memory;
    return left_of(memory) >= max(pairs * price_of(memory, ranks), i64{1});
}

// A call of so many own choices begins. One lane.
__device__ inline void earn(const Patience& patience, int choices, int ranks, int me) {
    Memory& memory = *patience.memory;
    if (patience.budget == kWhole) return;
    memory.earned += static_cast<i64>(patience.budget) * choices - static_cast<i64>(kWhole) * memory.dropped;
    memory.dropped = 0;
    memory.loads[me] = choices;
    const i64 left = left_of(memory), down = left < 0 ? ranks - 1 : 0;
    memory.gift = (left - down) / ranks;  // rounded down, as on the host
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

// Which waits a phase of a call belongs to.
__device__ __forceinline__ int learnt_of(Phase phase) { return phase == static_cast<Phase>(kForReply); }

// One lane.
__device__ inline void remember(const Patience& patience, int which, u64 waited_ns) {
    Memory& memory = *patience.memory;
    const u64 units = waited_ns >> kShift;
    memory.waits[which][memory.seen[which] % kMemory] =
        units < kEndless ? static_cast<u32>(units) : kEndless;
    // As many as there are, and then a number that the next place follows from.
    memory.seen[which] = memory.seen[which] + 1 < 2 * kMemory ? memory.seen[which] + 1 : kMemory;
}

// The limit of waits `which`. One warp.
__device__ inline void learn(const Patience& patience, int which) {
    constexpr int kEach = (kMemory + 31) / 32;
    Memory& memory = *patience.memory;
    const int lane = static_cast<int>(ptx::lane_id()), seen = static_cast<int>(memory.seen[which]);
    const int count = min(seen, kMemory);
    const u32* waits = memory.waits[which];
    if (count < kFewest) return;
    u32 mine[kEach], given_up = 0;
    int before[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        mine[i] = lane + 32 * i < count ? waits[lane + 32 * i] : 0;
        before[i] = 0;
        given_up += __popc(__ballot_sync(0xffffffffu, mine[i] == kEndless));
    }
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
        const u32 other = waits[j];
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            before[i] += other < mine[i] || (other == mine[i] && j < lane + 32 * i);
    }
    const u64 most = static_cast<u64>(kWhole - patience.share) * min(kMemory, count + 1);
    if (static_cast<u64>(given_up + 1) * kWhole > most) {
        if (lane == 0) memory.limit[which] = ~0ull;
        return;
    }
    const int at = static_cast<int>((static_cast<u64>(patience.share) * count + kWhole - 1) / kWhole) - 1;
    const float factor = patience.factor > 0.0f ? patience.factor : 1.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        if (lane + 32 * i < count && before[i] == at) {
            const float ns = factor * static_cast<float>(mine[i]) * static_cast<float>(1 << kShift);
            memory.limit[which] = max(static_cast<u64>(ns), u64{1});
        }
}

// Whether the call has failed, for a warp: its lanes, which must stay together, read at different times.
__device__ __forceinline__ bool warp_failed(const Call& call) {
    return __ballot_sync(0xffffffffu, failed(call)) != 0;
}

// Waits for those in `missing`, as long as patience says: `come(peer)` asks for one, a lane each. Leaves in
// `missing` those on whom to give up. False on failure. All lanes of a warp.
template <class Come>
__device__ inline bool wait_patiently(const Call& call, const Patience& patience, Phase phase, u32 behind,
                                      u32& missing, Come come) {
    const int lane = static_cast<int>(ptx::lane_id());
    const u64 start = ptx::global_timer();
    const bool may = patience.epsilon > 0 && may_spend(patience), learns = patience.share > 0;
    const bool whole = patience.factor > 0.0f;
    u64 since = 0, tau_ns = patience.tau_ns;
    if (may && learns) {
        tau_ns = patience.memory->limit[learnt_of(phase)];
        tau_ns = tau_ns == 0 ? ~0ull : tau_ns;
    }
    stall(call, 1);
#pragma unroll 1
    for (u32 polls = 1;; ++polls) {
        const bool here = (missing >> lane & 1) != 0 && come(lane);
        missing &= ~__ballot_sync(0xffffffffu, here);
        if (missing == 0) {
            const u64 now = ptx::global_timer(), from = whole ? patience.memory->began : since;
            const bool notes = patience.epsilon > 0 && learns && behind == 0;
            if (notes && lane == 0 && phase != static_cast<Phase>(kForTurn))
                remember(patience, learnt_of(phase), from == 0 ? 0 : now - from);
            return true;
        }
        if (static_cast<u32>(__popc(missing | behind)) <= patience.epsilon) {
            const u64 now = ptx::global_timer();
            if (since == 0) since = now;
            // Who sends no packet, or refuses one, is refused or does without the reply later.
            const int pairs = __popc(missing) * (phase == static_cast<Phase>(kForReply) ? 1 : 2);
            const bool affords = may && covers(patience, call.group->ranks, pairs);
            const u64 from = whole ? patience.memory->began : since;
            const bool over = (missing & ~behind) == 0 ||
                              (may && now - from >= tau_ns && affords);
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
    if (lane == 0 && (gone & ~own.behind) != 0) {
        patience.memory->gave_up = 1 + patience.memory->calls;
        if (patience.share > 0) remember(patience, learnt_of(phase), ~0ull);
    }
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
    u32* shared = reinterpret_cast<u32*>(ptx::shared_memory() + kToldAt);
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
    u32* shared = reinterpret_cast<u32*>(ptx::shared_memory() + kToldAt);
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
