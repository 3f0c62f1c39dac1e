// Sums of rows beside the product that makes them: pieces of exchange/reduce.cuh, by warps that have
// registers and nothing else. The same bits, partials and flags as there.
//
// The result's columns are `Reduce::parts` parts, computed one after the other (fused/down_home.cu). A piece
// is some tokens of one part. It may be summed when all rows of its part are written, which one counter a
// part says. All pieces have one number, drawn in this order, for three parts:
//
//   others' tokens of part 0 | others' 1, own 0 | others' 2, own 1 | own 2
//
// so that peers have had a part's time when their sums of own tokens are wanted.
//
// Nobody waits in a circle: others' pieces wait for this rank's product alone, which waits for nobody, and
// for credit; own pieces of a part wait for others' pieces of that part at the peers, which come before them
// in every rank's order.
//
// A warp takes some tokens at once: every lane finds one possible term of one of them, and the terms that
// there are go through the warp in their order, kTerms loads ahead of the additions, over the ends of tokens.
// Example, 4 choices: lanes 0-3 are token 0's choices, 4-7 token 1's, ... 28-31 token 7's. Of an own token on
// 2 ranks there are 6 possible terms, its slot has 8 lanes: on rank 1 lane 0 is rank 0's sum, 1-4 the choices
// and 5 the addend.
#pragma once
#include "exchange/reduce.cuh"

namespace fused {

using namespace exchange;

// Terms that a warp has in flight, and the columns of 16 bytes that a lane has of each, 512 bytes apart.
template <int kTermsAtOnce, int kColumnsOfLane>
struct Hands {
    static constexpr int kTerms = kTermsAtOnce, kColumns = kColumnsOfLane;
};

// What a warp has drawn.
struct Job {
    int home;  // own tokens, else those of `source`
    int part, source, flag;
    int first_token, end_token;
    int first, last;  // columns
    int shift;        // lanes of a token, 1 << shift of them
    u8* target;       // the sum of token 0
};

// A possible term of a token, of this lane.
struct Share {
    const u8* row;  // null without
    float weight;
};

// Of one rank: pieces of a part, of others' tokens and of own ones, and of all parts together.
struct Bag {
    u32 others, own, all;
};

// Rows of every part that are in memory, times tiles: `words`, full at rows * tiles.
struct Written {
    const u32* words;
    const int* ends;
    int experts, columns, tile;  // columns of the result, of a tile
};

__device__ __forceinline__ const int* tokens_of(const Call& call, const Reduce& reduce) {
    return reduce.tokens + call.local * call.group->ranks;
}

__device__ __forceinline__ Bag bag_of(const Call& call, const Reduce& reduce) {
    const int ranks = call.group->ranks;
    const int* tokens = tokens_of(call, reduce);
    int most = 0;
    for (int p = 0; p < ranks; ++p)
        if (p != call.me) most = max(most, tokens[p]);
    const u32 others = static_cast<u32>(groups_of(reduce, most)) * static_cast<u32>(ranks - 1),
              own = static_cast<u32>(groups_of(reduce, tokens[call.me]));
    return {others, own, (others + own) * static_cast<u32>(reduce.parts)};
}

constexpr int kMostWarps = 12;  // of a block

// In shared memory: few registers are left beside the terms, and what lies here is read again where it is
// wanted.
struct Room {
    Call call;
    Bag bag;
    Job job[kMostWarps];  // of every warp
};

struct Summers {
    const Call& call;
    const Reduce& reduce;
    const Written& written;
    const Bag& bag;
    Job& job;

    // All pieces that this warp draws; false: the call has failed.
    template <class F>
    __device__ __forceinline__ bool run() const {
        const bool fine = !failed(call);
        if (!__all_sync(~0u, fine) || !wait_credit(call, static_cast<int>(ptx::lane_id()), 2))
            return false;
        int ready = 0;  // parts that this warp has seen full
        u32 number = uniform(draw_ahead());
#pragma unroll 1
        while (number < bag.all) {
            const u32 next = draw_ahead();
            if (ptx::lane_id() == 0) find_job(number);
            __syncwarp();
            for (; ready <= job.part; ++ready)  // also those before: an own piece of one may come next
                if (!wait_written(ready)) return false;
            if (job.home && !wait_reduced(call, job.flag)) return false;
            sum_piece<F>();
            __syncwarp();
            if (!job.home) tell();
            __syncwarp();
            number = uniform(next);
        }
        return true;
    }

