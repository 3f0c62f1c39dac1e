// Dispatch of a small batch and both products of its experts in one launch, for decoding: in place of
// exchange/small.cu and ffn/both.cu. The same bits.
//
// Loads by tensor maps bring nothing before the launch before has ended. So weights that the products ask for
// as soon as they are told which experts have rows, 7.6 us after a dispatch begins, left only when its last
// block had (docs/LOG.md: 11.9 us). Here is no launch to wait for:
//
//   blocks that dispatch   | route, place rows | count     | take tiles ..
//   blocks that push       | tokens to peers   | take tiles ..
//   all others             | told who has rows | weights of the first tile | rows placed? | rows, tiles ..
//
// A block has as many threads as routing wants (ROUTE_THREADS). When it has dispatched, one warp group
// multiplies, a warp asks for loads, another one's first lane looks whether rows are placed, and the other
// groups wait at the end. The first tiles are those of blocks that neither dispatch nor push; everybody else
// draws the first one, too, so that no tile waits for a block that is still busy.
//
// Invariants:
//   Dispatch waits for peers' dispatch and never for a product, and each of its blocks counts itself as
//     placed, whether or not its peers came: products end, in bounded time.
//   Products wait for blocks of this launch, all of which are resident, one a multiprocessor: for what is
//     told, for rows, and as ffn/both.cuh says.
//   Who waits for rows acquires their count and fences for the copy engine; who counts has fenced for it,
//     with all threads of its block. A thread of its own waits, as a fence behind loads under way waits for
//     those.
//   Weights of rows are read as memory that this kernel writes (gemm/store.cuh).
//   Shared memory of routing is that of the ring: all threads fence before the first load.
//   Both words are zeros when a call begins: the last block of a call that leaves sets them back.
//   If a peer did not come, the last block makes NaN of the result.
//   The next launch may begin when the choices of all ranks have come, as behind exchange/small.cu.
#define IN_ONE_LAUNCH 1
#include "exchange/small.cuh"
#include "ffn/both.cuh"

#ifndef LOCAL_RANKS
#define LOCAL_RANKS 1
#endif
#ifndef INTO_L2
#define INTO_L2 0
#endif
#ifndef FENCES_AGAIN
#define FENCES_AGAIN 1  // whether who waits for rows fences, besides those that place them
#endif

namespace fused {

using exchange::Call;
using exchange::Group;
using exchange::Small;
using ffn::Both;
using ffn::BothMaps;
using ffn::Up;
using gemm::C;
using gemm::kSlots;
using gemm::Shared;
using gemm::Slot;

constexpr int kBlockThreads = route::kRouteThreads;
static_assert(kBlockThreads >= C::kThreads && kBlockThreads % 128 == 0, "warp groups");
static_assert(!C::kQuantises, "bf16");
constexpr int kIdleRegisters = 32;  // of 64 with which 1024 threads begin

// By value. The host reads it: `kernels.structs`.
struct Few {
    Both both;         // but what is of a rank of the launch
    u8* result;        // [ranks of the launch, rows, D]
    i64 stride;        // bytes from one rank's to the next
    i64 result_bytes;  // of one rank
    int movers;        // blocks that dispatch; those that push come behind
};

struct FewMaps {
    BothMaps of[LOCAL_RANKS];
};

struct Room {
    Call call;
    u64 begun;  // barrier: rows are placed
    int whole;  // whether this block's part of the dispatch is
};

// Who takes tiles: the blocks of a rank. `busy`: that dispatch or push, the first ones.
struct Team {
    const Call& call;
    u32* counter;
    int busy;

