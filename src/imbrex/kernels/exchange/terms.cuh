// Weighted sums of rows by one warp: rows come by asynchronous copies into a ring of the warp's own, no
// barrier between warps.
//
// A warp lists a token's terms (row addresses and weights, in order) in shared memory and walks over the
// columns, a step of one term at a time. What a lane asks for it reads itself, so a step costs no barrier,
// and the copies go on over the end of a token: the rows of the next one are on their way while a sum is
// encoded or stored. Steps in flight hold no registers, so the code of a step stands once, and a lane has
// four columns, which pays for a step's overhead twice as well as two.
// Rows a b c with weights 1 2 3 give bf16(3 c + (2 b + (1 a + 0))), one fused multiply-add each, so the same
// bits every run.
//
// With WIRE_FP8, sums that cross are rounded to bf16 and then encoded (`exchange/wire.cuh`); at home they are
// decoded to float32.
#pragma once
#include "peers/protocol.cuh"
#include "exchange/wire.cuh"

#ifndef WIRE_FP8
#define WIRE_FP8 0
#endif

namespace sums {

using namespace exchange;

constexpr int kMostTerms = 52;  // 32 choices, 16 ranks, an addend

// How a block sums: its warps, the steps that each has in flight, the columns of 16 bytes that a lane has of
// a step, 512 bytes apart, and the tokens that a warp has open. Mirrored by `layout.py`.
template <int kWarpsOfBlock, int kSlotsOfWarp, int kColumnsOfLane, int kListsOfWarp>
struct Form {
    static constexpr int kWarps = kWarpsOfBlock, kSlots = kSlotsOfWarp, kColumns = kColumnsOfLane,
                         kLists = kListsOfWarp;
    static constexpr int kSlotBytes = 512 * kColumns;
    static_assert(kColumns == 8 || kColumns == sums::kColumns, "see ask_step");
    static_assert(!WIRE_FP8 || kColumns == sums::kColumns, "see encode_sums");
};

struct Term {
    const u8* row;  // + 1 where it is coded: as the wire has it
    float weight;
    u32 coded;
};

// Of one token. Mirrored by `layout.py`.
struct Terms {
    Term term[kMostTerms];
    u8* target;
    u32 bytes;   // of the terms
    u32 before;  // 1 + a piece that is done when this token is begun, or 0
};

// Columns of a row of `columns` that a warp sums: `first` is a multiple of 32, so is `last` or it is the end.
struct Span {
    int first, last, columns;
};

// Lanes with a term append it in the order of the lanes; returns how many terms there are.
__device__ __forceinline__ int append(Terms& terms, int count, bool mine, const u8* row, float weight,
                                      bool coded = false) {
    const u32 lanes = __ballot_sync(0xffffffffu, mine);
    const int at = count + __popc(lanes & ((1u << ptx::lane_id()) - 1));
    if (mine) terms.term[at] = {row + coded, weight, coded};
    return count + __popc(lanes);
}

// All lanes, after the last term.
__device__ __forceinline__ void close_list(Terms& terms, int count, u8* target, u32 before = 0) {
    if (ptx::lane_id() == 0) {
        terms.bytes = count * sizeof(Term);
        terms.target = target;
        terms.before = before;
    }
    __syncwarp();
}

// 16-byte units `first` to `last` of a row: what a token without terms has.
__device__ __forceinline__ void clear(u8* row, int first, int last) {
#pragma unroll 1
    for (int i = first + static_cast<int>(ptx::lane_id()); i < last; i += 32)
        reinterpret_cast<uint4*>(row)[i] = {0, 0, 0, 0};
}

// NaN, whether read as bf16 or as float32. All lanes.
__device__ inline void fill_nan(void* target, i64 words) {
#pragma unroll 1
    for (i64 i = ptx::lane_id(); i < words; i += 32) static_cast<u32*>(target)[i] = 0xffffffffu;
}

// sum[i] = weight * value[i] + sum[i] over the eight bf16 values of 16 bytes, each rounded once.
__device__ __forceinline__ void add_eight(float (&sum)[8], uint4 value, float weight) {
    const u32 words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] = __fmaf_rn(weight, ptx::bf16_low(words[i]), sum[2 * i]);
        sum[2 * i + 1] = __fmaf_rn(weight, ptx::bf16_high(words[i]), sum[2 * i + 1]);
    }
}

// Where in the stream of steps a warp is. Terms turn fastest, so sums complete one after the other.
template <class F>
struct Cursor {
    u32 at, first, end;  // shared addresses of terms
    int column;          // of this lane
    // Returns the list's `before`.
    __device__ __forceinline__ u32 begin(u32 terms) {
        const uint2 header = ptx::load_shared_pair(terms + kMostTerms * sizeof(Term) + 8);
        at = first = terms;
        end = terms + header.x;
        return header.y;
    }
    __device__ __forceinline__ u8* target() const {
        const uint2 target = ptx::load_shared_pair(first + kMostTerms * sizeof(Term));
        return reinterpret_cast<u8*>(static_cast<u64>(target.y) << 32 | target.x);
    }
    // False behind the last column: then `at` stays the end.
    __device__ __forceinline__ bool next_column(const Span& span) {
        const int lane = static_cast<int>(ptx::lane_id());
        column += 32 * F::kColumns;
        if (column - lane >= span.last) {
            column = span.first + lane;
            return false;
        }
        at = first;
        return true;
    }
};

