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
// multiplies, a warp asks for loads, another one's first lane says that the block has dispatched and looks
// whether rows are placed, and the other groups wait at the end. The first tiles are those of blocks that
// neither dispatch nor push; everybody else draws the first one, too, and all draw a next one when the one
// before has been asked for: so no tile waits for a block that is still busy.
//
// The rings of 100 blocks are 13 MB, 4 us of reading, behind which the stores and flags of blocks that still
// place rows would wait. So until rows are seen a block asks for two steps of its first tile at once, and
// then for one at a time. Ends are told early, too: whoever waits for no dispatch any more takes its ticket
// while its last tile is under way.
//
// Invariants:
//   Dispatch waits for peers' dispatch and never for a product, and each of its blocks counts itself as
//     placed, whether or not its peers came: products end, in bounded time.
//   Products wait for blocks of this launch, all of which are resident, one a multiprocessor: for what is
//     told, for rows, and as ffn/both.cuh says.
//   Who waits for rows acquires their count, and then fences for the copy engine. A thread of its own waits,
//     as a fence behind loads under way waits for those.
//   Weights of rows are read as memory that this kernel writes (gemm/store.cuh).
//   Shared memory of routing is that of the ring: all threads fence before the first load.
//   Both words are zeros when a call begins: the last block of a call that leaves sets them back.
//   If a peer did not come, the last block makes NaN of the result, which nobody may then still store to: a
//     ticket is taken before a block's last store only where every block that places rows has said that they
//     are whole.
//   The next launch may begin when the choices of all ranks have come, as behind exchange/small.cu.
#define IN_ONE_LAUNCH 1
#include "exchange/small.cuh"
#include "ffn/both.cuh"
#include "ptx/look.cuh"

#ifndef LOCAL_RANKS
#define LOCAL_RANKS 1
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
constexpr int kIdleRegisters = 32;  // of 128 with which 512 threads begin
// Of a block's first tile, until rows are placed: steps whose weights it asks for at once; nanoseconds from
// one further step to the next; and steps, behind those that its ring has room for, that go into L2.
constexpr int kStepsAtOnce = 2;
constexpr u64 kPace = 600;
constexpr int kStepsIntoL2 = 8;
static_assert(kStepsAtOnce < Up::kStages, "what comes behind them has room");

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
    int end;
};
enum End { kEndRows, kEndNothing, kEndWords };  // `end_rows`, nothing, or words are set back

constexpr u32 kNotWhole = 4;  // added to what is told by a block whose part is not whole

// Who takes tiles: the blocks of a rank. `busy`: that dispatch or push, the first ones.
struct Team {
    const Call& call;
    u32* counter;
    int busy;

    __device__ __forceinline__ static constexpr int early() { return kStepsAtOnce; }
    __device__ __forceinline__ static constexpr bool late_draws() { return true; }
    __device__ __forceinline__ u32 all() const { return static_cast<u32>(call.group->blocks); }
    __device__ __forceinline__ u32 reserved() const { return all() - busy; }
    __device__ __forceinline__ int first() const {
        return call.block < busy ? static_cast<int>(atomicAdd(counter, 1u) + reserved()) : call.block - busy;
    }
};

// This block has dispatched. One thread.
__device__ __forceinline__ void tell_dispatched(const Call& call, bool whole) {
    if (call.block >= call.blocks) return;
    ptx::fence_gpu();
    if (!whole) {
        ptx::add_relaxed_gpu(exchange::told_of(call), kNotWhole);
        ptx::fence_gpu();
    }
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

// This block's part of the dispatch, of which it has not told yet. All threads, which then may load into
// shared memory.
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
    ptx::fence_async_shared();
    const bool whole = __syncthreads_and(fine) != 0;
    if (threadIdx.x != 0) return;
    ptx::stamp(ptx::kDispatched);
    room.call = call;
    room.whole = whole;
    room.end = kEndRows;
}