   private:
    __device__ __forceinline__ static u32 uniform(u32 value) { return __shfl_sync(~0u, value, 0); }

    // In lane 0, asked before it is needed.
    __device__ __forceinline__ u32 draw_ahead() const {
        return ptx::lane_id() == 0 ? atomicAdd(&call.own->drawn[call.kind][0], 1u) : 0;
    }

    // One lane.
    __device__ __forceinline__ void find_job(u32 number) const {
        const u32 others = bag.others, both = others + bag.own, ranks = call.group->ranks,
                  parts = reduce.parts;
        bool home = number >= others;
        u32 part = 0, at = number, source = call.me, group;
        if (home) {
            part = 1 + (number - others) / both, at = (number - others) % both;
            home = at >= others || part == parts;
            if (home && part < parts) at -= others;
            if (home) --part;
        }
        group = at;
        if (!home) {
            source = call.me + 1 + at % (ranks - 1), group = at / (ranks - 1);
            if (source >= ranks) source -= ranks;
        }
        const Piece piece =
            piece_of(reduce, tokens_of(call, reduce), static_cast<int>(source), group * parts + part);
        job.home = home, job.part = static_cast<int>(part), job.source = piece.source, job.flag = piece.flag;
        job.first_token = piece.first_token, job.end_token = piece.end_token;
        job.first = piece.first, job.last = piece.last, job.shift = shift_of(home);
        job.target = home ? reduce.out + call.local * reduce.out_stride
                          : partial_at(call, reduce, piece.source, call.me, 0);
    }

    // Until this rank's rows of a part are written. All lanes.
    __device__ __forceinline__ bool wait_written(int part) const {
        bool fine = true;
        if (ptx::lane_id() == 0) {
            const int wide = 8 * columns_of_part(reduce),
                      columns = min(wide, written.columns - part * wide);
            const u32 rows = written.experts > 0 ? written.ends[written.experts - 1] : 0,
                      due = rows * static_cast<u32>((columns + written.tile - 1) / written.tile);
            wait_counted(call, written.words, part, due, fine);
        }
        return __all_sync(~0u, fine);
    }

    // All sums of the piece are stored, by all lanes.
    __device__ __forceinline__ void tell() const {
        const Group& group = *call.group;
        if (ptx::lane_id() == 0) {
            ptx::fence_sys();
            ptx::store_relaxed_sys(
                flag_of(group, group.reduced_flags, job.source, call.me, job.flag), call.epoch);
        }
    }

    // Lanes of a token's slot, as a shift.
    __device__ __forceinline__ int shift_of(bool home) const {
        const int terms = reduce.choices + (home ? call.group->ranks : 0);
        return terms > 1 ? 32 - __clz(static_cast<u32>(terms - 1)) : 0;
    }

    // Choice `k` of a token, which is number `at` of this rank's table.
    __device__ __forceinline__ Share row_of(i64 at, int k) const {
        const i64 mine = at * reduce.choices + k;
        const int row = reduce.position[mine];
        const u8* rows = reduce.rows + call.local * reduce.rows_stride;
        return {row < 0 ? nullptr : rows + static_cast<i64>(row) * reduce.row_bytes,
                reduce.weights ? reduce.weights[mine] : 1.0f};
    }

    __device__ __forceinline__ i64 number_of(int source, int token) const {
        return (static_cast<i64>(call.local) * call.group->ranks + source) * reduce.max_tokens + token;
    }

    // Term `k` of an own token: sums of the ranks before this one, own rows, sums of the ranks behind,
    // addend.
    __device__ __forceinline__ Share home_term(int token, int k) const {
        const int me = call.me, ranks = call.group->ranks, choices = reduce.choices;
        if (k >= me && k < me + choices) return row_of(number_of(me, token), k - me);
        if (k == choices + ranks - 1 && reduce.addend)
            return {reduce.addend + call.local * reduce.x_stride + static_cast<i64>(token) * reduce.row_bytes,
                    1.0f};
        const int rank = k < me ? k : k - choices + 1;
        if (rank >= ranks) return {nullptr, 1.0f};
        const i64 at = (static_cast<i64>(call.local) * reduce.max_tokens + token) * ranks + rank;
        return {reduce.send_row[at] < 0 ? nullptr : partial_at(call, reduce, me, rank, token), 1.0f};
    }

