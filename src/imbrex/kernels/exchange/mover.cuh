// The row mover: rows of bytes from one address to one or more others, by TMA through a ring in shared
// memory.
//
// A block is an independent channel of three warps (the G2S and S2G warp groups of Hybrid-EP's Figure 2, and
// one more):
//   lister  writes segments of up to 32 items (a source address and its target addresses) into shared memory,
//           and is the only warp that waits for flags of peers;
//   loader  one thread: source -> ring slot, completing on the slot's `full` barrier;
//   storer  one thread: ring slot -> every target; a slot is free when its stores have read it.
// No index arithmetic stands in the copy loops: 64-bit divisions there cost a factor of four (measured).
//
// Example, 2 slots, items A -> {p, q}, B -> {}, C -> {r}: loads A, C; stores A to p and q, then C to r; B
// costs nothing.
#pragma once
#include "peers/protocol.cuh"

#ifndef LAG
#define LAG 4
#endif

namespace mover {

using namespace exchange;

constexpr int kSegments = 4;  // segments in flight
constexpr int kLag = LAG;  // store groups that may still read their slots
constexpr int kMoverThreads = 96;

struct Ring {
    u32 segment_full, segment_empty, slot_full, slot_empty;  // shared addresses of arrays of barriers
    u32 slot_loaded;  // slot_full, unless warps stand between loader and storer
    u32 slots;        // shared address of the first slot
    u8* segments;
    int stages;
    int slot_bytes;
    int row_bytes;   // loaded
    int wire_bytes;  // stored
    int max_targets;
};

struct SegmentHead {
    int count;  // items; 0 ends the stream
    int unused[3];
};

struct ItemHead {
    const u8* source;
    int targets;  // 0: skipped
    int unused;
};

__device__ __forceinline__ int item_stride(const Ring& ring) { return 16 + 8 * ring.max_targets; }
__device__ __forceinline__ int segment_stride(const Ring& ring) { return 16 + 32 * item_stride(ring); }
__device__ __forceinline__ SegmentHead* segment_of(const Ring& ring, u32 number) {
    return reinterpret_cast<SegmentHead*>(ring.segments +
                                          static_cast<int>(number % kSegments) * segment_stride(ring));
}
__device__ __forceinline__ ItemHead* item_of(const Ring& ring, SegmentHead* segment, int i) {
    return reinterpret_cast<ItemHead*>(reinterpret_cast<u8*>(segment) + 16 + i * item_stride(ring));
}
__device__ __forceinline__ u8** targets_of(ItemHead* item) { return reinterpret_cast<u8**>(item + 1); }

// Shared memory: 1 KB of barriers, the segments, `extra` bytes, then slots at a multiple of 128. All threads;
// ends in a barrier. `between`: warps that change rows after the loader; the storer then waits for one of
// them.
__device__ inline Ring make_ring(const Call& call, int row_bytes, int wire_bytes, int stages, int max_targets,
                                 int between = 0, int extra = 0) {
    u8* shared = ptx::shared_memory();
    Ring ring;
    const u32 base = ptx::smem_u32(shared);
    ring.segment_full = base;
    ring.segment_empty = base + 8 * kSegments;
    ring.slot_full = base + 16 * kSegments;
    ring.slot_empty = ring.slot_full + 8 * stages;
    ring.slot_loaded = between ? ring.slot_empty + 8 * stages : ring.slot_full;
    ring.segments = shared + 1024;
    ring.stages = stages;
    ring.row_bytes = row_bytes;
    ring.wire_bytes = wire_bytes;
    ring.slot_bytes = (row_bytes + 127) / 128 * 128;
    ring.max_targets = max_targets;
    ring.slots = (base + 1024 + kSegments * segment_stride(ring) + extra + 127) / 128 * 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kSegments; ++i) {
            ptx::mbarrier_init(ring.segment_full + 8 * i, 32);                 // the lanes of the lister
            ptx::mbarrier_init(ring.segment_empty + 8 * i, 2 + 32 * between);  // loader and storer
        }
        for (int i = 0; i < stages; ++i) {
            ptx::mbarrier_init(ring.slot_loaded + 8 * i, 1);
            if (between) ptx::mbarrier_init(ring.slot_full + 8 * i, 32);
            ptx::mbarrier_init(ring.slot_empty + 8 * i, 1);
        }
        ptx::fence_barrier_init();
        ptx::fence_async_shared();
    }
    __syncthreads();
    return ring;
}

