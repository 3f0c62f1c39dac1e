// A call of a layer that may do without late peers, in five steps, one launch each: packets out, places of
// what has come, rows to the experts, replies out, sums. Nobody waits for all ranks; claims.cuh says who
// waits for whom and who decides what counts.
//
// A packet is a rank's choices, and its tokens that want an expert of that peer, each at its own place. So no
// counts are exchanged: whoever has packets orders their rows alone, by slot, rank and token as `serial`
// does.
// A reply is the sums of a token's rows, as exchange/reduce.cuh stores them; the bits are its.
//
// Example, 2 ranks, an expert each, K = 1: rank 0's tokens want experts 0, 1, 1. Rank 1 finds tokens 1 and 2
// at places 1 and 2 of rank 0's packet and has them as its rows 0 and 1. If rank 1 is late and rank 0 may do
// without it, tokens 1 and 2 become 0 and kept is 1, 0, 0; rank 1 stores its reply, and finds its claim
// closed.
//
// The backward of a call is a call of four steps, without places: gradients of outputs out, rows to the
// experts, gradients of tokens and of weights home, sums. Who counted on both sides stands in `known`, so
// nobody has patience: a home sends to the hosts that it heard, a host waits for the homes that it served.
// Where ranks share experts, a home may have heard one of them and not another. Then its packet says that
// nothing counts, and a step before the rows lets the host know.
#include "events/call.cuh"
#include "exchange/terms.cuh"