// One step of a term into this lane's part of a slot. Of a coded term, 16 bytes of values and 16 of scales
// for every 64 columns.
template <class F, bool kMixed>
__device__ __forceinline__ void ask_step(u32 to, uint2 row, int column, const Span& span) {
    const u8* values = reinterpret_cast<const u8*>(static_cast<u64>(row.y) << 32 | row.x);
    const int left = span.last - column;
    if (kMixed && row.x & 1) {
        values -= 1;
        const u32 lane = ptx::lane_id(), first = static_cast<u32>(column) - lane;
        const u8* scales = values + (512 * wire_steps(span.columns) + first / 4);
        values += 8 * first + 16 * lane;
        ptx::copy_async<0, 0>(to, values, left > 0);
        ptx::copy_async<512, 0>(to, scales, left > 0);
        ptx::copy_async<1024, 512>(to, values, left > 64);
        ptx::copy_async<1536, 16>(to, scales, left > 64);
    } else {
        values += 16 * static_cast<u32>(column);
        ptx::copy_async<0, 0>(to, values, left > 0);
        ptx::copy_async<512, 512>(to, values, left > 32);
        ptx::copy_async<1024, 1024>(to, values, left > 64);
        ptx::copy_async<1536, 1536>(to, values, left > 96);
        if constexpr (F::kColumns == 8) {
            ptx::copy_async<2048, 2048>(to, values, left > 128);
            ptx::copy_async<2560, 2560>(to, values, left > 160);
            ptx::copy_async<3072, 3072>(to, values, left > 192);
            ptx::copy_async<3584, 3584>(to, values, left > 224);
        }
    }
}

template <class F, bool kMixed>
__device__ __forceinline__ void add_step(float (&sum)[F::kColumns][8], u32 from, u32 term) {
    const uint2 kind = ptx::load_shared_pair(term + 8);
    uint4 value[F::kColumns];
#pragma unroll
    for (int q = 0; q < F::kColumns; ++q) value[q] = ptx::load_shared(from + 512 * q);
    if (kMixed && kind.y) {
#pragma unroll
        for (int q = 0; q < F::kColumns; q += 2) add_coded(sum[q], sum[q + 1], value[q], value[q + 1]);
    } else {
#pragma unroll
        for (int q = 0; q < F::kColumns; ++q) add_eight(sum[q], value[q], __uint_as_float(kind.x));
    }
}

// The list behind the one at shared address `list`, of those at `lists`.
template <class F>
__device__ __forceinline__ u32 list_after(u32 lists, u32 list) {
    if constexpr (F::kLists == 2) return 2 * lists + sizeof(Terms) - list;
    list += sizeof(Terms);
    return list == lists + F::kLists * sizeof(Terms) ? lists : list;
}

// Sums the tokens that `list(terms)` lists, until it returns false. `store(target, column, sum)`, all lanes:
// a lane has columns `column`, + 32, ..., which may all lie behind the end. `terms`: kLists lists, of which
// all but the latest may still be read. `ring`: shared address of this warp's slots.
//
// A turn of the loop adds what a slot got kSlots turns ago, if anything, and asks for the next step into it:
// a turn is a group of copies, so the wait is always for the same number of groups.
template <class F, bool kMixed, class List, class Store, class Done>
__device__ __forceinline__ void sum_tokens(Terms* terms, u32 ring, const Span& span, List list, Store store,
                                           Done done) {
    const u32 lane = ptx::lane_id(), lists = ptx::smem_u32(terms), begin = ring + 16 * lane;
    float sum[F::kColumns][8] = {};
    Cursor<F> ahead = {0, 0, 0, span.first + static_cast<int>(lane)}, now = ahead;
    u32 slot = begin, asked = 0;       // a bit for every slot, the oldest lowest
    int open = 0, most = F::kLists, turn = 0;  // lists
    uint2 asking = {0, 0};             // the row at `ahead`, a turn early
#pragma unroll 1
    for (;;) {
        ptx::copy_wait<F::kSlots - 1>();
        if (asked & 1) {
            add_step<F, kMixed>(sum, slot, now.at);
            now.at += sizeof(Term);
            if (now.at == now.end) {
                store(now.target(), now.column, sum);
#pragma unroll
                for (int q = 0; q < F::kColumns; ++q)
#pragma unroll
                    for (int i = 0; i < 8; ++i) sum[q][i] = 0.0f;
                if (!now.next_column(span) && --open > 0)
                    if (const u32 before = now.begin(list_after<F>(lists, now.first))) done(before - 1);
            }
        }
        asked >>= 1;
        if (ahead.at == ahead.end && open < most) {
            __syncwarp();
            if (list(terms[turn])) {
                ahead.begin(lists + turn * sizeof(Terms));
                asking = ptx::load_shared_pair(ahead.at);
                if (open++ == 0)
                    if (const u32 before = now.begin(ahead.first)) done(before - 1);
                turn = F::kLists == 2 ? turn ^ 1 : turn + 1 == F::kLists ? 0 : turn + 1;
            } else {
                most = 0;
            }
        }
        if (ahead.at != ahead.end) {
            ask_step<F, kMixed>(slot, asking, ahead.column, span);
            asked |= 1u << (F::kSlots - 1);
            ahead.at += sizeof(Term);
            if (ahead.at == ahead.end) ahead.next_column(span);
            if (ahead.at != ahead.end) asking = ptx::load_shared_pair(ahead.at);
        }
        ptx::copy_commit();
        if (asked == 0) break;
        slot = slot == begin + (F::kSlots - 1) * F::kSlotBytes ? begin : slot + F::kSlotBytes;
    }
    __syncwarp();  // before the lists are written again
}

}  // namespace sums