// False where it left before the end of the list: the call has failed.
__device__ inline bool load_rows(const Call& call, const Ring& ring) {
    u32 loaded = 0, slot = 0, round = 0;
    for (u32 number = 0;; ++number) {
        const u32 buffer = number % kSegments;
        if (!wait_stage(call, ring.segment_full + 8 * buffer, (number / kSegments) & 1)) return false;
        SegmentHead* segment = segment_of(ring, number);
        const int count = segment->count;
        if (count == 0) return true;
        for (int i = 0; i < count; ++i) {
            ItemHead* item = item_of(ring, segment, i);
            if (item->targets == 0) continue;
            if (loaded++ >= static_cast<u32>(ring.stages) &&
                !wait_stage(call, ring.slot_empty + 8 * slot, (round & 1) ^ 1))
                return false;
            const u32 full = ring.slot_loaded + 8 * slot;
            ptx::mbarrier_expect(full, ring.row_bytes);
            ptx::bulk_load(ring.slots + slot * ring.slot_bytes, item->source, ring.row_bytes, full);
            if (++slot == static_cast<u32>(ring.stages)) {
                slot = 0;
                ++round;
            }
        }
        ptx::mbarrier_arrive(ring.segment_empty + 8 * buffer);
    }
}

// Returns with all stores complete; false as `load_rows`.
__device__ inline bool store_rows(const Call& call, const Ring& ring) {
    bool fine = true;
    u32 stored = 0, slot = 0, round = 0, oldest = 0;
    for (u32 number = 0;; ++number) {
        const u32 buffer = number % kSegments;
        fine = fine && wait_stage(call, ring.segment_full + 8 * buffer, (number / kSegments) & 1);
        if (!fine) break;
        SegmentHead* segment = segment_of(ring, number);
        const int count = segment->count;
        if (count == 0) break;
        for (int i = 0; i < count; ++i) {
            ItemHead* item = item_of(ring, segment, i);
            const int targets = item->targets;
            if (targets == 0) continue;
            fine = wait_stage(call, ring.slot_full + 8 * slot, round & 1);
            if (!fine) break;
            for (int j = 0; j < targets; ++j)
                ptx::bulk_store(targets_of(item)[j], ring.slots + slot * ring.slot_bytes, ring.wire_bytes);
            ptx::bulk_commit();
            if (++slot == static_cast<u32>(ring.stages)) {
                slot = 0;
                ++round;
            }
            if (++stored > kLag) {
                ptx::bulk_wait_read<kLag>();
                ptx::mbarrier_arrive(ring.slot_empty + 8 * oldest);
                if (++oldest == static_cast<u32>(ring.stages)) oldest = 0;
            }
        }
        ptx::mbarrier_arrive(ring.segment_empty + 8 * buffer);
    }
    ptx::bulk_wait<0>();
    return fine;
}

// The lister's side, all lanes of its warp. `open` returns the next segment when it is free.
__device__ inline SegmentHead* open_segment(const Call& call, const Ring& ring, u32 number) {
    if (number >= kSegments)
        wait_stage(call, ring.segment_empty + 8 * (number % kSegments), ((number / kSegments) & 1) ^ 1);
    return segment_of(ring, number);
}

__device__ inline void close_segment(const Ring& ring, SegmentHead* segment, u32 number, int count) {
    if (ptx::lane_id() == 0) segment->count = count;
    ptx::mbarrier_arrive(ring.segment_full + 8 * (number % kSegments));
    __syncwarp();
}

// Every block of every peer tells its namesake here that all it had for this rank is stored. One thread,
// after its stores are complete.
__device__ inline void tell_arrived(const Call& call) {
    stall(call, 3);
    ptx::fence_async();
    ptx::fence_sys();
    for (int p = 0; p < call.group->ranks; ++p)
        if (p != call.me)
            ptx::store_relaxed_sys(&control_of(*call.group, p)->arrived[call.kind][call.me][call.block],
                                   call.epoch);
}

__device__ inline bool wait_arrived(const Call& call, Phase phase) {
    for (int p = 0; p < call.group->ranks; ++p)
        if (p != call.me &&
            !wait_flag(call, &call.own->arrived[call.kind][p][call.block], call.epoch, phase, p))
            return false;
    return true;
}

}  // namespace mover