namespace claims {

// First step. To whom packets go: to those who have read the last one.
__device__ inline void decide_turn(const Call& call, const Events& e, Words& own) {
    const int lane = static_cast<int>(ptx::lane_id());
    const u32 peers = peers_of(call, e, kHeard);
    if (lane == 0) {
        own.behind = 0;
        if (!e.known) {
            ++e.patience.memory->calls;
            e.patience.memory->began = ptx::global_timer();
        }
    }
    __syncwarp();
    u32 missing = peers;
    const auto come = [&](int p) { return reached(ptx::load_acquire_sys(&own.taken[p]), own.sent[p]); };
    const Phase phase = static_cast<Phase>(kForTurn);
    bool fine = !warp_failed(call) && wait_patiently(call, e.patience, phase, 0, missing, come);
    fine = fine && (missing == 0 || give_up_on(call, own, e.patience, phase, missing));
    publish(call, own, kTurn, fine ? (peers & ~missing) | 1u << call.me : 0);
}

__device__ inline void send_packets(const Call& call, const Events& e, u32 open) {
    const int lane = static_cast<int>(ptx::lane_id()), warp = static_cast<int>(threadIdx.x) / 32;
    bool fine = true;
#pragma unroll 1
    for (int t = call.block * kWarps + warp; t < e.tokens; t += call.blocks * kWarps) {
        const i64 at = static_cast<i64>(t) * e.choices + lane;
        const bool any = lane < e.choices && !e.known;
        const i64 id = any ? e.ids[at] : -1;
        fine = fine && id >= -1 && id < e.experts;
        const int slot = own_slot(e, t, lane);
        const u32 wanted = ranks_wanted(call, e, slot) & ~(1u << call.me);
        const float weight = any ? e.weights[at] : 0.0f;
#pragma unroll 1
        for (u32 left = open; left; left &= left - 1) {
            const int p = __ffs(left) - 1;
            if (any) {
                choices_at(call, e, p, call.me)[at] = slot;
                gates_at(call, e, p, call.me)[at] = weight;
            }
            if (wanted >> p & 1)
                copy_row(row_at(call, e, e.packets_at, p, call.me, t),
                         e.x + static_cast<i64>(t) * e.row_bytes, e.row_bytes);
        }
    }
    if (!fine) give_up(call, kBadIds, static_cast<Phase>(kForPacket), call.me);
}

__device__ inline void step_send(const Call& call, const Events& e, Words& own) {
    if (call.block == 0 && threadIdx.x < 32) decide_turn(call, e, own);
    const u32 open = await_decision(call, own, kTurn);
    const u32 counted = open & (peers_of(call, e, kCounted) | 1u << call.me);
    const int p = static_cast<int>(ptx::lane_id());
    send_packets(call, e, counted);
    if (call.block == 0 && threadIdx.x < 32 && (open >> p & 1))
        *head_at(call, e, p, call.me) = {counted >> p & 1 ? e.tokens : kNothing, e.note};
    if (!last_to_leave(call, own) || threadIdx.x >= 32) return;
    const bool peer = p < call.group->ranks && p != call.me, fine = open != 0 && !warp_failed(call);
    bool went = false;
    if (fine && peer) {
        Words& there = words_of(*call.group, e.words_at, p);
        u32 before;
        went = (open >> p & 1) && claim(&there.packet[call.me], call.epoch, 1, before);
        if (went) own.sent[p] = call.epoch;
        stall(call, 2);
        ptx::fence_sys();
        ptx::store_relaxed_sys(&there.moved[call.me], call.epoch);
    }
    const u32 all = __ballot_sync(0xffffffffu, went);
    if (p == 0) {
        own.ranks[kTurn] = all & counted;  // whose reply may come
        call.own->epoch[kEvents] = call.epoch;
    }
}

// Second step: whose packets are there in time, and where their rows go.
__device__ inline void decide_packets(const Call& call, const Events& e, Words& own) {
    const int lane = static_cast<int>(ptx::lane_id());
    const u32 peers = peers_of(call, e, kServed);
    u32 missing = peers;
    const auto come = [&](int p) {
        const u32 moved = ptx::load_acquire_sys(&own.moved[p]);  // before the claim
        return is_sent(ptx::load_acquire_sys(&own.packet[p]), call.epoch) || reached(moved, call.epoch);
    };
    const Phase phase = static_cast<Phase>(kForPacket);
    bool fine = !warp_failed(call) && wait_patiently(call, e.patience, phase, own.behind, missing, come);
    bool here = false;
    if (fine && (peers >> lane & 1)) {
        u32 word = ptx::load_acquire_sys(&own.packet[lane]);
        if (missing >> lane & 1) claim(&own.packet[lane], call.epoch, 0, word);
        here = is_sent(word, call.epoch);
    }
    const u32 came = __ballot_sync(0xffffffffu, here);
    const u32 gone = missing & ~came;
    fine = fine && (gone == 0 || give_up_on(call, own, e.patience, phase, gone));
    // A packet is of the same call of the same layer, or ranks do not call alike; so where one whom this rank
    // served goes on without a gradient.
    const bool alike = !fine || (here ? head_at(call, e, call.me, lane)->note == e.note
                                      : !e.known || (peers >> lane & 1) == 0);
    if (!alike) give_up(call, kOtherCall, phase, lane);
    fine = fine && __ballot_sync(0xffffffffu, !alike) == 0;
    u32 counted = came | 1u << call.me;
    if (e.known) {
        const bool counts = here ? head_at(call, e, call.me, lane)->tokens != kNothing
                                 : lane == call.me && e.known[kCounted * call.group->ranks + lane] != 0;
        counted = __ballot_sync(0xffffffffu, counts);
        if (lane < call.group->ranks) e.outcome[kServed * call.group->ranks + lane] = counts;
    }
    publish(call, own, kPackets, fine ? counted | 1u << call.me : 0);
}

// Choices of a source that are there, and a warp's part of them.
struct Part {
    int first, end;
};
__device__ __forceinline__ Part part_of(const Call& call, const Events& e, u32 here, int source, int warp) {
    const int all = here >> source & 1 ? head_at(call, e, call.me, source)->tokens * e.choices : 0;
    const int each = (all + 32 * kWarps - 1) / (32 * kWarps) * 32;
    return {min(warp * each, all), min((warp + 1) * each, all)};
}

// Slots of choices `first` + lane, + 32, ...; -1 from `end` on. All are asked for before one is looked at.
__device__ __forceinline__ void ask_slots(int (&value)[kBatch], const int* slots, int first, int end) {
    const int lane = static_cast<int>(ptx::lane_id());
#pragma unroll
    for (int q = 0; q < kBatch; ++q) value[q] = slots[min(first + 32 * q + lane, end - 1)];
#pragma unroll
    for (int q = 0; q < kBatch; ++q)
        if (first + 32 * q + lane >= end) value[q] = -1;
}

constexpr int kSlots = 4;  // that a block places at once

// The rows of up to `kSlots` slots from `first` on, by a block: a warp counts its part of every source, then
// places it behind the parts before it. Choices are read twice, and no block waits for another.
__device__ inline void place_slots(const Call& call, const Events& e, u32 here, int first, int end, int low) {
    const int lane = static_cast<int>(ptx::lane_id()), warp = static_cast<int>(threadIdx.x) / 32;
    const int ranks = call.group->ranks, parts = ranks * kWarps;
    int* equal = reinterpret_cast<int*>(ptx::shared_memory() + 128);  // [kSlots, W, warps]
    int* less = equal + kSlots * kMostPeers * kWarps;                 // [warps]
    int lower = 0;
#pragma unroll 1
    for (int w = 0; w < ranks; ++w) {
        const Part part = part_of(call, e, here, w, warp);
        const int* slots = choices_at(call, e, call.me, w);
        int same[kSlots] = {};
#pragma unroll 1
        for (int i = part.first; i < part.end; i += 32 * kBatch) {
            int value[kBatch];
            ask_slots(value, slots, i, part.end);
#pragma unroll
            for (int q = 0; q < kBatch; ++q) {
                lower += __popc(__ballot_sync(0xffffffffu, value[q] >= low && value[q] < first));
#pragma unroll
                for (int g = 0; g < kSlots; ++g)
                    same[g] += __popc(__ballot_sync(0xffffffffu, value[q] == first + g));
            }
        }
#pragma unroll
        for (int g = 0; g < kSlots; ++g)
            if (lane == 0) equal[g * parts + w * kWarps + warp] = same[g];
    }
    if (lane == 0) less[warp] = lower;
    __syncthreads();
    int row[kSlots], next = 0;  // of this warp's part, of every slot
    for (int i = 0; i < kWarps; ++i) next += less[i];
#pragma unroll
    for (int g = 0; g < kSlots; ++g) {
        row[g] = next;
#pragma unroll 1
        for (int i = 0; i < parts; ++i) next += equal[g * parts + i];
        if (threadIdx.x == 0 && first + g < end) {
            e.counts[first + g - low] = next - row[g];
            if (first + g + 1 == e.offsets[call.me / e.tensor + 1]) e.totals[0] = next;
        }
    }
    int passed = 0;  // parts that `row` is behind
#pragma unroll 1
    for (int w = 0; w < ranks; ++w) {
#pragma unroll 1
        for (; passed < w * kWarps + warp; ++passed)
#pragma unroll
            for (int g = 0; g < kSlots; ++g) row[g] += equal[g * parts + passed];
        const Part part = part_of(call, e, here, w, warp);
        const int* slots = choices_at(call, e, call.me, w);
        int* position = e.position + static_cast<i64>(w) * e.room * e.choices;
        int at[kSlots];
#pragma unroll
        for (int g = 0; g < kSlots; ++g) at[g] = row[g];
#pragma unroll 1
        for (int i = part.first; i < part.end; i += 32 * kBatch) {
            int value[kBatch];
            ask_slots(value, slots, i, part.end);
#pragma unroll
            for (int q = 0; q < kBatch; ++q)
#pragma unroll
                for (int g = 0; g < kSlots; ++g) {
                    const bool hit = value[q] == first + g && first + g < end;
                    const u32 lanes = __ballot_sync(0xffffffffu, hit);
                    if (hit) position[i + 32 * q + lane] = at[g] + __popc(lanes & ((1u << lane) - 1));
                    at[g] += __popc(lanes);
                }
        }
    }
    __syncthreads();
}

__device__ inline void step_place(const Call& call, const Events& e, Words& own) {
    if (call.block == 0 && threadIdx.x < 32) decide_packets(call, e, own);
    const u32 here = await_decision(call, own, kPackets);
    const int owner = call.me / e.tensor, low = e.offsets[owner], high = e.offsets[owner + 1];
    const int thread = static_cast<int>(threadIdx.x), per_rank = e.room * e.choices;
    if (call.block == 0) {
        const int p = thread;
        if (p < call.group->ranks) {
            e.tokens_of[p] = here >> p & 1 ? head_at(call, e, call.me, p)->tokens : 0;
            e.outcome[kCame * call.group->ranks + p] = here >> p & 1;
        }
        for (int s = thread; s < e.most_slots; s += kThreads)
            if (low + s >= high || here == 0) e.counts[s] = 0;
        if (thread < 4 && (low == high || here == 0 || thread > 0)) e.totals[thread] = 0;
    }
#pragma unroll 1
    for (int w = 0; w < call.group->ranks; ++w) {
        const bool came = here >> w & 1;
        const int all = came ? head_at(call, e, call.me, w)->tokens * e.choices : 0;
        const int* slots = choices_at(call, e, call.me, w);
        const float* gates = gates_at(call, e, call.me, w);
        const i64 base = static_cast<i64>(w) * per_rank;
#pragma unroll 4
        for (int i = call.block * kThreads + thread; i < per_rank; i += call.blocks * kThreads) {
            const int slot = i < all ? slots[i] : -1;
            if (slot < low || slot >= high) e.position[base + i] = -1;
            e.all_weights[base + i] = i < all ? gates[i] : 0.0f;
        }
    }
    if (here == 0) return;
    const int each = min((high - low + call.blocks - 1) / call.blocks, kSlots);
#pragma unroll 1
    for (int first = low + call.block * each; first < high; first += call.blocks * each)
        place_slots(call, e, here, first, min(first + each, high), low);
}

// A token to its rows, `row` of this lane's choice: read once, stored to each. A warp.
__device__ __forceinline__ void copy_to_rows(const Events& e, int row, const u8* from) {
    const int lane = static_cast<int>(ptx::lane_id()), units = e.row_bytes / 16;
    const u32 some = __ballot_sync(0xffffffffu, row >= 0);
    if (some == 0) return;
#pragma unroll 1
    for (int first = lane; first - lane < units; first += 32 * kBatch) {
        uint4 value[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            value[i] = reinterpret_cast<const uint4*>(from)[min(first + 32 * i, units - 1)];
#pragma unroll 1
        for (u32 left = some; left; left &= left - 1) {
            const int to = __shfl_sync(0xffffffffu, row, __ffs(left) - 1);
            uint4* out = reinterpret_cast<uint4*>(e.rows + static_cast<i64>(to) * e.row_bytes);
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                if (first + 32 * i < units) out[first + 32 * i] = value[i];
        }
    }
}

// The rows of a failed backward, whose places are known: nobody takes what the memory held for gradients.
__device__ inline void spoil_rows(const Events& e, int row) {
#pragma unroll 1
    for (u32 left = __ballot_sync(0xffffffffu, row >= 0); left; left &= left - 1) {
        const i64 at = __shfl_sync(0xffffffffu, row, __ffs(left) - 1);
        sums::fill_nan(e.rows + at * e.row_bytes, e.row_bytes / 4);
    }
}

// Third step: rows to where the experts want them. Then packets may be overwritten.
__device__ inline void step_expand(const Call& call, const Events& e, Words& own) {
    if (e.known && call.block == 0 && threadIdx.x < 32) decide_packets(call, e, own);
    const u32 here = e.known ? await_decision(call, own, kPackets) : own.ranks[kPackets];
    const int lane = static_cast<int>(ptx::lane_id()), warp = static_cast<int>(threadIdx.x) / 32;
    // No wait of this call writes to the memory of them now.
    if (!e.known && e.patience.share > 0 && call.block == 0 && warp < kLearnt) learn(e.patience, warp);
#pragma unroll 1
    for (int w = 0; w < call.group->ranks; ++w) {
        const int tokens = here == 0 || (here >> w & 1) ? e.tokens_of[w] : 0;
#pragma unroll 1
        for (int t = call.block * kWarps + warp; t < tokens; t += call.blocks * kWarps) {
            const i64 at = (static_cast<i64>(w) * e.room + t) * e.choices + lane;
            const int row = lane < e.choices ? e.position[at] : -1;
            if (here == 0) {
                spoil_rows(e, row);
                continue;
            }
            const u8* from = w == call.me ? e.x + static_cast<i64>(t) * e.row_bytes
                                          : row_at(call, e, e.packets_at, call.me, w, t);
            copy_to_rows(e, row, from);
        }
    }
    if (!last_to_leave(call, own) || here == 0) return;
    const int p = static_cast<int>(threadIdx.x);
    if (p < call.group->ranks && p != call.me) {
        stall(call, 3);
        ptx::store_relaxed_sys(&words_of(*call.group, e.words_at, p).taken[call.me], call.epoch);
    }
}

constexpr int kWide = 2;   // columns of 16 bytes that a lane sums at once
constexpr int kAhead = 4;  // rows that are asked for before one is added

struct Sum {
    float column[kWide][8];
};

// Columns `first`, + 32, ... of the rows of a set, in its order: row `b` is at `row_of(b)`, which all lanes
// ask for, and is added times `times_of(b)`.
template <class Row, class Times>
__device__ __forceinline__ void add_set(Sum& sum, u32 set, int first, int units, Row row_of, Times times_of) {
#pragma unroll 1
    while (set) {
        const int count = min(__popc(set), kAhead);
        uint4 value[kAhead][kWide];
        float times[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (i >= count) continue;
            const int b = __ffs(set) - 1;
            const u8* row = row_of(b);
            set &= set - 1;
            times[i] = times_of(b);
#pragma unroll
            for (int q = 0; q < kWide; ++q)
                value[i][q] = reinterpret_cast<const uint4*>(row)[min(first + 32 * q, units - 1)];
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (i >= count) continue;
#pragma unroll
            for (int q = 0; q < kWide; ++q) sums::add_eight(sum.column[q], value[i][q], times[i]);
        }
    }
}

// The rows of a token here, in the order of its choices; `row`, `weight`: of this lane's choice.
__device__ __forceinline__ void add_rows(Sum& sum, const Events& e, int row, float weight, int first) {
    const auto row_of = [&](int lane) {
        return e.rows + static_cast<i64>(__shfl_sync(0xffffffffu, row, lane)) * e.row_bytes;
    };
    const auto times_of = [&](int lane) {
        const int bits = static_cast<int>(__float_as_uint(weight));
        return __uint_as_float(__shfl_sync(0xffffffffu, bits, lane));
    };
    add_set(sum, __ballot_sync(0xffffffffu, row >= 0), first, e.row_bytes / 16, row_of, times_of);
}

__device__ __forceinline__ void store_sum(u8* to, const Sum& sum, int first, int units) {
#pragma unroll
    for (int q = 0; q < kWide; ++q)
        if (first + 32 * q < units)
            reinterpret_cast<uint4*>(to)[first + 32 * q] = sums::pack_eight(sum.column[q]);
}

// The number of the row, here, of this lane's choice; 0 without.
__device__ __forceinline__ float value_of(const Events& e, int row) { return row < 0 ? 0.0f : e.values[row]; }

// Fourth step: the sums of every peer's tokens, to where that peer finds them.
__device__ inline void step_reply(const Call& call, const Events& e, Words& own) {
    const u32 here = warp_failed(call) ? 0 : own.ranks[kPackets];
    const int lane = static_cast<int>(ptx::lane_id()), warp = static_cast<int>(threadIdx.x) / 32;
    const int units = e.row_bytes / 16;
#pragma unroll 1
    for (int i = 1; i < call.group->ranks; ++i) {
        const int w = (call.me + i) % call.group->ranks, tokens = here >> w & 1 ? e.tokens_of[w] : 0;
#pragma unroll 1
        for (int t = call.block * kWarps + warp; t < tokens; t += call.blocks * kWarps) {
            const i64 at = (static_cast<i64>(w) * e.room + t) * e.choices + lane;
            const int row = lane < e.choices ? e.position[at] : -1;
            const float weight = e.weighted && lane < e.choices ? e.all_weights[at] : 1.0f;
            if (__ballot_sync(0xffffffffu, row >= 0) == 0) continue;
            if (e.values && lane < e.choices)
                values_at(call, e, w, call.me)[static_cast<i64>(t) * e.choices + lane] = value_of(e, row);
            u8* to = row_at(call, e, e.replies_at, w, call.me, t);
#pragma unroll 1
            for (int column = 0; column < units; column += 32 * kWide) {
                Sum sum = {};
                add_rows(sum, e, row, weight, column + lane);
                store_sum(to, sum, column + lane, units);
            }
        }
    }
    if (!last_to_leave(call, own) || threadIdx.x >= 32) return;
    bool served = false;
    if (lane != call.me && (here >> lane & 1)) {
        u32 before;
        stall(call, 4);
        served = claim(&words_of(*call.group, e.words_at, lane).reply[call.me], call.epoch, 1, before);
    }
    if (!e.known && lane < call.group->ranks)
        e.outcome[kServed * call.group->ranks + lane] = served || lane == call.me;
}

// Last step: whose replies count.
__device__ inline void decide_replies(const Call& call, const Events& e, Words& own) {
    const int lane = static_cast<int>(ptx::lane_id());
    const u32 went = own.ranks[kTurn];
    u32 missing = went;
    const auto come = [&](int p) { return is_sent(ptx::load_acquire_sys(&own.reply[p]), call.epoch); };
    const Phase phase = static_cast<Phase>(kForReply);
    bool fine = !warp_failed(call) && wait_patiently(call, e.patience, phase, own.behind, missing, come);
    bool counts = lane == call.me;
    if (fine && (went >> lane & 1)) {
        u32 word = ptx::load_acquire_sys(&own.reply[lane]);
        if (missing >> lane & 1) claim(&own.reply[lane], call.epoch, 0, word);
        counts = is_sent(word, call.epoch);
    }
    const u32 heard = __ballot_sync(0xffffffffu, counts), gone = missing & ~heard;
    u32 counted = heard;
    fine = fine && (gone == 0 || give_up_on(call, own, e.patience, phase, gone));
    for (int first = 0; first < call.group->ranks; first += e.tensor) {  // a piece of an expert is none
        const u32 pieces = ((1u << e.tensor) - 1) << first;
        if ((counted & pieces) != pieces) counted &= ~pieces;
    }
    if (!e.known && lane < call.group->ranks) {
        e.outcome[kCounted * call.group->ranks + lane] = counted >> lane & 1;
        e.outcome[kHeard * call.group->ranks + lane] = heard >> lane & 1;
    }
    // With a bit that no rank has: that nobody counts is no failure.
    publish(call, own, kReplies, fine ? counted | 1u << 31 : 0);
}

__device__ inline void sum_token(const Call& call, const Events& e, u32 counted, int t) {
    const int lane = static_cast<int>(ptx::lane_id()), units = e.row_bytes / 16;
    const i64 mine = static_cast<i64>(t) * e.choices + lane,
              at = static_cast<i64>(call.me) * e.room * e.choices + mine;
    const bool any = lane < e.choices;
    const int slot = own_slot(e, t, lane);
    const u32 wanted = ranks_wanted(call, e, slot) & counted;
    const int row = any && (counted >> call.me & 1) ? e.position[at] : -1;
    const float weight = any && e.weighted ? e.all_weights[at] : 1.0f;
    if (any && e.values_out) {
        float sum = 0.0f;
#pragma unroll 1
        for (int p = 0; p < call.group->ranks; ++p)
            sum += p == call.me         ? value_of(e, row)
                   : (wanted >> p & 1) ? values_at(call, e, call.me, p)[mine]
                                        : 0.0f;
        e.values_out[mine] = sum;
    }
    if (any && !e.known) {
        bool counts = slot < 0;
        for (int p = 0; p < call.group->ranks; p += e.tensor)
            counts = counts || ((counted >> p & 1) && slot >= e.offsets[p / e.tensor] &&
                                slot < e.offsets[p / e.tensor + 1]);
        e.kept[mine] = counts;
    }
#pragma unroll 1
    for (int column = 0; column < units; column += 32 * kWide) {
        Sum sum = {};
        const auto reply_of = [&](int p) { return row_at(call, e, e.replies_at, call.me, p, t); };
        const auto addend_of = [&](int) { return e.addend + static_cast<i64>(t) * e.row_bytes; };
        const auto once = [](int) { return 1.0f; };
        add_set(sum, wanted & ((1u << call.me) - 1), column + lane, units, reply_of, once);
        add_rows(sum, e, row, weight, column + lane);
        add_set(sum, wanted & ~((2u << call.me) - 1), column + lane, units, reply_of, once);
        if (e.addend) add_set(sum, 1, column + lane, units, addend_of, once);
        store_sum(e.out + static_cast<i64>(t) * e.row_bytes, sum, column + lane, units);
    }
}

// Of a call that has failed.
__device__ inline void spoil_token(const Events& e, int t) {
    const int lane = static_cast<int>(ptx::lane_id());
    const i64 mine = static_cast<i64>(t) * e.choices;
    sums::fill_nan(e.out + static_cast<i64>(t) * e.row_bytes, e.row_bytes / 4);
    if (e.values_out) sums::fill_nan(e.values_out + mine, e.choices);
    if (!e.known && lane < e.choices) e.kept[mine + lane] = 0;
}

__device__ inline void step_sum(const Call& call, const Events& e, Words& own) {
    if (call.block == 0 && threadIdx.x < 32) decide_replies(call, e, own);
    const u32 counted = await_decision(call, own, kReplies);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (counted == 0) leave_if_failed(call, static_cast<Phase>(kForReply));
#pragma unroll 1
    for (int t = call.block * kWarps + warp; t < e.tokens; t += call.blocks * kWarps) {
        if (counted != 0)
            sum_token(call, e, counted, t);
        else
            spoil_token(e, t);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    run_events(const __grid_constant__ Group group, const __grid_constant__ Events e) {
    const Call call = name_step(group, e);
    Words& own = words_of(group, e.words_at, call.me);
    if (e.step == kSend) step_send(call, e, own);
    if (e.step == kPlace) step_place(call, e, own);
    if (e.step == kExpand) step_expand(call, e, own);
    if (e.step == kReply) step_reply(call, e, own);
    if (e.step == kSum) step_sum(call, e, own);
    if (e.step == kSettle && call.block == 0 && threadIdx.x < 32) decide_packets(call, e, own);
    if (e.step == kRefuse && call.block == 0 && threadIdx.x == 0)
        give_up(call, kBadInput, static_cast<Phase>(kForTurn), call.me);
}

}  // namespace claims
