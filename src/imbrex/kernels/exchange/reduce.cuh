// Combine from expert-major rows: the rows of one token on one expert rank become one sum there, which is
// stored at the token's home and crosses the wire once; at home the sums of all ranks are added in the order
// of the ranks.
//
// Every warp works alone. It draws a piece of work: some tokens of one home rank, or, once those are drawn
// and for some warps from the start, some own tokens. Sums are written into the home's heap, at a place known
// from rank and token, and one flag says that a piece is there; numbers of rows (gradients of gate weights)
// travel beside them. Reducing waits for no peer but the credit and is drawn in the order of the tokens;
// adding at home waits for flags. So nobody waits in a circle, and the wire, the reducing and the adding
// overlap.
//
// Example, 2 ranks: token 5 of rank 0 has rows r on rank 0 (weight .5) and s, t on rank 1 (weights .25, .25).
// Rank 1 writes u = bf16(.25 t + .25 s) into rank 0's heap; rank 0 writes bf16(u + .5 r).
//
// What a block does of it, for a kernel of nothing else (exchange/reduce.cu) and for one that multiplies
// between (fused/home.cu).
#pragma once
#include "exchange/terms.cuh"

namespace exchange {

using namespace sums;

struct Reduce {
    const u8* rows;        // expert-major [ranks of the launch, rows, row_bytes]
    const u8* addend;      // bf16 [.., tokens, D] or null; joins last
    u8* out;               // bf16 or float32 [.., tokens, D]
    const int* position;   // [.., W, max_tokens, K]
    const float* weights;  // [.., W, max_tokens, K], or null: already applied
    const int* recv_row;   // [.., W, max_tokens]; at least 0 where a token of that rank was sent here
    const int* send_row;   // [.., max_tokens, W]; at least 0 where an own token was sent there
    const int* tokens;     // [.., W]
    const float* values;   // [.., rows]: a number of every row that goes home as it is, or null
    // [.., tokens, K]: the number of every choice's row; the sum of its ranks' where several share an expert
    float* values_out;
    i64 values_at;  // offset in a heap of the two buffers of numbers, [W - 1, max_tokens, K]
    i64 values_bytes;
    i64 partials_at;  // offset in a heap of the two buffers of sums, [W - 1, max_tokens, wire_bytes]
    i64 buffer_bytes;
    i64 rows_stride;  // bytes between ranks of the launch
    i64 x_stride;     // the same for addend
    i64 out_stride;
    int max_tokens;
    int choices;
    int row_bytes;
    int wire_bytes;    // of a sum
    int piece_tokens;  // tokens that are drawn at once
    int parts;         // in which a row is cut, each drawn alone
    int reducers;      // warps of a block that begin by reducing
    int out_float;
    int out_tokens;  // of this rank, whatever the routing says: it may have failed
    int early;       // the kernel right before makes the rows, and began when all before it had ended
    int each;        // there are warps enough for a piece each: nobody draws
};

// What a warp draws; numbered by group of tokens, then part, then (reducing) home rank.
struct Piece {
    int source, group, flag;
    int first_token, end_token;
    int first, last;  // columns
};

__device__ inline int groups_of(const Reduce& reduce, int tokens) {
    return (tokens + reduce.piece_tokens - 1) / reduce.piece_tokens;
}

// Columns that are drawn at once.
__device__ inline int columns_of_part(const Reduce& reduce) {
    const int unit = WIRE_FP8 ? kStepColumns : 32, units = unit * reduce.parts;
    return (reduce.row_bytes / 16 + units - 1) / units * unit;
}

__device__ inline Piece piece_of(const Reduce& reduce, const int* tokens, int source, u32 rest) {
    const u32 parts = reduce.parts;
    const int columns = reduce.row_bytes / 16, wide = columns_of_part(reduce);
    Piece piece;
    piece.source = source;
    piece.flag = static_cast<int>(rest);
    piece.group = static_cast<int>(rest / parts);
    piece.first_token = piece.group * reduce.piece_tokens;
    piece.end_token = min(piece.first_token + reduce.piece_tokens, tokens[source]);
    piece.first = static_cast<int>(rest % parts) * wide;
    piece.last = min(piece.first + wide, columns);
    return piece;
}

__device__ inline u8* partial_at(const Call& call, const Reduce& reduce, int home, int from, int token) {
    const int slot = from < home ? from : from - 1;
    const i64 row = static_cast<i64>(slot) * reduce.max_tokens + token;
    return call.group->heap[home] + reduce.partials_at + (call.epoch & 1) * reduce.buffer_bytes +
           row * reduce.wire_bytes;
}

__device__ inline u32* value_at(const Call& call, const Reduce& reduce, int home, int from, int token) {
    const int slot = from < home ? from : from - 1;
    u8* buffer = call.group->heap[home] + reduce.values_at + (call.epoch & 1) * reduce.values_bytes;
    return reinterpret_cast<u32*>(buffer) +
           (static_cast<i64>(slot) * reduce.max_tokens + token) * reduce.choices;
}

// The number of the row, here, of this lane's choice of a token; 0 without.
__device__ inline float value_here(const Call& call, const Reduce& reduce, int source, int token) {
    const int lane = static_cast<int>(ptx::lane_id());
    const i64 at = ((static_cast<i64>(call.local) * call.group->ranks + source) * reduce.max_tokens + token) *
                   reduce.choices;
    const int row = lane < reduce.choices ? reduce.position[at + lane] : -1;
    return row < 0 ? 0.0f : reduce.values[call.local * (reduce.rows_stride / reduce.row_bytes) + row];
}

__device__ inline void send_values(const Call& call, const Reduce& reduce, const Piece& piece) {
    const int lane = static_cast<int>(ptx::lane_id());
#pragma unroll 1
    for (int token = piece.first_token; token < piece.end_token; ++token) {
        const float value = value_here(call, reduce, piece.source, token);
        if (lane < reduce.choices)
            value_at(call, reduce, piece.source, call.me, token)[lane] = __float_as_uint(value);
    }
}

// A ticket orders nothing: whoever ends the call sets them back, behind all blocks' ends.
__device__ inline u32 draw(u32* drawn) {
    int at = 0;
    if (ptx::lane_id() == 0) at = static_cast<int>(atomicAdd(drawn, 1u));
    return static_cast<u32>(__shfl_sync(0xffffffffu, at, 0));
}

// The next piece of a warp from one of two bags: by ticket, or none where every warp has had its own.
__device__ __forceinline__ u32 draw_again(const Call& call, const Reduce& reduce, int bag) {
    return reduce.each ? ~0u : draw(&call.own->drawn[call.kind][bag]);
}

// What a warp has in shared memory: lists of terms, slots for rows, and, for sums that cross as fp8, the
// scales of one.
struct Own {
    Terms* terms;
    u32 ring;
    float* scales;
};

// A token's choice of this lane, here: its row, and weight. Asked for a token ahead, or each token would
// begin by waiting.
struct Choice {
    int row;  // -1 without; kNotSent in all lanes where the token of another rank was not sent here
    float weight;
};
constexpr int kNotSent = -2;

__device__ __forceinline__ Choice ask_choice(const Call& call, const Reduce& reduce, int source, int token,
                                             int end) {
    const int lane = static_cast<int>(ptx::lane_id());
    const i64 at = (static_cast<i64>(call.local) * call.group->ranks + source) * reduce.max_tokens + token,
              mine = at * reduce.choices + lane;
    const bool any = lane < reduce.choices && token < end;
    const int row = any ? reduce.position[mine] : -1, received = token < end ? reduce.recv_row[at] : -1;
    return {row < 0 && received < 0 ? kNotSent : row, any && reduce.weights ? reduce.weights[mine] : 1.0f};
}

// The rows of a token on this rank, in the order of its choices.
__device__ __forceinline__ int append_rows(const Call& call, const Reduce& reduce, Terms& terms, int count,
                                           const Choice& choice) {
    const u8* rows = reduce.rows + call.local * reduce.rows_stride;
    return append(terms, count, choice.row >= 0, rows + static_cast<i64>(choice.row) * reduce.row_bytes,
                  choice.weight);
}

// A sum of zeros, as it crosses.
__device__ __forceinline__ void clear_partial(u8* target, const Span& span) {
    clear(target, span.first / (WIRE_FP8 ? 2 : 1), WIRE_FP8 ? 32 * wire_steps(span.last) : span.last);
    if (WIRE_FP8)
        clear(target + 512 * wire_steps(span.columns), span.first / kStepColumns, wire_steps(span.last));
}

// The `number`-th piece of the others' tokens.
__device__ __forceinline__ Piece other_piece(const Call& call, const Reduce& reduce, const int* tokens,
                                             u32 number) {
    const u32 ranks = call.group->ranks, source = call.me + 1 + number % (ranks - 1);
    return piece_of(reduce, tokens, static_cast<int>(source < ranks ? source : source - ranks),
                    number / (ranks - 1));
}

// All of its sums are stored: its home may add them. All lanes.
__device__ inline void tell_reduced(const Call& call, u32 number) {
    const u32 ranks = call.group->ranks, source = call.me + 1 + number % (ranks - 1),
              flag = number / (ranks - 1);
    __syncwarp();
    if (ptx::lane_id() == 0) {
        ptx::fence_sys();
        ptx::store_relaxed_sys(flag_of(*call.group, call.group->reduced_flags,
                                       source < ranks ? source : source - ranks, call.me, flag),
                               call.epoch);
    }
    __syncwarp();
}

// The pieces that this warp takes, of `pieces`, `number` first: where rows are whole, one stream of tokens,
// so that rows of the next piece are on their way when one is told. Encoding needs the registers, and gained
// nothing from it.
template <class F>
__device__ __forceinline__ void reduce_pieces(const Call& call, const Reduce& reduce, const Own& own,
                                     const int* tokens, u32 pieces, u32 number) {
    const bool apart = WIRE_FP8 != 0 || reduce.parts > 1;
    while (number < pieces) {
        Piece piece = other_piece(call, reduce, tokens, number);
        const Span span = {piece.first, piece.last, reduce.row_bytes / 16};
        u32 told = 0;  // 1 + the last piece of which a token was listed
        Choice next = ask_choice(call, reduce, piece.source, piece.first_token, piece.end_token);
        ptx::wait_for_launches();  // until here nobody has asked for rows, nor stored anything
        int token = piece.first_token;
        const auto list = [&](Terms& terms) {
            for (;;) {
                for (; token < piece.end_token; ++token) {
                    const Choice choice = next;
                    next = ask_choice(call, reduce, piece.source, token + 1, piece.end_token);
                    const int count = append_rows(call, reduce, terms, 0, choice);
                    if (count == 0 && choice.row == kNotSent) continue;
                    u8* target = partial_at(call, reduce, piece.source, call.me, token);
                    if (count == 0) {  // all of its rows one too many
                        clear_partial(target, span);
                        continue;
                    }
                    close_list(terms, count, target, told == number + 1 ? 0 : told);
                    told = number + 1;
                    ++token;
                    return true;
                }
                if (reduce.values && span.first == 0) send_values(call, reduce, piece);
                if (told != number + 1) tell_reduced(call, number);
                if (apart) return false;
                number = draw_again(call, reduce, 0);
                if (number >= pieces) return false;
                piece = other_piece(call, reduce, tokens, number);
                token = piece.first_token;
                next = ask_choice(call, reduce, piece.source, token, piece.end_token);
            }
        };
        const auto store = [&](u8* target, int column, const float (&sum)[F::kColumns][8]) {
            if constexpr (WIRE_FP8 != 0) {
                const int first = column - static_cast<int>(ptx::lane_id());
                encode_sums(target, own.scales, first, span.last, sum);
                if (first + 32 * F::kColumns >= span.last)
                    store_scales(target, own.scales, span.first, span.last, span.columns);
            } else {
#pragma unroll
                for (int q = 0; q < F::kColumns; ++q)
                    if (column + 32 * q < span.last)
                        reinterpret_cast<uint4*>(target)[column + 32 * q] = pack_eight(sum[q]);
            }
        };
        sum_tokens<F, false>(own.terms, own.ring, span, list, store,
                             [&](u32 done) { tell_reduced(call, done); });
        if (told) tell_reduced(call, told - 1);
        if (apart) number = draw_again(call, reduce, 0);
    }
}

// Whether rank `lane` has a sum of an own token.
__device__ __forceinline__ bool ask_sent(const Call& call, const Reduce& reduce, int token, int end) {
    const int lane = static_cast<int>(ptx::lane_id()), ranks = call.group->ranks;
    const i64 at = (static_cast<i64>(call.local) * reduce.max_tokens + token) * ranks;
    return lane < ranks && lane != call.me && token < end && reduce.send_row[at + lane] >= 0;
}

// The terms of an own token: sums of the ranks before this one, own rows, sums of the ranks behind it,
// addend.
__device__ inline int list_home(const Call& call, const Reduce& reduce, Terms& terms, int token, bool sent,
                                const Choice& choice) {
    const int lane = static_cast<int>(ptx::lane_id());
    const u8* partial = sent ? partial_at(call, reduce, call.me, lane, token) : nullptr;
    int count = append(terms, 0, sent && lane < call.me, partial, 1.0f, WIRE_FP8);
    count = append_rows(call, reduce, terms, count, choice);
    count = append(terms, count, sent && lane > call.me, partial, 1.0f, WIRE_FP8);
    if (!reduce.addend) return count;
    return append(terms, count, lane == 0,
                  reduce.addend + call.local * reduce.x_stride + static_cast<i64>(token) * reduce.row_bytes,
                  1.0f);
}

// In the order of the ranks, like the rows.
__device__ inline void add_values(const Call& call, const Reduce& reduce, int token) {
    const int lane = static_cast<int>(ptx::lane_id()), ranks = call.group->ranks;
    const i64 at = static_cast<i64>(call.local) * reduce.max_tokens + token;
    const bool any = lane < reduce.choices;
    const float own = value_here(call, reduce, call.me, token);
    float sum = 0.0f;
#pragma unroll 1
    for (int p = 0; p < ranks; ++p) {
        const bool sent = p != call.me && reduce.send_row[at * ranks + p] >= 0;
        sum += p == call.me ? own
               : sent && any
                   ? __uint_as_float(ptx::load_relaxed_sys(value_at(call, reduce, call.me, p, token) + lane))
                   : 0.0f;
    }
    const i64 row_bytes = (reduce.out_float ? 2 : 1) * reduce.row_bytes;
    if (any)
        reduce.values_out[(call.local * (reduce.out_stride / row_bytes) + token) * reduce.choices + lane] =
            sum;
}

__device__ inline void add_values(const Call& call, const Reduce& reduce, const Piece& piece) {
    if (!reduce.values || piece.first > 0) return;
#pragma unroll 1
    for (int token = piece.first_token; token < piece.end_token; ++token)
        add_values(call, reduce, token);
}

// `to`: of a token; this lane has columns `column`, + 32, ...
template <class F>
__device__ __forceinline__ void store_out(const Reduce& reduce, u8* to, int column, int last,
                                          const float (&sum)[F::kColumns][8]) {
#pragma unroll
    for (int q = 0; q < F::kColumns; ++q) {
        const int at = column + 32 * q;
        if (at >= last) continue;
        if (reduce.out_float) {
            reinterpret_cast<float4*>(to)[2 * at] = {sum[q][0], sum[q][1], sum[q][2], sum[q][3]};
            reinterpret_cast<float4*>(to)[2 * at + 1] = {sum[q][4], sum[q][5], sum[q][6], sum[q][7]};
        } else {
            reinterpret_cast<uint4*>(to)[at] = pack_eight(sum[q]);
        }
    }
}

// Until all ranks have summed their rows of the own piece of this flag. All lanes.
__device__ __forceinline__ bool wait_reduced(const Call& call, int flag) {
    const Group& group = *call.group;
    const int p = static_cast<int>(ptx::lane_id());
    bool fine = true;
    if (p < group.ranks && p != call.me)
        fine = wait_flag(call, flag_of(group, group.reduced_flags, call.me, p, flag), call.epoch,
                         kRowsReduced, p);
    return __all_sync(0xffffffffu, fine);
}

// Until this rank's product has counted `due` rows in a word, where sums are beside it; what is due is read
// again at every look, wherever it lies. `fine`: no wait has failed. One lane. The product ends in bounded
// time, so this limit is one for a broken kernel only.
__device__ __forceinline__ void wait_counted(const Call& call, const u32* words, int at, const u32& due,
                                             bool& fine) {
    stall(call, 4);
    const u64 start = ptx::global_timer();
    for (u32 polls = 1; fine && ptx::load_acquire_gpu(words + at) < due; ++polls) {
        if ((polls & 31) == 0) {
            fine = !leave_if_failed(call, kOwnBlocks);
            if (fine && ptx::global_timer() - start > 4 * call.group->timeout_ns) {
                give_up(call, kTimedOut, kOwnBlocks, call.me);
                fine = false;
            }
        }
        ptx::rest();
    }
}

// The own pieces that this warp takes, of `pieces`, `number` first: with kStream, which takes registers, and
// where rows are whole, one stream of tokens. `there(piece)`, all lanes: whether its sums have come; where
// not that is the end. Returns the piece that was drawn and not added, or `pieces` and more.
template <class F, bool kStream = true, class There>
__device__ __forceinline__ u32 add_pieces(const Call& call, const Reduce& reduce, const Own& own,
                                          const int* tokens, u32 pieces, u32 number, There there) {
    const bool apart = !kStream || reduce.parts > 1;
    bool fine = true;
    while (fine && number < pieces) {
        Piece piece = piece_of(reduce, tokens, call.me, number);
        const Span span = {piece.first, piece.last, reduce.row_bytes / 16};
        int token = piece.first_token;
        Choice next = ask_choice(call, reduce, call.me, token, piece.end_token);
        bool sent = ask_sent(call, reduce, token, piece.end_token);
        ptx::wait_for_launches();
        if (!there(piece)) return number;
        const auto list = [&](Terms& terms) {
            for (;;) {
                while (token < piece.end_token) {
                    const int count = list_home(call, reduce, terms, token, sent, next),
                              wide = reduce.out_float ? 2 : 1;
                    u8* target = reduce.out + call.local * reduce.out_stride +
                                 static_cast<i64>(token) * wide * reduce.row_bytes;
                    ++token;
                    next = ask_choice(call, reduce, call.me, token, piece.end_token);
                    sent = ask_sent(call, reduce, token, piece.end_token);
                    if (count > 0) {
                        close_list(terms, count, target);
                        return true;
                    }
                    clear(target, wide * span.first, wide * span.last);
                }
                if (apart) return false;
                add_values(call, reduce, piece);
                number = draw_again(call, reduce, 1);
                if (number >= pieces) return false;
                piece = piece_of(reduce, tokens, call.me, number);
                token = piece.first_token;
                next = ask_choice(call, reduce, call.me, token, piece.end_token);
                sent = ask_sent(call, reduce, token, piece.end_token);
                fine = there(piece);
                if (!fine) return false;
            }
        };
        const auto store = [&](u8* target, int column, const float (&sum)[F::kColumns][8]) {
            store_out<F>(reduce, target, column, span.last, sum);
        };
        sum_tokens<F, WIRE_FP8 != 0>(own.terms, own.ring, span, list, store, [](u32) {});
        if (apart) {
            add_values(call, reduce, piece);
            number = draw_again(call, reduce, 1);
        }
    }
    return number;
}

// The call has failed, and nobody may take what was summed of it for a sum. A rank that found that a peer had
// given up, and so waited for nobody, has not told its host yet.
__device__ inline void spoil(const Call& call, const Reduce& reduce) {
    if (ptx::lane_id() == 0) leave_if_failed(call, kRowsReduced);
    const i64 row_bytes = (reduce.out_float ? 2 : 1) * static_cast<i64>(reduce.row_bytes);
    fill_nan(reduce.out + call.local * reduce.out_stride, reduce.out_tokens * row_bytes / 4);
    const i64 first = call.local * (reduce.out_stride / row_bytes) * reduce.choices;
    if (reduce.values)
        fill_nan(reduce.values_out + first, static_cast<i64>(reduce.out_tokens) * reduce.choices);
}

// Bytes of shared memory of a block's lists and slots; scales of sums that cross as fp8 come behind them.
template <class F>
constexpr u32 kReduceBytes = F::kWarps * (F::kSlots * F::kSlotBytes + F::kLists * sizeof(Terms));

template <class F>
__device__ __forceinline__ Own own_of(const Reduce& reduce, int warp, u8* shared) {
    u8* lists = shared + F::kWarps * F::kSlots * F::kSlotBytes;
    u8* scales = shared + kReduceBytes<F> + warp * 16 * wire_steps(reduce.row_bytes / 16);
    return {reinterpret_cast<Terms*>(lists) + F::kLists * warp,
            ptx::smem_u32(shared) + warp * F::kSlots * F::kSlotBytes, reinterpret_cast<float*>(scales)};
}

}  // namespace exchange
