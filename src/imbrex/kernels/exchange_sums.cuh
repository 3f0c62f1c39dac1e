// The row summer: weighted sums of bf16 rows from any addresses, in fp32 and a fixed order, one bf16 row out.
//
// Warps of a block: a lister (writes items, waits for flags of peers), a loader (one thread, TMA, pieces of rows into a
// ring), and the rest, which sum. An item is a target and its rows in order. Rows [own_first, own_first + own_rows) are summed by
// themselves with fused multiply-adds, and their sum then joins the others, which are added as they are:
//
//   rows a b c d, own_first 1, own_rows 2, weights . 2 3 .  ->  ((0 + a) + (2 b + 3 c)) + d
//
// so the order is that of the ranks, and the own rank's part is never rounded to bf16.
//
// A row crosses shared memory in pieces, so that an item of many rows always fits: an entry is one piece of all
// rows of an item, its pieces lie in consecutive slots of the ring, and it completes on one barrier.
#pragma once
#include "exchange.cuh"

constexpr int kSegments = 4;
constexpr int kEntries = 32;
constexpr int kSummingWarps = 14;
constexpr int kSumThreads = 32 * (2 + kSummingWarps);

struct SumRing {
    u32 segment_full, segment_empty, entry_full, entry_empty;
    u32 slots;
    u8* segments;
    u8* entry_rows;  // of the loader alone
    int num_slots;
    int piece_bytes;
    int row_bytes;
    int max_rows;
};

struct SumHead {
    int count;    // items; -1 ends the stream
    int publish;  // 1 + index of the flag to set at every peer when the items are written, or 0
    int unused[2];
};

struct SumItem {
    u8* target;  // null: skipped
    int rows;
    int own_first;
    int own_rows;
    int unused[3];
};

__device__ __forceinline__ int sum_item_stride(const SumRing& ring) { return 32 + (12 * ring.max_rows + 15) / 16 * 16; }
__device__ __forceinline__ int sum_segment_stride(const SumRing& ring) { return 16 + 32 * sum_item_stride(ring); }
__device__ __forceinline__ SumHead* sum_segment(const SumRing& ring, u32 number) {
    return reinterpret_cast<SumHead*>(ring.segments + static_cast<int>(number % kSegments) * sum_segment_stride(ring));
}
__device__ __forceinline__ SumItem* sum_item(const SumRing& ring, SumHead* segment, int i) {
    return reinterpret_cast<SumItem*>(reinterpret_cast<u8*>(segment) + 16 + i * sum_item_stride(ring));
}
__device__ __forceinline__ const u8** rows_of(SumItem* item) { return reinterpret_cast<const u8**>(item + 1); }
__device__ __forceinline__ float* weights_of(const SumRing& ring, SumItem* item) {
    return reinterpret_cast<float*>(reinterpret_cast<u8*>(item + 1) + 8 * ring.max_rows);
}

// Shared memory: 1 KB of barriers and entry sizes, the segments, then slots at a multiple of 128. All threads.
__device__ inline SumRing make_sum_ring(int row_bytes, int piece_bytes, int num_slots, int max_rows) {
    u8* shared = ptx::shared_memory();
    const u32 base = ptx::smem_u32(shared);
    SumRing ring;
    ring.segment_full = base;
    ring.segment_empty = base + 8 * kSegments;
    ring.entry_full = base + 16 * kSegments;
    ring.entry_empty = ring.entry_full + 8 * kEntries;
    ring.entry_rows = shared + 16 * kSegments + 16 * kEntries;
    ring.segments = shared + 1024;
    ring.num_slots = num_slots;
    ring.piece_bytes = piece_bytes;
    ring.row_bytes = row_bytes;
    ring.max_rows = max_rows;
    ring.slots = (base + 1024 + kSegments * sum_segment_stride(ring) + 127) / 128 * 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kSegments; ++i) {
            ptx::mbarrier_init(ring.segment_full + 8 * i, 32);  // the lanes of the lister
            ptx::mbarrier_init(ring.segment_empty + 8 * i, 1 + 32 * kSummingWarps);
        }
        for (int i = 0; i < kEntries; ++i) {
            ptx::mbarrier_init(ring.entry_full + 8 * i, 1);
            ptx::mbarrier_init(ring.entry_empty + 8 * i, kSummingWarps);
        }
        ptx::fence_barrier_init();
        ptx::fence_async_shared();
    }
    __syncthreads();
    return ring;
}

struct Loader {
    u32 entry, oldest;  // entries opened, entries known to be free again
    int slot, used;
};

// Make room for `rows` more slots and one more entry.
__device__ inline bool make_room(const Call& call, const SumRing& ring, Loader& loader, int rows) {
    while (ring.num_slots - loader.used < rows || loader.entry - loader.oldest == kEntries) {
        const u32 at = loader.oldest % kEntries;
        if (!wait_stage(call, ring.entry_empty + 8 * at, (loader.oldest / kEntries) & 1)) return false;
        loader.used -= ring.entry_rows[at];
        ++loader.oldest;
    }
    return true;
}

