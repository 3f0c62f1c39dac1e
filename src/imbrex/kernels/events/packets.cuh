// The first step of a call: packets out. A packet is a rank's choices, each with how many of its slot stand
// before it, how many there are of every slot, and the tokens that want an expert of that peer, each at its
// own place. These stay in this rank's heap, a place for every peer, and cross when a host brings them to
// their rows.
//
// A few warps number the choices while the others send rows: each counts its part of them, all meet, and each
// goes over its part once more, behind the parts before it.
//
// Example: choices 7 3 7 7 of two warps, a half each, have the numbers 0 0 1 2.
#pragma once
#include "events/call.cuh"

namespace claims {

constexpr int kIndexers = 32;  // warps that number choices, one a block; mirrored by events.py
constexpr int kIndexer = kWarps - 1;

// To whom packets go: to those who have read the last one.
__device__ inline void decide_turn(const Call& call, const Events& e, Words& own) {
    const int lane = static_cast<int>(ptx::lane_id());
    const u32 peers = peers_of(call, e, kHeard);
    if (lane == 0) {
        own.behind = 0;
        if (!e.known) {
            ++e.patience.memory->calls;
            e.patience.memory->began = ptx::global_timer();
            earn(e.patience, e.tokens * e.choices, call.group->ranks, call.me);
        }
    }
    __syncwarp();
    u32 missing = peers;
    const auto come = [&](int p) { return reached(ptx::load_acquire_sys(&own.taken[p]), own.sent[p]); };
    const Phase phase = static_cast<Phase>(kForTurn);
    bool fine = !warp_failed(call) && wait_patiently(call, e.patience, phase, 0, missing, come);
    fine = fine && (missing == 0 || give_up_on(call, own, e.patience, phase, missing));
    if (!e.known && fine && ((peers & ~missing) >> lane & 1))
        e.patience.memory->given[lane] += e.patience.memory->gift;
    publish(call, own, kTurn, fine ? (peers & ~missing) | 1u << call.me : 0);
}

// Of one warp's shared memory: the slot of every expert, and how many choices of every slot stand before.
struct Numbers {
    int* slot_of;
    int* seen;
};

__device__ inline Numbers begin_numbers(const Events& e, int slots) {
    int* shared = reinterpret_cast<int*>(ptx::shared_memory() + kBehindWords);
    const Numbers numbers = {shared + slots, shared};
    const int lane = static_cast<int>(ptx::lane_id());
    for (int s = lane; s < slots; s += 32) numbers.seen[s] = 0;
    for (int i = lane; i < e.experts; i += 32) numbers.slot_of[i] = e.slot_of[i];
    __syncwarp();
    return numbers;
}

// Own choices `first`, + 32, ... and their weights, all asked for before one is looked at.
struct Asked {
    i64 id[kBatch];
    float weight[kBatch];
};
__device__ __forceinline__ void ask_choices(Asked& asked, const Events& e, int first, int end) {
#pragma unroll
    for (int q = 0; q < kBatch; ++q) {
        const int at = min(first + 32 * q, end - 1);
        asked.id[q] = e.ids[at];
        asked.weight[q] = e.weights[at];
    }
}

// Their slots, -1 from `end` on.
__device__ __forceinline__ void find_slots(int (&slot)[kBatch], const Asked& asked, const Events& e,
                                           const int* slot_of, int first, int end) {
#pragma unroll
    for (int q = 0; q < kBatch; ++q) {
        const i64 id = first + 32 * q < end ? asked.id[q] : -1;
        slot[q] = id >= 0 && id < e.experts ? slot_of[id] : -1;
    }
}

// How many of choices `first` to `end` want every slot, to `seen`. A warp.
__device__ __forceinline__ void count_choices(const Events& e, const Numbers& numbers, int first, int end) {
    const int lane = static_cast<int>(ptx::lane_id());
#pragma unroll 1
    for (int at = first + lane; at - lane < end; at += 32 * kBatch) {
        Asked asked;
        int slot[kBatch];
        ask_choices(asked, e, at, end);
        find_slots(slot, asked, e, numbers.slot_of, at, end);
#pragma unroll
        for (int q = 0; q < kBatch; ++q)
            if (slot[q] >= 0) atomicAdd(&numbers.seen[slot[q]], 1);
    }
    __syncwarp();
}

// Choices `first` to `end` to everybody, each with how many of its slot stand before it: those in `seen`, and
// in this part. The next ones are on their way meanwhile. A warp.
__device__ __forceinline__ void number_choices(const Call& call, const Events& e, const Numbers& numbers,
                                               u32 open, int first, int end) {
    const int lane = static_cast<int>(ptx::lane_id());
    if (first >= end) return;
    Asked next;
    ask_choices(next, e, first + lane, end);
#pragma unroll 1
    for (int at = first + lane; at - lane < end; at += 32 * kBatch) {
        const Asked asked = next;
        int slot[kBatch];
        u32 same[kBatch];
        ask_choices(next, e, at + 32 * kBatch, end);
        find_slots(slot, asked, e, numbers.slot_of, at, end);
#pragma unroll
        for (int q = 0; q < kBatch; ++q) same[q] = __match_any_sync(0xffffffffu, slot[q]);
#pragma unroll
        for (int q = 0; q < kBatch; ++q) {
            const u32 lower = same[q] & ((1u << lane) - 1);
            const int before = slot[q] < 0 ? 0 : numbers.seen[slot[q]] + __popc(lower);
            __syncwarp();
            if (slot[q] >= 0 && lower == 0) numbers.seen[slot[q]] += __popc(same[q]);
            __syncwarp();
            if (at + 32 * q >= end) continue;
#pragma unroll 1
            for (u32 left = open; left; left &= left - 1) {
                const int p = __ffs(left) - 1;
                choices_at(call, e, p, call.me)[at + 32 * q] = Choice{slot[q], before};
                gates_at(call, e, p, call.me)[at + 32 * q] = asked.weight[q];
            }
        }
    }
}

// Until all of this rank's indexers have counted their parts. They wait for nobody else.
__device__ inline void meet_indexers(const Call& call, Words& own, int indexers) {
    __syncwarp();
    if (ptx::lane_id() == 0) {
        ptx::fence_gpu();
        if (ptx::add_acq_rel_gpu(&own.counted, 1) + 1 == static_cast<u32>(indexers)) {
            own.counted = 0;
            ptx::store_release_gpu(&own.decided[kCounts], call.epoch);
        }
        while (ptx::load_acquire_gpu(&own.decided[kCounts]) != call.epoch) ptx::pause();
    }
    __syncwarp();
}

// How many choices of every slot stand in the parts before this one, to `seen`; the first indexer tells the
// hosts how many there are. A warp, four slots a lane; `stride`: words of a part.
__device__ inline void add_parts(const Call& call, const Events& e, u32 open, int* seen, const int* parts,
                                 int stride, int indexers) {
    const int slots = e.offsets[call.group->ranks / e.tensor];
#pragma unroll 1
    for (int s = 4 * static_cast<int>(ptx::lane_id()); s < slots; s += 128) {
        int before[4] = {}, all[4] = {};
#pragma unroll 1
        for (int b = 0; b < indexers; b += kBatch) {
            uint4 value[kBatch];
#pragma unroll
            for (int q = 0; q < kBatch; ++q)
                value[q] = *reinterpret_cast<const uint4*>(parts + min(b + q, indexers - 1) * stride + s);
#pragma unroll
            for (int q = 0; q < kBatch; ++q) {
                const u32 of[4] = {value[q].x, value[q].y, value[q].z, value[q].w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int count = static_cast<int>(of[i]);
                    before[i] += b + q < call.block ? count : 0;
                    all[i] += b + q < indexers ? count : 0;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            seen[s + i] = before[i];
            if (call.block != 0 || s + i >= slots) continue;
#pragma unroll 1
            for (u32 left = open; left; left &= left - 1) {
                const int p = __ffs(left) - 1, owner = p / e.tensor;
                if (s + i >= e.offsets[owner] && s + i < e.offsets[owner + 1])
                    counts_at(call, e, p, call.me)[s + i - e.offsets[owner]] = all[i];
            }
        }
    }
    __syncwarp();
}

// This warp's part of the choices, to everybody.
__device__ inline void send_choices(const Call& call, const Events& e, Words& own, u32 open, int indexers) {
    const int lane = static_cast<int>(ptx::lane_id()), all = e.tokens * e.choices;
    const int each = (all + 32 * indexers - 1) / (32 * indexers) * 32;
    const int first = min(call.block * each, all), end = min(first + each, all);
    const int stride = (e.offsets[call.group->ranks / e.tensor] + 3) / 4 * 4;
    const Numbers numbers = begin_numbers(e, stride);
    int* parts = reinterpret_cast<int*>(at_peer(call, e.parts_at, call.me));
    count_choices(e, numbers, first, end);
    for (int s = lane; s < stride; s += 32) parts[call.block * stride + s] = numbers.seen[s];
    meet_indexers(call, own, indexers);
    add_parts(call, e, open, numbers.seen, parts, stride, indexers);
    number_choices(call, e, numbers, open, first, end);
}

// Tokens to where the ranks that want them find them, by `movers` warps.
__device__ inline void send_rows(const Call& call, const Events& e, u32 open, int mover, int movers) {
    const int lane = static_cast<int>(ptx::lane_id());
    bool fine = true;
#pragma unroll 1
    for (int t = mover; t < e.tokens; t += movers) {
        if (!e.known) {
            const i64 id = lane < e.choices ? e.ids[static_cast<i64>(t) * e.choices + lane] : -1;
            fine = fine && id >= -1 && id < e.experts;
            const u32 wanted = ranks_wanted(call, e, slot_of(e, id)) & ~(1u << call.me);
            if (lane == 0) e.wanted[t] = wanted;
            __syncwarp();
        }
#pragma unroll 1
        for (u32 left = e.wanted[t] & open; left; left &= left - 1) {
            u8* to = row_at(call, e, e.packets_at, call.me, __ffs(left) - 1, t);
            copy_row(to, e.x + static_cast<i64>(t) * e.row_bytes, e.row_bytes);
        }
    }
    if (!fine) give_up(call, kBadIds, static_cast<Phase>(kForPacket), call.me);
}

__device__ inline void step_send(const Call& call, const Events& e, Words& own) {
    if (call.block == 0 && threadIdx.x < 32) decide_turn(call, e, own);
    const u32 open = await_decision(call, own, kTurn);
    const u32 counted = open & (peers_of(call, e, kCounted) | 1u << call.me);
    const int p = static_cast<int>(ptx::lane_id());
    const int warp = static_cast<int>(threadIdx.x) / 32, indexers = e.known ? 0 : min(call.blocks, kIndexers);
    if (call.block < indexers && warp == kIndexer)
        send_choices(call, e, own, open, indexers);
    else
        send_rows(call, e, counted, call.block * kWarps + warp - min(call.block, indexers),
                  call.blocks * kWarps - indexers);
    if (call.block == 0 && threadIdx.x < 32 && (open >> p & 1))
        *head_at(call, e, p, call.me) = {counted >> p & 1 ? e.tokens : kNothing, e.note,
                                         e.patience.memory->given[p]};
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

}  // namespace claims
