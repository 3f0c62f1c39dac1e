// Down with others' rows first, and the sums home in the same launch, in place of a product and a combine of
// narrow experts. The same bits.
//
//   the first n blocks  |== tiles with others' rows ==|= one more =| others' sums, sent  | own tokens' sums
//   all other blocks    |== tiles with others' rows ==|== tiles of own rows alone =======| own tokens' sums
//
// Rows of an expert lie in the order of their tokens' ranks, so all but one piece of them are of other ranks'
// tokens. Tiles with any of those are multiplied first, over all experts: then others' tokens are whole, all
// at once, and cross while the own ones are multiplied. Weights are read twice, which is why experts are
// narrow. With n = 0 own tiles of the last experts alone wait, one for every block: who ends first sends sums
// while others have a tile.
//
// - It begins in the last wave of gate and up (gemm/parts.cuh), and asks where own rows are when somebody has
//   found them. Sums, and what they write, wait for the launch before.
// - A group tells of a tile when its panels are in memory: one tile later, or at the end. Two counters, one a
//   list of tiles (`Rounds`); nobody looks at tiles.
// - The first n blocks draw no further tile once they have one of the second list. While they multiply that
//   one the others end the first list, and what a block has drawn it multiplies: no number is lost. At least
//   one block goes on (the host sees to it).
// - Sums are those of exchange/reduce.cuh, by the multiplying warps behind their last tile, in the memory of
//   stages and staging: pieces, partials, flags, credit and order are `reduce_rows`'s, and so are the bits.
//   Of the other blocks some warps take what the first n have left, the rest begin with own tokens: adding
//   those reads memory while sums of others are on the wire. n = 0 sums behind the product.
// - The product waits for no peer and no sum. Others' pieces wait for this rank's first list and for credit,
//   own pieces for all rows here and for the peers' others' pieces, which every rank draws before: no circle.
// - Before sums the groups and who loads meet (kSumBarrier): all loads have come, since they were multiplied,
//   and all stores of the groups have been read.
// - A wait that fails ends its warp's sums, never the product: everybody reaches `end_call`.
//
// Example, 2 ranks, rank 0, an expert of 300 rows of which the first 140 are own, tiles of 128: tile 0 is of
// own rows alone; tiles 1 and 2 come first.
#include "exchange/reduce.cuh"
#include "gemm/cut.cuh"
#include "gemm/parts.cuh"
#include "gemm/run.cuh"

namespace fused {

using namespace exchange;
using namespace gemm;

using Sums = sums::Form<4 * C::kGroups, 6, 8, 4>;
static_assert(C::kForward && C::kCluster == 1 && C::kGroups == 2, "single blocks of two groups");
static_assert(kReduceBytes<Sums> <=
                  C::kStages * (C::kBytesA + C::kBytesB) + C::kGroups * C::kPanels * kPanel,
              "sums have the memory of stages and staging");

constexpr int kSumBarrier = 5;             // 1 and 2: gemm/store.cuh
constexpr int kSummers = 128 * C::kGroups; // threads
constexpr int kMostLocal = 8;              // ranks of a launch
constexpr int kNoTile = 0x7fffffff;        // a number that no tile has

// The product, of every rank of the launch.
struct OthersFirst {
    const int* ends[kMostLocal];       // where every expert's rows end
    const int* own[kMostLocal];        // [experts, 2]: the first of its own rows, and the one behind the last
    u32* counter[kMostLocal];          // two zeros
    u32* written[kMostLocal];          // a zero for either list
    const float* weights[kMostLocal];  // of rows
    const u32* progress[kMostLocal];   // rows of parts of the experts that are made
    const u32* bounds[kMostLocal];     // ends of own rows that are known, of two an expert
    u32* status;                       // as in gemm::Problem
    int experts;
    int columns;  // of the result
    int k;
    int first_blocks;  // n
    int last;          // experts whose own tiles come last
    int tiles;         // of columns, of the product that makes the rows
};

// Of each rank of the launch: A twice and B twice, for either list, and the result.
struct Maps {
    TensorMap of[LOCAL_RANKS][5];
};

// Row tiles `low` .. `high` - 1 of an expert with rows `begin` .. `end` - 1 have own rows alone.
struct OwnTiles {
    int low, high;
};

__device__ __forceinline__ OwnTiles own_tiles(int begin, int end, int first, int behind, int height) {
    const int low = (first - begin + height - 1) / height,
              high = (behind < end ? behind - begin : end - begin + height - 1) / height;
    return {low, max(low, high)};
}

// The tiles with others' rows of all experts, then those of own rows alone, from the last expert back, whose
// weights may still be in L2; of either list as `Schedule` has them. Own tiles of the first `from` experts do
// not wait. Numbers never fall, so neither does `product`, the number of the list.
struct Rounds {
    const int* ends;
    const int* own;
    int experts, from, columns, height;
    int entered = -1, expert = 0, product = 0, first = 0, tiles = 0;
    int row_begin = 0, row_end = 0, row_tiles = 0;
    OwnTiles alone = {0, 0};