// One thread.
__device__ inline void load_pieces(const Call& call, const SumRing& ring) {
    Loader loader = {0, 0, 0, 0};
    for (u32 number = 0;; ++number) {
        const u32 buffer = number % kSegments;
        if (!wait_stage(call, ring.segment_full + 8 * buffer, (number / kSegments) & 1)) return;
        ptx::fence_async();
        SumHead* segment = sum_segment(ring, number);
        const int count = segment->count;
        if (count < 0) return;
        for (int i = 0; i < count; ++i) {
            SumItem* item = sum_item(ring, segment, i);
            if (item->target == nullptr) continue;
            const int rows = item->rows;
            for (int offset = 0; offset < ring.row_bytes; offset += ring.piece_bytes) {
                if (!make_room(call, ring, loader, rows)) return;
                const int bytes = min(ring.piece_bytes, ring.row_bytes - offset);
                const u32 at = loader.entry % kEntries, full = ring.entry_full + 8 * at;
                ring.entry_rows[at] = static_cast<u8>(rows);
                ptx::mbarrier_expect(full, bytes * rows);
                for (int j = 0; j < rows; ++j) {
                    ptx::bulk_load(ring.slots + loader.slot * ring.piece_bytes, rows_of(item)[j] + offset, bytes, full);
                    if (++loader.slot == ring.num_slots) loader.slot = 0;
                }
                loader.used += rows;
                ++loader.entry;
            }
        }
        ptx::mbarrier_arrive(ring.segment_empty + 8 * buffer);
    }
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

// Sixteen bytes of columns of one item; `slot` holds the piece of its first row.
__device__ inline uint4 sum_columns(const SumRing& ring, SumItem* item, int slot, int column) {
    const int rows = item->rows, own_first = item->own_first, own_end = own_first + item->own_rows;
    const float* weights = weights_of(ring, item);
    float sum[8] = {}, own[8] = {};
    for (int j = 0; j < rows; ++j) {
        const int at = slot + j < ring.num_slots ? slot + j : slot + j - ring.num_slots;
        const uint4 value = ptx::load_shared(ring.slots + at * ring.piece_bytes + column);
        if (j >= own_first && j < own_end) {
            add_eight(own, value, weights[j]);
            if (j + 1 == own_end)
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[i] += own[i];
        } else {
            add_eight(sum, value, 1.0f);
        }
    }
    return {ptx::pack_bf16(sum[0], sum[1]), ptx::pack_bf16(sum[2], sum[3]), ptx::pack_bf16(sum[4], sum[5]), ptx::pack_bf16(sum[6], sum[7])};
}

// All summing warps; `thread` counts among them.
__device__ inline void sum_rows(const Call& call, const SumRing& ring, int thread, i64 flags) {
    u32 entry = 0;
    int slot = 0;
    for (u32 number = 0;; ++number) {
        const u32 buffer = number % kSegments;
        if (!wait_stage(call, ring.segment_full + 8 * buffer, (number / kSegments) & 1)) return;
        SumHead* segment = sum_segment(ring, number);
        const int count = segment->count;
        if (count < 0) return;
        for (int i = 0; i < count; ++i) {
            SumItem* item = sum_item(ring, segment, i);
            if (item->target == nullptr) continue;
            for (int offset = 0; offset < ring.row_bytes; offset += ring.piece_bytes, ++entry) {
                const int bytes = min(ring.piece_bytes, ring.row_bytes - offset);
                const u32 at = entry % kEntries;
                if (!wait_stage(call, ring.entry_full + 8 * at, (entry / kEntries) & 1)) return;
                for (int column = 16 * thread; column < bytes; column += 16 * 32 * kSummingWarps)
                    *reinterpret_cast<uint4*>(item->target + offset + column) = sum_columns(ring, item, slot, column);
                slot = (slot + item->rows) % ring.num_slots;
                __syncwarp();
                if (ptx::lane_id() == 0) ptx::mbarrier_arrive(ring.entry_empty + 8 * at);
            }
        }
        const int publish = segment->publish;
        ptx::mbarrier_arrive(ring.segment_empty + 8 * buffer);
        if (publish) {
            ptx::named_barrier(1, 32 * kSummingWarps);
            if (thread < call.group->ranks && thread != call.me) {
                ptx::fence_sys();
                ptx::store_release_sys(flag_of(*call.group, flags, thread, call.me, publish - 1), call.epoch);
            }
        }
    }
}

__device__ inline SumHead* open_sums(const Call& call, const SumRing& ring, u32 number) {
    if (number >= kSegments) wait_stage(call, ring.segment_empty + 8 * (number % kSegments), ((number / kSegments) & 1) ^ 1);
    return sum_segment(ring, number);
}

__device__ inline void close_sums(const SumRing& ring, SumHead* segment, u32 number, int count, int publish) {
    if (ptx::lane_id() == 0) {
        segment->count = count;
        segment->publish = publish;
    }
    ptx::mbarrier_arrive(ring.segment_full + 8 * (number % kSegments));
    __syncwarp();
}
