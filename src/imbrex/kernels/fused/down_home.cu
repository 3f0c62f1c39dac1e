// Down and the sums home in one launch, in place of a product and a combine: parts of the result's columns
// are computed one after the other, over all experts, and a part's rows are summed and sent beside the next
// one's products. The same bits.
//
//   multiplying warps   |== part 0 ==|== part 1 ==|== part 2 ==|== part 3 ==| sums
//   idle warps                        | sums of 0  | of 1       | of 2       | sums
//
// Parts, because a token of K choices is whole when the last of its experts is: half of them at 92 % of the
// product for K = 8, if experts come one after the other. Of a part all tokens are whole when it is written.
// A is read again for each.
//
// - A group tells of a tile when its panels are in memory: one tile later, where it has waited for them
//   anyway, or at the end (`Publish`). Counters are of parts; nobody looks at tiles.
// - The product waits for no peer and no sum. Who sums, and in which order: fused/summers.cuh.
// - A wait that fails ends its warp's sums, never the product: everybody reaches `end_call`.
#ifndef BESIDE
#define BESIDE 72
#endif
#include "fused/summers.cuh"
#include "gemm/cut.cuh"
#include "gemm/run.cuh"

namespace fused {

using namespace gemm;

constexpr int kMostLocal = 8;  // ranks of a launch
constexpr int kMostParts = 8;

// The product, of every rank of the launch, and how its result is cut.
struct Down {
    const int* ends[kMostLocal];       // where every expert's rows end
    u32* counter[kMostLocal];          // two zeros
    u32* written[kMostLocal];          // a zero for every part
    const float* weights[kMostLocal];  // of rows (Epilogue::kWeighted)
    u32* status;                       // as in gemm::Problem
    int experts;
    int columns;  // of the result
    int k;
    int slices;                // of parts that are computed together
    int slice_end[kMostParts]; // in parts
    int beside;                // whether idle warps sum
};

// Of each rank of the launch: A, B, the result.
struct DownMaps {
    TensorMap of[LOCAL_RANKS][3];
};

// Blocks of one rank.
struct Blocks {
    static constexpr bool kEvery = true;
    int block, blocks;
    __device__ __forceinline__ int first(u32*, bool) const {
        return block / C::kCluster - static_cast<int>(all());
    }
    template <class Walk>
    __device__ __forceinline__ int next(u32* counter, const Walk&) const {
        return atomicAdd(counter, 1);
    }
    __device__ __forceinline__ u32 reserved() const { return all(); }
    __device__ __forceinline__ u32 all() const { return blocks / C::kCluster; }
};

template <class Order>
__device__ __forceinline__ int number_behind(const Order& order) {
    if constexpr (C::kCluster > 1) return order.first_pair + order.pairs;
    return order.first + order.tiles;
}

// The tiles of a slice of the columns, of all experts, then of the next slice.
struct Slices {
    static constexpr int product = 0;
    C::Walk order;
    const Down& down;
    int part_columns, slice = 0, begin = 0;

    __device__ __forceinline__ int end_of(int index) const {
        return least(down.slice_end[index] * part_columns, down.columns);
    }
    __device__ __forceinline__ bool next() {
        if (slice + 1 >= down.slices) return false;
        const int behind = number_behind(order), height = order.height;
        begin = end_of(slice++);
        order = C::Walk{order.ends, nullptr, order.count, 0, end_of(slice) - begin};
        order.height = height;
        order.count_from(behind);
        return true;
    }
    template <class One>
    __device__ __forceinline__ bool seek(int number, One& tile) {
        do {
            if (!order.seek(number, tile)) continue;
            tile.column += begin;
            return true;
        } while (next());
        return false;
    }
    template <class Two>
    __device__ __forceinline__ bool seek(int number, Two& tile, bool& together) {
        do {
            if (!order.seek(number, tile, together)) continue;
            tile[0].column += begin, tile[1].column += begin;
            return true;
        } while (next());
        return false;
    }
};

// Stores tiles, and counts a part's rows that are in memory.
struct Publish : StoreTiles {
    u32* written;
    int part_columns;
    mutable int part = 0, rows_sent = 0;  // of the tile before

