// The row summer: weighted sums of bf16 rows from any addresses, in fp32 and the order given, one bf16 row out.
//
// Warps of a block: a lister (writes items, waits for flags of peers), a loader (TMA), a publisher (flags at peers), and the
// summing warps. An item is a target and its rows in order: rows a b c with weights 1 2 3 give bf16(3 c + (2 b + (1 a + 0))),
// one fused multiply-add each, so the same bits every run.
//
// A row crosses shared memory in pieces. An entry is one piece of all rows of an item: consecutive slots of a ring, one
// barrier, one team of summing warps, each with many independent instructions between two waits. The loader copies
// what they need into the entry, so a listed segment is free as soon as it is loaded. Loading bounds the kernel (a
// single thread took 0.5 us an entry, a warp with a row a lane 0.38 us): a block has two halves, each with a
// loader, a ring and summing warps of its own, which take every other item.
//
// A segment may ask to be published: when its last entry is written, a flag is set at every peer.
#pragma once
#include "exchange.cuh"

constexpr int kSegments = 4;
constexpr int kSegmentItems = 16;
constexpr int kHalves = 2;
constexpr int kSummingWarps = 8;  // of a half
#ifndef TEAM_WARPS
#define TEAM_WARPS 1
#endif
constexpr int kTeamWarps = TEAM_WARPS;  // that sum one entry together
constexpr int kTeams = kSummingWarps / kTeamWarps;
// A multiple of the teams, so that a warp always meets the same barriers: one that met another warp's could run a phase
// ahead of it and take the phase before last for the next.
constexpr int kEntries = 2 * kSummingWarps;
constexpr int kCounters = 64;  // of segments whose entries are in flight: more than kHalves * kEntries + kSegments
constexpr int kSumThreads = 32 * (2 + kHalves * (1 + kSummingWarps));
constexpr int kColumns = 4;  // 16-byte columns a lane sums at once
constexpr u32 kLast = 1u << 31;

struct SumRing {
    u32 segment_full, segment_empty, entry_full, entry_empty;
    u32 slots;
    u8* segments;
    u8* entries;
    u32* counters;  // [kCounters]; warps' shares of a segment to publish that are not yet written
    u32* listed;    // segments to publish, so far; kLast with the last
    int half;
    int num_slots;  // of the half
    int piece_bytes;
    int row_bytes;
    int max_rows;
};

struct SumHead {
    int count;    // items; -1 ends the stream
    int counter;  // of the entries of a segment to publish, or -1
    int unused[2];
};

struct SumItem {
    u8* target;  // null: skipped
    int rows;
    int unused;
};

struct Entry {
    u8* target;  // null: the end of the stream
    int rows;
    int slot;  // of the first row
    int bytes;
    int counter;
    int unused[2];
};

__device__ __forceinline__ int weights_bytes(const SumRing& ring) { return (4 * ring.max_rows + 15) / 16 * 16; }
__device__ __forceinline__ int item_bytes(const SumRing& ring) { return 16 + (8 * ring.max_rows + 15) / 16 * 16 + weights_bytes(ring); }
__device__ __forceinline__ int segment_bytes(const SumRing& ring) { return 16 + kSegmentItems * item_bytes(ring); }
__device__ __forceinline__ int entry_bytes(const SumRing& ring) { return 32 + weights_bytes(ring); }
__device__ __forceinline__ SumHead* sum_segment(const SumRing& ring, u32 number) {
    return reinterpret_cast<SumHead*>(ring.segments + static_cast<int>(number % kSegments) * segment_bytes(ring));
}
__device__ __forceinline__ SumItem* sum_item(const SumRing& ring, SumHead* segment, int i) {
    return reinterpret_cast<SumItem*>(reinterpret_cast<u8*>(segment) + 16 + i * item_bytes(ring));
}
__device__ __forceinline__ const u8** rows_of(SumItem* item) { return reinterpret_cast<const u8**>(item + 1); }
__device__ __forceinline__ float* weights_of(const SumRing& ring, SumItem* item) {
    return reinterpret_cast<float*>(reinterpret_cast<u8*>(item + 1) + (8 * ring.max_rows + 15) / 16 * 16);
}
__device__ __forceinline__ Entry* entry_of(const SumRing& ring, u32 number) {
    return reinterpret_cast<Entry*>(ring.entries + static_cast<int>(number % kEntries) * entry_bytes(ring));
}
__device__ __forceinline__ float* weights_of(Entry* entry) { return reinterpret_cast<float*>(entry + 1); }

