// The last steps of a call: the sums of every peer's tokens to where that peer finds them, and, once it is
// decided whose replies count, the sums of the own tokens, in the order of the ranks.
//
// Rows come through the rings of exchange/terms.cuh, a warp each, as in `serial`; so the bits are its. With
// WIRE_FP8 the peers' sums are encoded where they are stored and decoded where they are added.
#pragma once
#include "events/call.cuh"
#include "exchange/terms.cuh"

namespace claims {

using Summing = sums::Form<kWarps, 6, sums::kColumns, 2>;

// The row of this lane's choice of a token, here; -1: none.
struct Place {
    int row;
    float weight;
};
__device__ __forceinline__ Place ask_place(const Events& e, int w, int t, bool any) {
    const int lane = static_cast<int>(ptx::lane_id());
    const i64 at = (static_cast<i64>(w) * e.room + t) * e.choices + lane;
    any = any && lane < e.choices;
    return {any ? e.position[at] : -1, any && e.weighted ? e.all_weights[at] : 1.0f};
}

__device__ __forceinline__ int append_rows(const Events& e, sums::Terms& terms, int count, Place place) {
    return sums::append(terms, count, place.row >= 0, e.rows + static_cast<i64>(place.row) * e.row_bytes,
                        place.weight);
}

// The sums of tokens that `list(terms)` lists, until it returns false. A warp. kCross: for a peer.
template <bool kCross, class List>
__device__ __forceinline__ void sum_listed(const Events& e, List list) {
    const int warp = static_cast<int>(threadIdx.x) / 32, units = e.row_bytes / 16;
    u8* rings = ptx::shared_memory() + kBehindWords;
    u8* lists = rings + kWarps * Summing::kSlots * Summing::kSlotBytes;
    sums::Terms* terms = reinterpret_cast<sums::Terms*>(lists) + Summing::kLists * warp;
    const u32 ring = ptx::smem_u32(rings) + warp * Summing::kSlots * Summing::kSlotBytes;
    float* scales = reinterpret_cast<float*>(lists + Summing::kLists * kWarps * sizeof(sums::Terms)) +
                    4 * warp * sums::wire_steps(units);
    const auto store = [&](u8* to, int column, const float (&sum)[Summing::kColumns][8]) {
        if constexpr (kCross && WIRE_FP8 != 0) {
            const int first = column - static_cast<int>(ptx::lane_id());
            sums::encode_sums(to, scales, first, units, sum);
            if (first + 32 * Summing::kColumns >= units) sums::store_scales(to, scales, 0, units, units);
        } else {
#pragma unroll
            for (int q = 0; q < Summing::kColumns; ++q)
                if (column + 32 * q < units)
                    reinterpret_cast<uint4*>(to)[column + 32 * q] = sums::pack_eight(sum[q]);
        }
    };
    constexpr bool kMixed = !kCross && WIRE_FP8 != 0;
    sums::sum_tokens<Summing, kMixed>(terms, ring, {0, units, units}, list, store, [](u32) {});
}

// The number of a row here; 0 without.
__device__ __forceinline__ float value_of(const Events& e, int row) { return row < 0 ? 0.0f : e.values[row]; }

// Numbers of the peers' rows, which go home as they are.
__device__ inline void send_values(const Call& call, const Events& e, u32 here) {
#pragma unroll 1
    for (int w = 0; w < call.group->ranks; ++w) {
        const int all = w != call.me && (here >> w & 1) ? e.tokens_of[w] * e.choices : 0;
        const int* position = e.position + static_cast<i64>(w) * e.room * e.choices;
        float* values = values_at(call, e, w, call.me);
#pragma unroll 4
        for (int i = call.block * kThreads + static_cast<int>(threadIdx.x); i < all;
             i += call.blocks * kThreads)
            values[i] = value_of(e, position[i]);
    }
}

// The sums of the peers' tokens: this warp's, each peer's one after the other.
__device__ inline void send_sums(const Call& call, const Events& e, u32 here) {
    const int ranks = call.group->ranks, warp = static_cast<int>(threadIdx.x) / 32;
    const int begin = call.block * kWarps + warp, stride = call.blocks * kWarps;
    int i = 0, w = call.me, t = 0, tokens = 0;
    const auto go_on = [&] {
        t += stride;
        while (t >= tokens && ++i < ranks) {
            w = call.me + i < ranks ? call.me + i : call.me + i - ranks;
            tokens = here >> w & 1 ? e.tokens_of[w] : 0;
            t = begin;
        }
    };
    go_on();
    Place next = ask_place(e, w, t, i < ranks);
    sum_listed<true>(e, [&](sums::Terms& terms) {
        while (i < ranks) {
            const Place place = next;
            u8* to = reply_at(call, e, w, call.me, t);
            go_on();
            next = ask_place(e, w, t, i < ranks);
            const int count = append_rows(e, terms, 0, place);
            if (count == 0) continue;
            sums::close_list(terms, count, to);
            return true;
        }
        return false;
    });
}

__device__ inline void step_reply(const Call& call, const Events& e, Words& own) {
    const u32 here = warp_failed(call) ? 0 : own.ranks[kPackets];
    const int lane = static_cast<int>(ptx::lane_id());
    if (e.values) send_values(call, e, here);
    send_sums(call, e, here);
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

// What is known of every own choice: whether it counts, and in a backward its number.
__device__ inline void tell_choices(const Call& call, const Events& e, u32 counted) {
    const int all = e.tokens * e.choices, ranks = call.group->ranks;
    const int* position = e.position + static_cast<i64>(call.me) * e.room * e.choices;
    u32 dropped = 0;
#pragma unroll 1
    for (int i = call.block * kThreads + static_cast<int>(threadIdx.x); i < all;
         i += call.blocks * kThreads) {
        if (e.values_out) {
            const u32 wanted = e.wanted[i / e.choices] & counted;
            float sum = 0.0f;
#pragma unroll 1
            for (int p = 0; p < ranks; ++p)
                sum += p == call.me        ? value_of(e, counted >> call.me & 1 ? position[i] : -1)
                       : (wanted >> p & 1) ? values_at(call, e, call.me, p)[i]
                                           : 0.0f;
            e.values_out[i] = sum;
        }
        if (e.known) continue;
        const int slot = slot_of(e, e.ids[i]);
        bool counts = slot < 0;
        for (int p = 0; p < ranks; p += e.tensor)
            counts = counts || ((counted >> p & 1) && slot >= e.offsets[p / e.tensor] &&
                                slot < e.offsets[p / e.tensor + 1]);
        e.kept[i] = counts;
        dropped += !counts;
    }
    if (e.known || e.patience.budget == kWhole) return;
    __syncwarp();
    dropped = __reduce_add_sync(0xffffffffu, dropped);
    if (dropped > 0 && ptx::lane_id() == 0) atomicAdd(&e.patience.memory->dropped, dropped);
}

// Of the own tokens: replies of the ranks before this one, own rows, replies of the ranks behind it, addend.
__device__ inline void sum_own(const Call& call, const Events& e, u32 counted) {
    const int lane = static_cast<int>(ptx::lane_id()), warp = static_cast<int>(threadIdx.x) / 32;
    const int stride = call.blocks * kWarps, units = e.row_bytes / 16;
    const bool mine = counted >> call.me & 1;
    int t = call.block * kWarps + warp;
    Place next = ask_place(e, call.me, t, mine && t < e.tokens);
    u32 wanted = t < e.tokens ? e.wanted[t] : 0;
    sum_listed<false>(e, [&](sums::Terms& terms) {
        while (t < e.tokens) {
            const bool sent = (wanted & counted) >> lane & 1;
            const u8* reply = sent ? reply_at(call, e, call.me, lane, t) : nullptr;
            const u8* addend = e.addend + static_cast<i64>(t) * e.row_bytes;
            u8* to = e.out + static_cast<i64>(t) * e.row_bytes;
            int count = sums::append(terms, 0, sent && lane < call.me, reply, 1.0f, WIRE_FP8);
            count = append_rows(e, terms, count, next);
            count = sums::append(terms, count, sent && lane > call.me, reply, 1.0f, WIRE_FP8);
            count = sums::append(terms, count, e.addend && lane == 0, addend, 1.0f);
            t += stride;
            next = ask_place(e, call.me, t, mine && t < e.tokens);
            wanted = t < e.tokens ? e.wanted[t] : 0;
            if (count > 0) {
                sums::close_list(terms, count, to);
                return true;
            }
            sums::clear(to, 0, units);
        }
        return false;
    });
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
    if (counted != 0) {
        tell_choices(call, e, counted);
        sum_own(call, e, counted);
        return;
    }
    leave_if_failed(call, static_cast<Phase>(kForReply));
    const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
    for (int t = call.block * kWarps + warp; t < e.tokens; t += call.blocks * kWarps) spoil_token(e, t);
}

}  // namespace claims
