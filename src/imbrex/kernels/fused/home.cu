// dx home beside both gradients of the weights, in one launch: sums of rows (exchange/reduce.cuh) by the
// warps that multiply, before their first tile and behind their last one. The bits are those of `reduce_rows`
// and of two launches of `grouped_gemm`.
//
// phase  blocks       multiplying warps
// 1      the first n  pieces of the others' tokens, until they are gone; then own pieces whose sums are all
//                     there. Only credit is waited for: the first own piece that lacks a sum is put aside
// 2      all          tiles of the first product, then of the second, from one counter (`TwoLists`)
// 3      all          what is left of the others' pieces, the piece put aside, own pieces, waiting for sums
//
// n changes no bit: 0 sums behind the tiles, all blocks before them.
//
// - Where the launch right before is the product that makes dx, and has waited for all that came earlier,
//   tiles begin in its last wave (`early`): they read nothing of it, and who sums waits for it to end. They
//   have a counter of their own, since its is still in use.
// - Phase 2 waits for no peer, and nobody's progress needs phase 1. In phase 3 the others' pieces are drawn
//   before anybody waits for a sum: ranks cannot wait in a circle.
// - Slots and lists of the sums lie where stages and staging do. From phase 1 to 2 everybody who summed
//   orders its accesses before the copy engine's (`fence_async_shared`), then meets the producer's warp
//   (kLoadBarrier); from 2 to 3 the groups' own stores have been read (`consume` waits), then the groups meet
//   (kSumBarrier), since each uses memory of the other's.
// - A wait that fails ends its warp's sums, never the product: everybody reaches `end_call`.
//
// Example, 2 ranks, n = 1: block 0 of rank 0 sums rank 1's tokens into rank 1's heap and tells; the sums of
// its own tokens are not there yet, so it multiplies. Behind the last tile all blocks add them.
#include "exchange/reduce.cuh"
#include "gemm/cut.cuh"
#include "gemm/run.cuh"

namespace fused {

using namespace exchange;
using namespace gemm;

// Sums that cross as fp8 are encoded by steps of four columns.
using Sums = sums::Form<4 * C::kGroups, 6, WIRE_FP8 ? sums::kColumns : 8, 4>;
static_assert(C::kWgrad && C::kCluster == 1, "gradients of weights, by single blocks");
constexpr int kMostScales = 544;  // bytes of the scales of the widest row: MOST_FP8 of launches.py
constexpr u32 kScales = WIRE_FP8 ? 4 * C::kGroups * kMostScales : 0;
static_assert(kReduceBytes<Sums> + kScales <=
                  C::kStages * (C::kBytesA + C::kBytesB) + C::kGroups * C::kPanels * kPanel,
              "sums have the memory of stages and staging");

constexpr int kSumBarrier = 5, kLoadBarrier = 6;  // 1 and 2: gemm/store.cuh
constexpr int kSummers = 128 * C::kGroups;        // threads
constexpr int kMostLocal = 8;                     // ranks of a launch

// Two products of the same rows, and how sums and tiles share the blocks.
struct Home {
    const int* ends[kMostLocal];  // of each rank of the launch: where every expert's rows end
    u32* counter[kMostLocal];     // two zeros each
    u32* status;                  // as in gemm::Problem
    int experts;
    int rows[2];  // of the results
    int columns[2];
    int first_blocks;  // n
    int early;         // whether tiles begin before the launch right before has ended
};

// Of each rank of the launch: A of both products, B of both, the results.
struct Maps {
    TensorMap of[LOCAL_RANKS][6];
};

// The tiles of two products: the lowest numbers are those of the first. Numbers never fall, so neither does
// `product`.
struct TwoLists {
    C::Order order;
    int then_rows, then_columns;  // of the second product's result
    int product = 0;
    __device__ __forceinline__ bool seek(int number, Tile& tile) {
        if (order.seek(number, tile)) return true;
        if (product > 0) return false;
        const int behind = order.first + order.tiles;
        product = 1;
        order = C::Order{order.ends, nullptr, order.count, then_rows, then_columns};
        order.count_from(behind);
        return order.seek(number, tile);
    }
};

// Blocks of one rank, the first `summing` of which come later, and draw their first tile, too.
struct Late {
    int block, blocks, summing;
    __device__ __forceinline__ int first(u32* counter, bool) const {
        return block < summing ? static_cast<int>(atomicAdd(counter, 1u)) : block - blocks;
    }
    template <class Walk>
    __device__ __forceinline__ int next(u32* counter, const Walk&) const {
        return atomicAdd(counter, 1);
    }
    __device__ __forceinline__ u32 reserved() const { return blocks - summing; }
    __device__ __forceinline__ u32 all() const { return blocks; }
};

struct StoreEither : StoreTiles {
    __device__ __forceinline__ void matrix(u32 panel, int column, int row, const Slot& tile) const {
        ptx::tma_store_3d(map_d + tile.together, panel, column, row, tile.expert);
    }
    __device__ __forceinline__ void add(u32 panel, int column, int row, const Slot& tile) const {
        ptx::tma_add_3d(map_d + tile.together, panel, column, row, tile.expert);
    }
};

// The sums of a warp, in two parts. All lanes; false: the call has failed.
struct Summer {
    const Call& call;
    const Reduce& reduce;
    Own own;
    const int* tokens;
    u32 others, home;  // pieces
    u32 aside = ~0u;   // an own piece that was drawn and could not be added yet