    template <class F>
    __device__ __forceinline__ void sum_piece() const {
        const int shift = job.shift, lane = static_cast<int>(ptx::lane_id());
#pragma unroll 1
        for (int first = job.first_token; first < job.end_token; first += 32 >> shift) {
            bool wanted;
            const Share mine = term_of(first + (lane >> shift), lane & ((1 << shift) - 1), wanted);
            const u32 live = __ballot_sync(~0u, mine.row != nullptr);
            // sums of nothing: all rows of the token were one too many
#pragma unroll 1
            for (u32 left = __ballot_sync(~0u, wanted); left != 0; left &= left - 1) {
                const int from = __ffs(left) - 1;
                if ((live >> from & (shift == 5 ? ~0u : (1u << (1 << shift)) - 1)) == 0)
                    clear(target_of(first + (from >> shift)), job.first, job.last);
            }
#pragma unroll 1
            for (int column = job.first + lane; column - lane < job.last; column += 32 * F::kColumns)
                add_terms<F>(mine, live, first, column);
        }
    }

    __device__ __forceinline__ u8* target_of(int token) const {
        return job.target + static_cast<i64>(token) * reduce.row_bytes;
    }

    // Term `k` of a token of the piece; `wanted`, in term 0: the token has a sum.
    __device__ __forceinline__ Share term_of(int token, int k, bool& wanted) const {
        wanted = false;
        if (token >= job.end_token) return {nullptr, 1.0f};
        if (job.home) {
            wanted = k == 0;
            return home_term(token, k);
        }
        const i64 at = number_of(job.source, token);
        wanted = k == 0 && reduce.recv_row[at] >= 0;
        return k < reduce.choices ? row_of(at, k) : Share{nullptr, 1.0f};
    }

    // The terms of the lanes in `live`, in their order, into the sums of their tokens, the first of which is
    // `first`. This lane has columns `column`, 32 more, ...
    template <class F>
    __device__ __forceinline__ void add_terms(const Share& mine, u32 live, int first, int column) const {
        float sum[F::kColumns][8] = {};
#pragma unroll 1
        while (live != 0) {
            uint4 value[F::kTerms][F::kColumns];
            u32 ahead = live;
#pragma unroll
            for (int i = 0; i < F::kTerms; ++i, ahead &= ahead - 1) {
                const u64 row = reinterpret_cast<u64>(mine.row);
                const int from = ahead != 0 ? __ffs(ahead) - 1 : 0;
                const u32 low = __shfl_sync(~0u, static_cast<u32>(row), from),
                          high = __shfl_sync(~0u, static_cast<u32>(row >> 32), from);
                ptx::forget(ahead);
                load_columns<F>(value[i],
                                reinterpret_cast<const u8*>(static_cast<u64>(high) << 32 | low) + 16 * column,
                                ahead != 0 ? job.last - column : 0);
            }
#pragma unroll
            for (int i = 0; i < F::kTerms; ++i) {
                if (live == 0) break;
                const int from = __ffs(live) - 1;
                const float weight = __uint_as_float(__shfl_sync(~0u, __float_as_uint(mine.weight), from));
#pragma unroll
                for (int q = 0; q < F::kColumns; ++q) sums::add_eight(sum[q], value[i][q], weight);
                live &= live - 1;
                if (live != 0 && (__ffs(live) - 1) >> job.shift == from >> job.shift) continue;
                uint4* target = reinterpret_cast<uint4*>(target_of(first + (from >> job.shift))) + column;
#pragma unroll
                for (int q = 0; q < F::kColumns; ++q) {
                    if (column + 32 * q < job.last) target[32 * q] = sums::pack_eight(sum[q]);
#pragma unroll
                    for (int j = 0; j < 8; ++j) sum[q][j] = 0.0f;
                }
            }
        }
    }

    // This lane's columns of a row.
    template <class F, int kAt = 0>
    __device__ __forceinline__ static void load_columns(uint4 (&value)[F::kColumns], const u8* from,
                                                        int left) {
        if constexpr (kAt < F::kColumns) {
            value[kAt] = ptx::load_relaxed_gpu<512 * kAt>(from, 32 * kAt < left);
            load_columns<F, kAt + 1>(value, from, left);
        }
    }
};

}  // namespace fused