    __device__ __forceinline__ Publish(const TensorMap* map_d, u32* written, int part_columns)
        : StoreTiles{map_d, map_d}, written(written), part_columns(part_columns) {}

    // One thread of a group, behind `bulk_wait`.
    __device__ __forceinline__ void tell() const {
        if (rows_sent == 0) return;
        ptx::fence_async();
        ptx::fence_gpu();
        ptx::add_relaxed_gpu(written + part, rows_sent);
    }
    __device__ __forceinline__ void sent(const Slot& tile, int, int rows, int thread) const {
        if (thread != 0) return;
        ptx::bulk_wait<C::kOutputs>();  // a commit for every 64 columns of this tile
        tell();
        part = tile.column / part_columns, rows_sent = rows;
    }
    __device__ __forceinline__ void ended(int thread) const {
        if (thread == 0) tell();
    }
};

using Few = Hands<5, 1>;  // what 72 registers hold
using Many = Hands<8, 2>;

extern "C" __global__ void __launch_bounds__(C::kThreads, 1)
    down_and_sums(const __grid_constant__ Group group, const __grid_constant__ Reduce reduce,
                  const __grid_constant__ Down down, const __grid_constant__ DownMaps maps) {
    u8* memory = ptx::shared_memory();
    __shared__ Slot slots[kSlots];
    __shared__ u64 barriers[2 * C::kStages + 2 * kSlots + 2];
    __shared__ Room room;
    const Shared<C> shared = lay_out<C>(memory, slots, barriers, nullptr);
    const int rank = LOCAL_RANKS > 1 ? static_cast<int>(blockIdx.x) / group.blocks : 0;
    const TensorMap* map = maps.of[rank];
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x == 0) {
        make_barriers(shared);
        for (int i = 0; i < 3; ++i) ptx::prefetch_map(map + i);
    }
    ptx::wait_for_launches();
    if (threadIdx.x == 0) {
        room.call = begin_call(group, kCombine);
        room.bag = bag_of(room.call, reduce);
    }
    meet<C>();
    const Call& call = room.call;
    const Scales scales{};
    const Slopes slopes{};
    const Problem problem{map, map + 1, down.ends[rank], nullptr, down.experts, 0, down.columns, down.k,
                          down.weights[rank], down.counter[rank], down.status, scales, slopes, nullptr};
    const Written written{down.written[rank], down.ends[rank], down.experts, down.columns, C::kBlockN};
    const Summers summers{call, reduce, written, room.bag, room.job[warp]};
    if (warp >= 4 * C::kGroups) {
        ptx::fewer_registers<C::kProducerRegisters>();
        if (warp == 4 * C::kGroups) {
            const Blocks team{call.block, call.blocks};
            const int part_columns = 8 * columns_of_part(reduce);
            const C::Walk whole{problem.ends, nullptr, down.experts, 0, down.columns};
            Slices order{with_height<C>(whole), down, part_columns};
            order.order.columns = order.end_of(0);
            order.order.count_from(-static_cast<int>(team.reserved()));
            Always ready;
            if (ptx::lane_id() == 0) {
                if constexpr (C::kCluster > 1)
                    produce_pairs<C>(problem, shared, order, team, ready);
                else
                    produce<C>(problem, shared, order, team, ready);
            }
            __syncwarp();
        } else {
            if (call.block == 0 && warp == 4 * C::kGroups + 1)
                tell_started(call, static_cast<int>(ptx::lane_id()));
            if (down.beside && !summers.run<Few>()) spoil(call, reduce);
        }
    } else {
        ptx::more_registers<C::kConsumerRegisters>();
        const Publish sink(map + 2, down.written[rank], 8 * columns_of_part(reduce));
        if constexpr (C::kHalved)
            consume_halves<C>(problem, shared, sink, Always::kPatience);
        else
            consume<C>(problem, shared, sink, Always::kPatience);
        if (!summers.run<Many>()) spoil(call, reduce);
    }
    if constexpr (C::kCluster > 1) meet<C>();  // arrivals and panels of the other block have come
    end_call(call);
}

}  // namespace fused