// Shared memory: 1 KB of barriers, segments, entries of both halves, then their slots at a multiple of 128. All threads.
__device__ inline SumRing make_sum_ring(const Call& call, int half, int row_bytes, int piece_bytes, int num_slots, int max_rows) {
    u8* shared = ptx::shared_memory();
    const u32 base = ptx::smem_u32(shared);
    SumRing ring;
    ring.segment_full = base;
    ring.segment_empty = base + 8 * kSegments;
    ring.entry_full = base + 16 * kSegments + 16 * kEntries * half;
    ring.entry_empty = ring.entry_full + 8 * kEntries;
    ring.counters = call.own->words[call.kind][call.block];
    ring.listed = ring.counters + kCounters;
    ring.segments = shared + 1024;
    ring.half = half;
    ring.num_slots = num_slots;
    ring.piece_bytes = piece_bytes;
    ring.row_bytes = row_bytes;
    ring.max_rows = max_rows;
    ring.entries = ring.segments + kSegments * segment_bytes(ring) + half * kEntries * entry_bytes(ring);
    ring.slots = (base + 1024 + kSegments * segment_bytes(ring) + kHalves * kEntries * entry_bytes(ring) + 127) / 128 * 128;
    ring.slots += half * num_slots * piece_bytes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kSegments; ++i) {
            ptx::mbarrier_init(ring.segment_full + 8 * i, 32);  // the lanes of the lister
            ptx::mbarrier_init(ring.segment_empty + 8 * i, 32 * kHalves);
        }
        for (int i = 0; i < kHalves * kEntries; ++i) {
            const u32 pair = base + 16 * kSegments + 16 * kEntries * (i / kEntries) + 8 * (i % kEntries);
            ptx::mbarrier_init(pair, 1);
            ptx::mbarrier_init(pair + 8 * kEntries, 32 * kTeamWarps);
        }
        ptx::store_release_block(ring.listed, 0);
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
        if (!wait_stage(call, ring.entry_empty + 8 * (loader.oldest % kEntries), (loader.oldest / kEntries) & 1)) return false;
        loader.used -= entry_of(ring, loader.oldest)->rows;
        ++loader.oldest;
    }
    return true;
}