    __device__ __forceinline__ int column_tiles() const { return (columns + C::kColumns - 1) / C::kColumns; }

    __device__ __forceinline__ OwnTiles own_tiles_of(int of, int begin, int end) const {
        return of < from ? OwnTiles{0, 0} : own_tiles(begin, end, own[2 * of], own[2 * of + 1], height);
    }
    __device__ __forceinline__ bool enter() {
        if (++entered == (product > 0 ? experts - from : experts)) {
            if (product > 0 || from == experts) return --entered, false;
            product = 1, entered = 0;
        }
        expert = product > 0 ? experts - 1 - entered : entered;
        row_begin = expert > 0 ? ends[expert - 1] : 0, row_end = ends[expert];
        alone = own_tiles_of(expert, row_begin, row_end);
        const int all = (row_end - row_begin + height - 1) / height, mine = alone.high - alone.low;
        row_tiles = product > 0 ? mine : all - mine;
        first += tiles;
        tiles = row_tiles * column_tiles();
        return true;
    }
    __device__ __forceinline__ bool seek(int number, Tile& tile) {
        if (number == kNoTile) return false;
        while (number >= first + tiles)
            if (!enter()) return false;
        const int local = number - first, wide = C::kGroupM * column_tiles(), group = local / wide;
        const int inside = local - group * wide, side = least(row_tiles - group * C::kGroupM, C::kGroupM);
        int row = group * C::kGroupM + inside % side;
        if (product > 0)
            row += alone.low;
        else if (row >= alone.low)
            row += alone.high - alone.low;
        tile.expert = expert;
        tile.row = row_begin + row * height;
        tile.rows = row_end - tile.row;
        if (height < C::kBlockM) tile.rows = least(tile.rows, height);
        tile.column = inside / side * C::kBlockN;
        tile.columns = columns - tile.column;
        return true;
    }
};

// Blocks of one rank. `stops`: this one draws no tile once it has one of the second list.
struct Stopping {
    int block, blocks;
    bool stops;
    __device__ __forceinline__ int first(u32*, bool) const { return block - blocks; }
    __device__ __forceinline__ int next(u32* counter, const Rounds& order) const {
        return stops && order.product > 0 ? kNoTile : static_cast<int>(atomicAdd(counter, 1u));
    }
    __device__ __forceinline__ u32 reserved() const { return blocks; }
    __device__ __forceinline__ u32 all() const { return blocks; }
};

// Stores tiles, and counts a list's rows that are in memory, once for every tile of columns.
struct Publish : StoreTiles {
    u32* written;
    mutable int list = 0, rows_sent = 0;  // of tiles that were not told of

    __device__ __forceinline__ Publish(const TensorMap* map_d, u32* written)
        : StoreTiles{map_d, map_d}, written(written) {}

