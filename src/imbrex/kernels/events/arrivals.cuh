// The second step of a call: whose packets are there in time, and their rows to where the experts want them.
//
// Rows stand by slot, rank and token. A packet says how many of its choices want every slot here, and every
// choice how many of its slot stand before it; so a block adds up the numbers of the packets that came, and
// knows every row. Then it moves its part of all tokens through the ring of exchange/mover.cuh, each read
// once and stored to each of its rows.
//
// Example: ranks 0 and 1 want slot 0 of this host 2 and 3 times, slot 1 once and not at all. Their first rows
// are 0 and 2 of slot 0, 5 and 6 of slot 1; if rank 0 has not come, those of rank 1 are 0 and 3.
#pragma once
#include "events/call.cuh"
#include "exchange/mover.cuh"
#include "exchange/terms.cuh"

namespace claims {

constexpr int kWorkers = kWarps - mover::kMoverThreads / 32;  // warps that write down where rows are

__device__ inline void decide_packets(const Call& call, const Events& e, Words& own) {
    const int lane = static_cast<int>(ptx::lane_id());
    const u32 peers = peers_of(call, e, kServed);
    u32 missing = peers;
    const auto come = [&](int p) {
        const u32 moved = ptx::load_acquire_sys(&own.moved[p]);  // before the claim
        const bool sent = is_sent(ptx::load_acquire_sys(&own.packet[p]), call.epoch);
        if (sent && !e.known) {
            const Head* head = head_at(call, e, call.me, p);
            e.patience.memory->got[p] = head->given;
            e.patience.memory->loads[p] = static_cast<i64>(head->tokens) * e.choices;
        }
        return sent || reached(moved, call.epoch);
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
    if (gone != 0 && !e.known && e.patience.budget != kWhole) {
        const i64 price = price_of(*e.patience.memory, call.group->ranks);
        if (gone >> lane & 1) e.patience.memory->given[lane] += price;  // comes with the next packet
    }
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

// Tokens of a rank whose packet counts.
__device__ __forceinline__ int tokens_here(const Call& call, const Events& e, u32 here, int w) {
    if ((here >> w & 1) == 0) return 0;
    return e.known ? e.tokens_of[w] : head_at(call, e, call.me, w)->tokens;
}

// First rows of every slot here and rank, [slots, W]. A warp; that of the first block writes down how many
// rows a slot has.
__device__ inline void place_ranks(const Call& call, const Events& e, u32 here, int* table) {
    const int lane = static_cast<int>(ptx::lane_id()), ranks = call.group->ranks;
    const int owner = call.me / e.tensor, slots = here ? e.offsets[owner + 1] - e.offsets[owner] : 0;
    int rows = 0;
#pragma unroll 1
    for (int first = lane; first - lane < slots * ranks; first += 32 * kBatch) {
        int value[kBatch];
#pragma unroll
        for (int q = 0; q < kBatch; ++q) {
            const int at = min(first + 32 * q, slots * ranks - 1), w = at % ranks;
            value[q] = here >> w & 1 ? counts_at(call, e, call.me, w)[at / ranks] : 0;
        }
#pragma unroll
        for (int q = 0; q < kBatch; ++q) {
            if (first - lane + 32 * q >= slots * ranks) break;
            int sum = first + 32 * q < slots * ranks ? value[q] : 0;
            const int mine = sum;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int below = __shfl_up_sync(0xffffffffu, sum, step);
                if (lane >= step) sum += below;
            }
            if (first + 32 * q < slots * ranks) table[first + 32 * q] = rows + sum - mine;
            rows += __shfl_sync(0xffffffffu, sum, 31);
        }
    }
    __syncwarp();
    if (call.block != 0) return;
    for (int s = lane; s < e.most_slots; s += 32) {
        const int next = s + 1 < slots ? table[(s + 1) * ranks] : rows;
        e.counts[s] = s < slots ? next - table[s * ranks] : 0;
    }
    if (lane < 4) e.totals[lane] = lane == 0 ? rows : 0;
    if (lane < ranks) {
        e.tokens_of[lane] = tokens_here(call, e, here, lane);
        e.outcome[kCame * ranks + lane] = here >> lane & 1;
    }
}

// The row of a choice of rank `w`, here; -1: not here.
__device__ __forceinline__ int row_of(const Call& call, const Events& e, const int* table, int low, int high,
                                      Choice choice, int w) {
    const bool mine = choice.slot >= low && choice.slot < high;
    return mine ? table[(choice.slot - low) * call.group->ranks + w] + choice.before : -1;
}

// Where all rows are, for those who come later. The workers' threads.
__device__ inline void write_places(const Call& call, const Events& e, u32 here, const int* table,
                                    int thread) {
    const int owner = call.me / e.tensor, low = e.offsets[owner], high = e.offsets[owner + 1];
    const int per_rank = e.room * e.choices, threads = call.blocks * 32 * kWorkers;
#pragma unroll 1
    for (int w = 0; w < call.group->ranks; ++w) {
        const int all = tokens_here(call, e, here, w) * e.choices;
        const Choice* choices = choices_at(call, e, call.me, w);
        const float* gates = gates_at(call, e, call.me, w);
        const i64 base = static_cast<i64>(w) * per_rank;
#pragma unroll 4
        for (int i = call.block * 32 * kWorkers + thread; i < per_rank; i += threads) {
            const Choice choice = i < all ? choices[i] : Choice{-1, 0};
            e.position[base + i] = row_of(call, e, table, low, high, choice, w);
            e.all_weights[base + i] = i < all ? gates[i] : 0.0f;
        }
    }
}

// This block's part of the tokens of all ranks. The lister's warp.
__device__ inline void list_rows(const Call& call, const Events& e, const mover::Ring& ring, u32 here,
                                 const int* table) {
    const int ranks = call.group->ranks, lane = static_cast<int>(ptx::lane_id()), per_group = 32 / ranks;
    const int owner = call.me / e.tensor, low = e.offsets[owner], high = e.offsets[owner + 1];
    const int w = (lane + call.me) % ranks;
    const i64 tokens = lane < per_group * ranks ? tokens_here(call, e, here, w) : 0;
    const int first = static_cast<int>(tokens * call.block / call.blocks),
              end = static_cast<int>(tokens * (call.block + 1) / call.blocks);
    const u32 most = __reduce_max_sync(0xffffffffu, static_cast<u32>(end - first));
    const Choice* choices = choices_at(call, e, call.me, w);
    const int* position = e.position + static_cast<i64>(w) * e.room * e.choices;
    u32 number = 0;
#pragma unroll 1
    for (u32 begin = 0; begin < most; begin += per_group) {
        mover::SegmentHead* segment = mover::open_segment(call, ring, number);
        mover::ItemHead* item = mover::item_of(ring, segment, lane);
        const int token = first + static_cast<int>(begin) + lane / ranks;
        int targets = 0;
#pragma unroll 1
        for (int k = 0; k < e.choices && token < end; k += kBatch) {
            int row[kBatch];
#pragma unroll
            for (int u = 0; u < kBatch; ++u) {
                const int at = token * e.choices + min(k + u, e.choices - 1);
                row[u] = e.known ? position[at] : row_of(call, e, table, low, high, choices[at], w);
            }
#pragma unroll
            for (int u = 0; u < kBatch; ++u)
                if (k + u < e.choices && row[u] >= 0)
                    mover::targets_of(item)[targets++] = e.rows + static_cast<i64>(row[u]) * e.row_bytes;
        }
        if (token < end)
            item->source = w == call.me ? e.x + static_cast<i64>(token) * e.row_bytes
                                        : row_at(call, e, e.packets_at, w, call.me, token);
        item->targets = targets;
        ptx::fence_async();  // what this rank acquired from a peer, before TMA reads it
        mover::close_segment(ring, segment, number, 32);
        ++number;
    }
    mover::open_segment(call, ring, number);
    mover::close_segment(ring, mover::segment_of(ring, number), number, 0);
}

// Whether this block's rows are there; in a call that has failed they may not be.
__device__ inline bool move_rows(const Call& call, const Events& e, u32 here) {
    const mover::Ring ring = mover::make_ring(call, e.row_bytes, e.row_bytes, e.stages, e.choices, 0,
                                              e.most_slots * call.group->ranks * 4);
    int* table = reinterpret_cast<int*>(ring.segments + mover::kSegments * mover::segment_stride(ring));
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
    if (warp == 0 && !e.known) place_ranks(call, e, here, table);
    __syncthreads();
    bool fine = true;
    if (warp == 0) {
        if (ptx::lane_id() == 0) fine = mover::load_rows(call, ring);
    } else if (warp == 1) {
        if (ptx::lane_id() == 0) fine = mover::store_rows(call, ring);
    } else if (warp == 2) {
        list_rows(call, e, ring, here, table);
    } else if (!e.known) {
        // No wait of this call writes to the memory of them now.
        if (e.patience.share > 0 && call.block == 0 && warp - 3 < kLearnt) learn(e.patience, warp - 3);
        write_places(call, e, here, table, thread - mover::kMoverThreads);
    }
    return __syncthreads_and(fine) != 0;
}

// The rows of a failed backward, whose places are known: nobody takes what the memory held for gradients.
__device__ inline void spoil_rows(const Events& e, int row) {
#pragma unroll 1
    for (u32 left = __ballot_sync(0xffffffffu, row >= 0); left; left &= left - 1) {
        const i64 at = __shfl_sync(0xffffffffu, row, __ffs(left) - 1);
        sums::fill_nan(e.rows + at * e.row_bytes, e.row_bytes / 4);
    }
}

// All of this block's, where it has failed; of all tokens that its forward served, as `here` may be nobody.
__device__ inline void spoil_all(const Call& call, const Events& e) {
    const int lane = static_cast<int>(ptx::lane_id()), warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
    for (int w = 0; w < call.group->ranks; ++w) {
        const int tokens = e.tokens_of[w];
#pragma unroll 1
        for (int t = call.block * kWarps + warp; t < tokens; t += call.blocks * kWarps) {
            const i64 at = (static_cast<i64>(w) * e.room + t) * e.choices + lane;
            spoil_rows(e, lane < e.choices ? e.position[at] : -1);
        }
    }
}

// Then packets may be overwritten.
__device__ inline void step_expand(const Call& call, const Events& e, Words& own) {
    if (call.block == 0 && threadIdx.x < 32) decide_packets(call, e, own);
    const u32 here = await_decision(call, own, kPackets);
    const bool whole = move_rows(call, e, here) && here != 0;
    if (!whole && e.known) spoil_all(call, e);
    if (!last_to_leave(call, own) || here == 0) return;
    const int p = static_cast<int>(threadIdx.x);
    if (p < call.group->ranks && p != call.me) {
        stall(call, 3);
        ptx::store_relaxed_sys(&words_of(*call.group, e.words_at, p).taken[call.me], call.epoch);
    }
}

}  // namespace claims