// One piece of an item, by all lanes: describe it, then lane j lets row j come. `weight`, `source`: of row `lane`.
__device__ inline void load_entry(const SumRing& ring, Loader& loader, u8* target, int rows, const u8* source, float weight, int bytes, int counter) {
    const int lane = static_cast<int>(ptx::lane_id());
    const u32 full = ring.entry_full + 8 * (loader.entry % kEntries);
    Entry* entry = entry_of(ring, loader.entry);
    __syncwarp();  // all lanes have read what this entry held before
    if (lane < rows) weights_of(entry)[lane] = weight;
    if (lane == 0) {
        entry->target = target;
        entry->rows = rows;
        entry->slot = loader.slot;
        entry->bytes = bytes;
        entry->counter = counter;
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_expect(full, bytes * rows);
    __syncwarp();
    const int at = loader.slot + lane < ring.num_slots ? loader.slot + lane : loader.slot + lane - ring.num_slots;
    if (lane < rows) ptx::bulk_load(ring.slots + at * ring.piece_bytes, source, bytes, full);
    loader.slot = loader.slot + rows < ring.num_slots ? loader.slot + rows : loader.slot + rows - ring.num_slots;
    loader.used += rows;
    ++loader.entry;
}

__device__ inline void end_entries(const Call& call, const SumRing& ring, Loader& loader) {
    for (int i = 0; i < kTeams; ++i) {
        if (!make_room(call, ring, loader, 0)) return;
        Entry* entry = entry_of(ring, loader.entry);
        __syncwarp();
        if (ptx::lane_id() == 0) {
            entry->target = nullptr;
            entry->rows = 0;
            ptx::mbarrier_arrive(ring.entry_full + 8 * (loader.entry % kEntries));
        }
        ++loader.entry;
        __syncwarp();
    }
}

// All lanes of one warp.
__device__ inline void load_pieces(const Call& call, const SumRing& ring) {
    const int lane = static_cast<int>(ptx::lane_id());
    Loader loader = {0, 0, 0, 0};
    for (u32 number = 0;; ++number) {
        const u32 buffer = number % kSegments;
        if (!wait_stage(call, ring.segment_full + 8 * buffer, (number / kSegments) & 1)) return;
        ptx::fence_async();
        SumHead* segment = sum_segment(ring, number);
        const int count = segment->count, counter = segment->counter;
        if (count < 0) return end_entries(call, ring, loader);
        for (int i = ring.half; i < count; i += kHalves) {
            SumItem* item = sum_item(ring, segment, i);
            u8* target = item->target;
            const int rows = item->rows;
            if (target == nullptr) continue;
            const u8* source = lane < rows ? rows_of(item)[lane] : nullptr;
            const float weight = lane < rows ? weights_of(ring, item)[lane] : 0.0f;
            for (int offset = 0; offset < ring.row_bytes; offset += ring.piece_bytes) {
                if (!make_room(call, ring, loader, rows)) return;
                load_entry(ring, loader, target + offset, rows, source + offset, weight, min(ring.piece_bytes, ring.row_bytes - offset), counter);
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

// Columns (16 bytes each) `thread`, `thread` + kStep, ... of an entry; `thread` counts in the team.
__device__ inline void sum_entry(const SumRing& ring, Entry* entry, int thread) {
    constexpr int kStep = 32 * kTeamWarps;
    const int columns = entry->bytes / 16, rows = entry->rows, slot = entry->slot;
    const float* weights = weights_of(entry);
    uint4* target = reinterpret_cast<uint4*>(entry->target);
    for (int first = thread; first < columns; first += kStep * kColumns) {
        float sum[kColumns][8] = {};
        for (int j = 0; j < rows; ++j) {
            const int at = slot + j < ring.num_slots ? slot + j : slot + j - ring.num_slots;
            const u32 from = ring.slots + at * ring.piece_bytes + 16 * first;
            const float weight = weights[j];
            uint4 value[kColumns];
#pragma unroll
            for (int q = 0; q < kColumns; ++q)
                if (first + kStep * q < columns) value[q] = ptx::load_shared(from + 16 * kStep * q);
#pragma unroll
            for (int q = 0; q < kColumns; ++q)
                if (first + kStep * q < columns) add_eight(sum[q], value[q], weight);
        }
#pragma unroll
        for (int q = 0; q < kColumns; ++q)
            if (first + kStep * q < columns)
                target[first + kStep * q] = {ptx::pack_bf16(sum[q][0], sum[q][1]), ptx::pack_bf16(sum[q][2], sum[q][3]),
                                          ptx::pack_bf16(sum[q][4], sum[q][5]), ptx::pack_bf16(sum[q][6], sum[q][7])};
    }
}

// Tell every peer of the segments whose entries are all written, in order: number i has flag `block + i * blocks`. One thread.
__device__ inline void publish_sums(const Call& call, const SumRing& ring, i64 flags) {
    const Group& group = *call.group;
    for (u32 published = 0;;) {
        const u32 listed = ptx::load_acquire_block(ring.listed);
        if ((listed & ~kLast) == published) {
            if (listed & kLast) return;
        } else if (ptx::load_acquire_block(&ring.counters[published % kCounters]) == 0) {
            ptx::fence_sys();
            const int flag = call.block + static_cast<int>(published++) * group.blocks;
            for (int p = 0; p < group.ranks; ++p)
                if (p != call.me) ptx::store_relaxed_sys(flag_of(group, flags, p, call.me, flag), call.epoch);
            continue;
        } else if (failed(call)) {
            return;
        }
        ptx::pause();
    }
}

// A team has the entries team, team + kTeams, ...
__device__ inline void sum_rows(const Call& call, const SumRing& ring, int warp) {
    const int lane = static_cast<int>(ptx::lane_id());
    for (u32 number = warp / kTeamWarps;; number += kTeams) {
        const u32 at = number % kEntries;
        if (!wait_stage(call, ring.entry_full + 8 * at, (number / kEntries) & 1)) return;
        Entry* entry = entry_of(ring, number);
        if (entry->target == nullptr) return;
        const int counter = entry->counter;
        sum_entry(ring, entry, warp % kTeamWarps * 32 + lane);
        ptx::mbarrier_arrive(ring.entry_empty + 8 * at);
        if (counter < 0) continue;
        __syncwarp();
        if (lane == 0) ptx::sub_release_block(&ring.counters[counter], 1);
    }
}

__device__ inline SumHead* open_sums(const Call& call, const SumRing& ring, u32 number) {
    if (number >= kSegments) wait_stage(call, ring.segment_empty + 8 * (number % kSegments), ((number / kSegments) & 1) ^ 1);
    return sum_segment(ring, number);
}

// All lanes. `listed`: this lane's item is one. `publish`: how many segments to publish came before this one, or -1.
__device__ inline void close_sums(const SumRing& ring, SumHead* segment, u32 number, int count, int publish, bool listed) {
    const int items = __popc(__ballot_sync(0xffffffffu, listed));
    if (ptx::lane_id() == 0) {
        segment->count = count;
        segment->counter = publish < 0 ? -1 : publish % kCounters;
        if (publish >= 0) {
            ring.counters[publish % kCounters] =
                items * kTeamWarps * ((ring.row_bytes + ring.piece_bytes - 1) / ring.piece_bytes);
            ptx::store_release_block(ring.listed, publish + 1);
        }
    }
    __syncwarp();
    ptx::mbarrier_arrive(ring.segment_full + 8 * (number % kSegments));
}