// This block has seen rows placed and all of its tiles asked for, and waits for no dispatch any more: where
// rows are whole, its ticket is taken here, and not behind its last store (1.1 us). One thread.
__device__ __forceinline__ void end_early(const Call& call, Room& room) {
    if (ptx::load_acquire_gpu(exchange::told_of(call)) >= kNotWhole) return;
    const u32 left = ptx::add_acq_rel_gpu(&call.own->tickets[call.kind], 1);
    room.end = kEndNothing;
    if (left % exchange::kBroken + 1 != static_cast<u32>(call.group->blocks)) return;
    room.end = kEndWords;  // sums may still ask for them
    call.own->tickets[call.kind] = 0;
    call.own->epoch[call.kind] = call.epoch;
}

// Columns of a step that is not there yet, into L2.
__device__ __forceinline__ void ask_into_l2(const BothMaps& maps, const ffn::Work& work, int step) {
    const TensorMap* map = maps.of[work.down] + 1;
    const int expert = work.tile.expert, column = work.tile.column, at = step * Up::kBlockK;
    ptx::tma_prefetch_3d(map, at, column, work.down ? expert : 2 * expert);
    if (!work.down) ptx::tma_prefetch_3d(map, at, column, 2 * expert + 1);
}

// Until rows are placed (`begun`): further columns of a block's first tile, a step every kPace, into its ring
// up to step `room`, then into L2 up to step `end`. Returns the steps that its ring was asked for.
__device__ __forceinline__ int ask_meanwhile(const BothMaps& maps, const Shared<Up>& shared,
                                             const ffn::Work& work, gemm::Ring<Up>& ring, int ahead, int room,
                                             int end, u32 begun) {
    int step = ahead;
    u64 due = ptx::global_timer() + kPace;
#pragma unroll 1
    while (step < end && !ptx::mbarrier_done(begun, 0)) {
        if (ptx::global_timer() < due) continue;
        due += kPace;
        if (step < room) {
            ffn::load_work<true, false>(maps, shared, ring.stage, work, step * Up::kBlockK);
            ring.next();
        } else {
            ask_into_l2(maps, work, step);
        }
        ++step;
    }
    while (!ptx::mbarrier_try(begun, 0)) {}
    return gemm::least(step, room);
}

// The warp that asks for loads.
__device__ __forceinline__ void produce_few(const Call& call, const Both& both, const BothMaps& maps,
                                            const Shared<Up>& shared, const Few& few, const Small& small,
                                            u8* memory, u32 begun, Room& room) {
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
    produce_both(
        both, maps, shared, units, team, [&](const ffn::Work& work, gemm::Ring<Up>& ring, int ahead) {
            const int k = work.down ? both.inner : both.width, steps = (k + Up::kBlockK - 1) / Up::kBlockK,
                      room = gemm::least(steps, Up::kStages), end = gemm::least(steps, room + kStepsIntoL2);
            ahead = ask_meanwhile(maps, shared, work, ring, ahead, room, end, begun);
            ptx::launch_dependents();
            // A tile of down may wait for long.
#pragma unroll 1
            for (; work.down && ahead < room; ++ahead, ring.next())
                ffn::load_work<true, false>(maps, shared, ring.stage, work, ahead * Up::kBlockK);
            return ahead;
        });
    while (!ptx::mbarrier_try(begun, 0)) {}  // a block without a tile
    end_early(call, room);
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
            produce_few(call, both_of(call, small, few), maps, shared, few, small, memory + behind, begun,
                        room);
        } else if (warp == 5 && ptx::lane_id() == 0) {
            tell_dispatched(call, room.whole != 0);
            const u32 due = exchange::counted_of(call.blocks);
            wait_word(call, exchange::placed_of(call), few.both.status,
                      [=](u32 placed) { return placed >= due; });
            ptx::stamp(ptx::kSeen);
            ptx::fence_async();
            ptx::stamp(ptx::kFenced);
            ptx::mbarrier_arrive(begun);
        }
    } else {
        ptx::fewer_registers<kIdleRegisters>();
    }
    ptx::launch_dependents();  // a block without a tile
    __syncthreads();
    if (room.end == kEndRows)
        end_rows(call, room.whole != 0, few.result + rank * few.stride, few.result_bytes);
    else if (room.end == kEndWords && threadIdx.x == 0)
        call.own->drawn[call.kind][0] = call.own->drawn[call.kind][1] = 0;
    if (threadIdx.x == 0) ptx::stamp_end();
}

}  // namespace fused