    __device__ __forceinline__ Summer(const Call& call, const Reduce& reduce, u8* memory)
        : call(call),
          reduce(reduce),
          own(own_of<Sums>(reduce, threadIdx.x / 32, memory)),
          tokens(reduce.tokens + call.local * call.group->ranks) {
        const int ranks = call.group->ranks;
        int most = 0;
        for (int p = 0; p < ranks; ++p)
            if (p != call.me) most = max(most, tokens[p]);
        others = static_cast<u32>(groups_of(reduce, most) * reduce.parts) * static_cast<u32>(ranks - 1);
        home = static_cast<u32>(groups_of(reduce, tokens[call.me]) * reduce.parts);
    }

    // Phase 1.
    __device__ __forceinline__ bool begin() {
        if (!reduce_others()) return false;
        aside = add_pieces<Sums>(call, reduce, own, tokens, home, draw_again(call, reduce, 1),
                                 [&](const Piece& piece) { return is_reduced(piece); });
        return true;
    }

    // Phase 3.
    __device__ __forceinline__ bool end() {
        if (!reduce_others()) return false;
        return add_pieces<Sums>(call, reduce, own, tokens, home,
                                aside < home ? aside : draw_again(call, reduce, 1),
                                [&](const Piece& piece) { return wait_reduced(call, piece.flag); }) >= home;
    }

   private:
    __device__ __forceinline__ bool reduce_others() {
        if (!wait_credit(call, static_cast<int>(ptx::lane_id()), 2)) return false;
        reduce_pieces<Sums>(call, reduce, own, tokens, others, draw_again(call, reduce, 0));
        return true;
    }

    // Whether all ranks have summed their rows of an own piece.
    __device__ __forceinline__ bool is_reduced(const Piece& piece) const {
        const int p = static_cast<int>(ptx::lane_id());
        bool there = true;
        if (p < call.group->ranks && p != call.me)
            there = reached(ptx::load_acquire_sys(flag_of(*call.group, call.group->reduced_flags, call.me, p,
                                                          piece.flag)),
                            call.epoch);
        return __all_sync(0xffffffffu, there);
    }
};

extern "C" __global__ void __launch_bounds__(C::kThreads, 1)
    home_beside_gradients(const __grid_constant__ Group group, const __grid_constant__ Reduce reduce,
                          const __grid_constant__ Home home, const __grid_constant__ Maps maps) {
    u8* memory = ptx::shared_memory();
    __shared__ Slot slots[kSlots];
    __shared__ u64 barriers[2 * C::kStages + 2 * kSlots + 2];
    const Shared<C> shared = lay_out<C>(memory, slots, barriers, nullptr);
    Call call = name_call(group, kCombine);
    const TensorMap* map = maps.of[LOCAL_RANKS > 1 ? call.local : 0];
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const bool sums_first = call.block < home.first_blocks;
    if (threadIdx.x == 0) {
        make_barriers(shared);
        for (int i = 0; i < 6; ++i) ptx::prefetch_map(map + i);
    }
    if (!home.early) ptx::wait_for_launches();
    count_call(call);
    meet<C>();
    if (warp >= 4 * C::kGroups) {
        ptx::fewer_registers<C::kProducerRegisters>();
        if (call.block == 0 && warp == 4 * C::kGroups + 1)
            tell_started(call, static_cast<int>(ptx::lane_id()));
        if (warp == 4 * C::kGroups) {
            if (sums_first) ptx::named_barrier(kLoadBarrier, kSummers + 32);
            const Late team{call.block, call.blocks, home.first_blocks};
            TwoLists order{{home.ends[call.local], nullptr, home.experts, home.rows[0], home.columns[0]},
                           home.rows[1],
                           home.columns[1]};
            order.order.count_from(-static_cast<int>(team.reserved()));
            const Scales scales{};
            const Slopes slopes{};
            const Problem problem{map, map + 2, home.ends[call.local], nullptr, home.experts, home.rows[0],
                                  home.columns[0], 0, nullptr, home.counter[call.local], home.status, scales,
                                  slopes, nullptr};
            Always ready;
            if (ptx::lane_id() == 0) produce<C>(problem, shared, order, team, ready);
            __syncwarp();
        }
    } else {
        ptx::more_registers<C::kConsumerRegisters>();
        Summer summer(call, reduce, memory + (shared.a - ptx::smem_u32(memory)));
        bool fine = !failed(call);
        fine = __all_sync(0xffffffffu, fine);
        if (sums_first) {
            ptx::wait_for_launches();
            fine = fine && summer.begin();
            ptx::fence_async_shared();
            ptx::named_barrier(kLoadBarrier, kSummers + 32);
        }
        const Scales scales{};
        const Slopes slopes{};
        const Problem problem{map, map + 2, nullptr, nullptr, 0, 0, 0, 0, nullptr, nullptr, home.status,
                              scales, slopes, nullptr};
        const StoreEither sink{{map + 4, map + 4}};
        if constexpr (C::kHalved)
            consume_halves<C>(problem, shared, sink, Always::kPatience);
        else
            consume<C>(problem, shared, sink, Always::kPatience);
        ptx::named_barrier(kSumBarrier, kSummers);
        ptx::wait_for_launches();
        fine = fine && summer.end();
        if (!fine) spoil(call, reduce);
    }
    end_call(call);
}

}  // namespace fused