    __device__ __forceinline__ u32 all() const { return static_cast<u32>(call.group->blocks); }
    __device__ __forceinline__ u32 reserved() const { return all() - busy; }
    __device__ __forceinline__ int first() const {
        return call.block < busy ? static_cast<int>(atomicAdd(counter, 1u) + reserved()) : call.block - busy;
    }
};

// This block has dispatched. One thread.
__device__ __forceinline__ void tell_dispatched(const Call& call) {
    if (call.block >= call.blocks) return;
    ptx::fence_gpu();
    if (call.block < exchange::placing(call) || exchange::tells_groups(call))
        ptx::add_relaxed_gpu(exchange::placed_of(call), 1);
    if (exchange::tells_rows(call)) ptx::add_relaxed_gpu(exchange::told_of(call), exchange::kRowsTold);
}

// Until `done(word)`; false after longer than any dispatch takes, which is a bug. No function is called here:
// a thread has other registers than it began with.
template <class Done>
__device__ __forceinline__ bool wait_word(const Call& call, const u32* word, u32* status, Done done) {
    const u64 begin = ptx::global_timer(), longest = 2 * call.group->timeout_ns + ffn::kLongest;
#pragma unroll 1
    while (!done(ptx::load_acquire_gpu(word))) {
        if (ptx::global_timer() - begin > longest) {
            *status = 1;
            return false;
        }
        ptx::pause();
    }
    return true;
}

// The arguments of both products, of this rank.
__device__ __forceinline__ Both both_of(const Call& call, const Small& small, const Few& few) {
    Both both = few.both;
    both.hits = exchange::hits_of(call, small);
    both.weights = small.row_weights + static_cast<i64>(call.local) * small.rows;
    both.counter =
        reinterpret_cast<u32*>(small.plan) + static_cast<i64>(call.local) * (small.counters + small.slots);
    return both;
}

// This block's part of the dispatch. All threads, which then may load into shared memory.
__device__ __forceinline__ void dispatch_part(Call call, const Small& small, Room& room) {
    bool fine = true;
    if (call.block < call.blocks) {
        fine = route_and_place(call, small);
    } else {
        ptx::wait_for_launches();
        if (threadIdx.x == 0) ptx::stamp(ptx::kReleased);
        count_call(call);
        if (call.block < call.blocks + small.pushers)
            push_tokens(call, small,
                        small.route.tokens ? small.route.tokens[call.local] : small.route.num_tokens);
    }
    ptx::fence_async();
    const bool whole = __syncthreads_and(fine) != 0;
    if (threadIdx.x != 0) return;
    ptx::stamp(ptx::kDispatched);
    room.call = call;
    room.whole = whole;
    tell_dispatched(call);
}

// Columns of a block's first tile that its ring has no room for, while rows are placed: INTO_L2 steps.
__device__ __forceinline__ void ask_into_l2(const Both& both, const BothMaps& maps, const ffn::Work& work,
                                            int begin) {
    const int k = work.down ? both.inner : both.width, end = gemm::least(k, (begin + INTO_L2) * Up::kBlockK);
    const TensorMap* map = maps.of[work.down] + 1;
    const int expert = work.tile.expert, column = work.tile.column;
#pragma unroll 1
    for (int at = begin * Up::kBlockK; at < end; at += Up::kBlockK) {
        ptx::tma_prefetch_3d(map, at, column, work.down ? expert : 2 * expert);
        if (!work.down) ptx::tma_prefetch_3d(map, at, column, 2 * expert + 1);
    }
}

// The warp that asks for loads.
__device__ __forceinline__ void produce_few(const Call& call, const Both& both, const BothMaps& maps,
                                            const Shared<Up>& shared, const Few& few, const Small& small,
                                            u8* memory, u32 begun) {
    int* list = reinterpret_cast<int*>(memory);
    ffn::Units units{list, list + both.experts + 1, list + 2 * (both.experts + 1)};
    const bool told = wait_word(call, exchange::told_of(call), both.status,
                                [](u32 word) { return (word & exchange::kHitsTold) != 0; });
    if (!told) units.unit[0] = 0;
    __syncwarp();
    if (told)
        units.take(both.hits, static_cast<int>(both.hits[0]));
    else
        units.hits = 0;
    if (ptx::lane_id() != 0) return;
    ptx::stamp(ptx::kKnows);
    const Team team{call, both.counter, few.movers + small.pushers};
    produce_both(both, maps, shared, units, team, [&](const ffn::Work& work, int ahead) {
        if (INTO_L2 > 0) ask_into_l2(both, maps, work, ahead);
        while (!ptx::mbarrier_try(begun, 0)) {}
        ptx::launch_dependents();
    });
}

// Dynamic memory as of ffn/both.cu, and at least what routing wants.
extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
    dispatch_and_experts(const __grid_constant__ Group group, const __grid_constant__ Small small,
                         const __grid_constant__ Few few, const __grid_constant__ FewMaps all_maps) {
    if (threadIdx.x == 0) ptx::stamp_begin();
    u8* memory = ptx::shared_memory();
    __shared__ Slot slots[kSlots];
    __shared__ u64 barriers[2 * C::kStages + 2 * kSlots + 2];
    __shared__ Room room;
    const Shared<Up> shared = gemm::lay_out<Up>(memory, slots, barriers, nullptr);
    const u32 begun = ptx::smem_u32(&room.begun);
    const int rank = LOCAL_RANKS > 1 ? static_cast<int>(blockIdx.x) / group.blocks : 0;
    const BothMaps& maps = all_maps.of[rank];
    if (threadIdx.x == 0) {
        make_barriers(shared);
        ptx::mbarrier_init(begun, 1);
        ptx::fence_barrier_init();
        for (int i = 0; i < 6; ++i) ptx::prefetch_map(&maps.of[0][0] + i);
    }
    dispatch_part(name_call(group, exchange::kSmall, group.blocks - few.movers), small, room);
    __syncthreads();
    const Call& call = room.call;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < 4) {
        ptx::more_registers<Up::kConsumerRegisters>();
        while (!ptx::mbarrier_try(begun, 0)) {}
        consume_both(both_of(call, small, few), maps, shared);
    } else if (warp < 8) {
        ptx::fewer_registers<Up::kProducerRegisters>();
        if (warp == 4) {
            const u32 behind = shared.staging + Up::kPanels * gemm::kPanel - ptx::smem_u32(memory);
            produce_few(call, both_of(call, small, few), maps, shared, few, small, memory + behind, begun);
        } else if (warp == 5 && ptx::lane_id() == 0) {
            const u32 due = exchange::counted_of(call.blocks);
            wait_word(call, exchange::placed_of(call), few.both.status,
                      [=](u32 placed) { return placed >= due; });
            ptx::stamp(ptx::kSeen);
            if (FENCES_AGAIN) ptx::fence_async();
            ptx::stamp(ptx::kFenced);
            ptx::mbarrier_arrive(begun);
        }
    } else {
        ptx::fewer_registers<kIdleRegisters>();
    }
    ptx::launch_dependents();  // a block without a tile
    end_rows(call, room.whole != 0, few.result + rank * few.stride, few.result_bytes);
    if (threadIdx.x == 0) ptx::stamp_end();
}

}  // namespace fused