    // One thread of a group, behind `bulk_wait`.
    __device__ __forceinline__ void tell() const {
        if (rows_sent == 0) return;
        ptx::fence_async();
        ptx::fence_gpu();
        ptx::add_relaxed_gpu(written + list, rows_sent);
    }
    __device__ __forceinline__ void sent(const Slot& tile, int, int rows, int thread) const {
        if (thread != 0) return;
        if (tile.together != list) {
            ptx::bulk_wait<C::kOutputs>();  // a commit for every 64 columns of this tile
            tell();
            list = tile.together, rows_sent = 0;
        }
        rows_sent += rows;
    }
    __device__ __forceinline__ void ended(int thread) const {
        if (thread == 0) tell();
    }
};

// What either counter of `written` is in the end. All lanes of a warp; also so that the walk finds in L1 what
// it reads one after the other.
__device__ __forceinline__ void count_due(const Rounds& order, u32* due) {
    u32 all = 0, mine = 0;
#pragma unroll 1
    for (int i = static_cast<int>(ptx::lane_id()); i < order.experts; i += 32) {
        const int begin = i > 0 ? order.ends[i - 1] : 0, rows = order.ends[i] - begin;
        const OwnTiles alone = order.own_tiles_of(i, begin, begin + rows);
        all += rows;
        if (alone.high > alone.low) mine += least(rows, alone.high * order.height) - alone.low * order.height;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        all += __shfl_xor_sync(~0u, all, step), mine += __shfl_xor_sync(~0u, mine, step);
    if (ptx::lane_id() == 0) {
        due[0] = (all - mine) * order.column_tiles();
        due[1] = mine * order.column_tiles();
    }
}

// Until it is known where own rows are; false after a patience that only a broken kernel outlasts. All lanes.
__device__ __forceinline__ bool wait_bounds(const u32* known, u32 due, u32* status) {
    u32 patience = PartMade::kPatience;
    if (ptx::lane_id() == 0) {
        while (ptx::load_acquire_gpu(known) != due && --patience) ptx::pause();
        if (patience == 0) *status = 1;
    }
    return __all_sync(~0u, patience > 0);
}

// The sums of a warp. All lanes; false: the call has failed.
struct Summer {
    const Call& call;
    const Reduce& reduce;
    const u32* written;
    const u32* due;

    __device__ __forceinline__ bool run(u8* memory, bool stopped) const {
        const Own own = own_of<Sums>(reduce, threadIdx.x / 32, memory);
        const int* tokens = reduce.tokens + call.local * call.group->ranks;
        const int ranks = call.group->ranks;
        int most = 0;
        for (int p = 0; p < ranks; ++p)
            if (p != call.me) most = max(most, tokens[p]);
        const u32 others = static_cast<u32>(groups_of(reduce, most) * reduce.parts) *
                           static_cast<u32>(ranks - 1),
                  home = static_cast<u32>(groups_of(reduce, tokens[call.me]) * reduce.parts);
        if (!wait_written(0)) return false;
        if (stopped || 2 * static_cast<int>(threadIdx.x / 32) < reduce.reducers) {
            if (!wait_credit(call, static_cast<int>(ptx::lane_id()), 2)) return false;
            reduce_pieces<Sums>(call, reduce, own, tokens, others, draw_again(call, reduce, 0));
        }
        if (!wait_written(1)) return false;
        return add_pieces<Sums>(call, reduce, own, tokens, home, draw_again(call, reduce, 1),
                                [&](const Piece& piece) { return wait_reduced(call, piece.flag); }) >= home;
    }

   private:
    // Until the rows of a list are written. All lanes.
    __device__ __forceinline__ bool wait_written(int list) const {
        bool fine = true;
        if (ptx::lane_id() == 0) wait_counted(call, written, list, due[list], fine);
        return __all_sync(~0u, fine);
    }
};

extern "C" __global__ void __launch_bounds__(C::kThreads, 1)
    others_first(const __grid_constant__ Group group, const __grid_constant__ Reduce reduce,
                 const __grid_constant__ OthersFirst given, const __grid_constant__ Maps maps) {
    u8* memory = ptx::shared_memory();
    __shared__ Slot slots[kSlots];
    __shared__ u64 barriers[2 * C::kStages + 2 * kSlots + 2];
    __shared__ u32 due[2];
    const Shared<C> shared = lay_out<C>(memory, slots, barriers, nullptr);
    Call call = name_call(group, kCombine);
    const bool stops = call.block < given.first_blocks;
    const int rank = LOCAL_RANKS > 1 ? call.local : 0;
    const TensorMap* map = maps.of[rank];
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x == 0) {
        make_barriers(shared);
        for (int i = 0; i < 5; ++i) ptx::prefetch_map(map + i);
    }
    count_call(call);
    meet<C>();
    const Scales scales{};
    const Slopes slopes{};
    const Problem problem{map, map + 2, given.ends[rank], nullptr, given.experts, 0, given.columns, given.k,
                          given.weights[rank], given.counter[rank], given.status, scales, slopes, nullptr};
    if (warp >= 4 * C::kGroups) {
        ptx::fewer_registers<C::kProducerRegisters>();
        if (call.block == 0 && warp == 4 * C::kGroups + 1)
            tell_started(call, static_cast<int>(ptx::lane_id()));
        if (warp == 4 * C::kGroups) {
            const C::Walk whole{problem.ends, nullptr, given.experts, 0, given.columns};
            const u32 due_bounds = 2 * given.experts;
            const int last = wait_bounds(given.bounds[rank], due_bounds, given.status) ? given.last : 0;
            Rounds order{problem.ends,         given.own[rank], given.experts,
                         given.experts - last, given.columns,   with_height<C>(whole).height};
            count_due(order, due);
            order.first = -call.blocks;
            const Stopping team{call.block, call.blocks, stops};
            PartMade ready{given.progress[rank], problem.ends, given.experts, given.tiles, given.status};
            if (ptx::lane_id() == 0) produce<C>(problem, shared, order, team, ready);
            __syncwarp();
            ptx::named_barrier(kSumBarrier, kSummers + 32);
        }
    } else {
        ptx::more_registers<C::kConsumerRegisters>();
        const Publish sink(map + 4, given.written[rank]);
        consume_halves<C>(problem, shared, sink, PartMade::kPatience);
        ptx::named_barrier(kSumBarrier, kSummers + 32);
        const Summer summer{call, reduce, given.written[rank], due};
        const bool fine = __all_sync(~0u, !failed(call));
        ptx::wait_for_launches();
        if (!fine || !summer.run(memory + (shared.a - ptx::smem_u32(memory)), stops)) spoil(call, reduce);
    }
    end_call(call);
}

}  // namespace fused
