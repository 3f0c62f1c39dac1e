// What the parts of the grouped GEMM share: sizes from the defines (see gemm.cu), shared memory, the ring of
// stages.
#pragma once
#include "ptx/wgmma.cuh"
#include "gemm/height.cuh"
#include "gemm/kinds.cuh"
#include "gemm/pairs.cuh"

namespace gemm {

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <int kCluster, class Single, class Pair>
struct WalkOf {
    using Type = Single;
};
template <class Single, class Pair>
struct WalkOf<2, Single, Pair> {
    using Type = Pair;
};

constexpr int kQuantisers = 3;  // warps beside the producer's that quantise rows of A (kQuantises)

// How a product is cut, loaded and stored, and what follows from it. `Cut`: a struct of the numbers
// themselves, which gemm/gemm.cu explains.
template <class Cut>
struct Config : Cut {
    // Two groups share three blocks of 64 rows, the third by its columns: gemm/tall.cuh.
    static constexpr bool kTall = !Cut::kPingpong && Cut::kBlocksM == 3;
    static constexpr int kTileBlocks =
        Cut::kPingpong || kTall ? Cut::kBlocksM : Cut::kGroups;  // of 64 rows
    static constexpr int kBlockM = 64 * kTileBlocks;
    static constexpr int kBlockN = Cut::kBlockN;
    static constexpr int kBlockK = Cut::kFp8 ? 128 : 64;  // 128 bytes
    static constexpr bool kForward = Cut::kLayout == Layout::kForward,
                          kDgrad = Cut::kLayout == Layout::kDgrad, kWgrad = Cut::kLayout == Layout::kWgrad;
    static constexpr bool kKeep = Cut::kEpilogue == Epilogue::kSwigluKeep,
                          kSwiglu = Cut::kEpilogue == Epilogue::kSwiglu || kKeep;
    static constexpr bool kSlopes = Cut::kEpilogue == Epilogue::kSwigluGradient;
    static constexpr bool kWeighted = Cut::kEpilogue == Epilogue::kWeighted;
    static constexpr bool kAddFloats = Cut::kEpilogue == Epilogue::kAddFloat,
                          kAdds = Cut::kEpilogue == Epilogue::kAdd || kAddFloats;
    static constexpr u32 kBytesA = kBlockM * 128, kBytesB = kBlockN * 128;
    // The second 64 rows of a tile may have no rows, or the tile none: they come in boxes of their own. With
    // 128 columns a step is too short for a second instruction (3 to 7 % slower), and fp8 pays for it, too (1
    // to 2 %).
    static constexpr bool kTwoHeights =
        !Cut::kFp8 && !Cut::kPingpong && !kWgrad && kBlockM == 128 && kBlockN == 256;
    static constexpr int kMostBox = kTwoHeights || kTall ? 64 : kBlockM,
                         kBoxM = Cut::kFp8 || kMostBox < Cut::kBox ? kMostBox : Cut::kBox;
    static constexpr int kOutputs = (kSwiglu ? kBlockN / 2 : kBlockN) / 64;
    // In fp8 who tells of tiles, and who waits for rows, has 56 registers for its producers, or spills.
    static constexpr bool kManyRegisters =
        (Cut::kFp8 && !kSwiglu && !Cut::kWaits && Cut::kCluster == 1) || kSlopes;
    // kBeside: registers of three warps of the producer's group that do something else, or 0. Who asks for
    // more gets what others gave back: a thread begins with 168, so three groups have 504, or the launch
    // fails.
    static constexpr int kProducerRegisters = Cut::kQuantises ? 120
                                              : Cut::kBeside  ? (Cut::kGroups > 1 ? Cut::kBeside : 120)
                                                              : (kManyRegisters ? 40 : 56);
    static constexpr int kConsumerRegisters = Cut::kGroups == 1 ? 240
                                              : Cut::kBeside    ? (504 - Cut::kBeside) / 2
                                              : kManyRegisters  ? 232
                                                                : 224;
    // Of SwiGLU's gradient, gate and up of the next panel are in registers while the one before is computed;
    // where those are too few, they are asked into L2 before the product (gemm/backward.cuh).
    static constexpr bool kKeptAhead = kConsumerRegisters >= 232;
    static constexpr int kThreads = 128 * (Cut::kGroups + 1);
    static constexpr int kReaders = Cut::kPingpong ? 4 : 4 * Cut::kGroups;  // warps, of a stage or a slot
    // bf16 tiles of 256 columns are two halves, of which one is stored while the other is multiplied
    // (gemm/halves.cuh). With SwiGLU a half has gate and up of the same 64 columns, next to each other.
    static constexpr bool kHalved =
        !Cut::kFp8 && !Cut::kPingpong && !Cut::kGather && kBlockN == 256 && !kSlopes;
    static constexpr int kUp = kHalved ? 64 : kBlockN / 2;        // columns of a tile from gate to up
    static constexpr int kApart = kSwiglu && kHalved ? 128 : 64;  // from one panel of results to the next
    static constexpr int kSums = kBlockN / 2, kHalfSums = kSums / 2;
    static constexpr int kWaves = kBlockN / Cut::kWave, kProducts = Cut::kWave == 128 ? 1 : 2;  // fp8
    // Scales of B of a step of fp8: of SwiGLU those of gate and of up, whatever the width.
    static constexpr int kScalesN = kSwiglu ? 2 : kBlockN / 128;
    // Crews of warps that ask for rows in turn (gemm/gather.cuh), and the quads of rows of one of them.
    static constexpr int kTurns = 2, kCrew = Cut::kGather ? Cut::kGather / kTurns : 1,
                         kQuadsEach = kBlockM / 4 / kCrew;
    static constexpr bool kEarly = !kWgrad && !Cut::kPingpong;  // the next tile is sought early (load.cuh)

    static constexpr int kColumns = kSwiglu ? kBlockN / 2 : kBlockN;  // of the output, of a tile
    using Order = Schedule<kBlockM, kColumns, Cut::kGroupM, kWgrad, kTall>;
    using Pairs = PairSchedule<kBlockM, kColumns, Cut::kGroupM>;
    using Walk = typename WalkOf<Cut::kCluster, Order, Pairs>::Type;

    static_assert(!Cut::kFp8 || (kForward && !Cut::kPingpong && kBlockN % 128 == 0),
                  "fp8: forward, tiles shared by the groups");
    static_assert(Cut::kCluster == 1 || (!Cut::kPingpong && (kForward || (kDgrad && Cut::kWide))),
                  "clusters: see gemm/load_pairs.cuh");
    static_assert(Cut::kPingpong || Cut::kBlocksM == 1 || kTall,
                  "groups that share a tile have one block of rows each");
    static_assert(!kTall || (kHalved && !kWgrad && Cut::kGroups == 2 && Cut::kCluster == 1),
                  "tall tiles: 256 columns in bf16, single blocks of two groups");
    static_assert(!kTall || Cut::kPanels * 8192 <= kBytesA, "a tall tile's panels lie in a stage");
    static_assert(!kHalved || Cut::kStages > 1,
                  "a tile's last step and the next one's first are there at once");
    static_assert(!Cut::kGather || (kForward && !Cut::kPingpong), "rows are gathered in a forward product");
    static_assert(Cut::kGroups == 1 || 2 * kConsumerRegisters + kProducerRegisters <= 504,
                  "more registers than the block begins with");
    static_assert(kConsumerRegisters % 8 == 0 && kProducerRegisters % 8 == 0, "registers come in eights");
    static_assert(!Cut::kQuantises || (Cut::kFp8 && Cut::kGroups == 1 && Cut::kCluster == 1 && !Cut::kGather),
                  "rows are quantised for one group, by warps that are idle");
    static_assert(!Cut::kBeside || !(Cut::kFp8 || Cut::kGather), "the producer's warps are not idle");
    static_assert(!Cut::kGather || (Cut::kGather % kTurns == 0 && Cut::kStages >= kTurns), "crews are alike");
};

constexpr u32 kPanel = 64 * 64 * 2;  // 64 rows of 128 bytes
constexpr int kSlots = 4;

// Who takes tiles: all blocks of the launch, each one of its own first. In clusters, which work as one block.
// Another team (gemm/run.cuh) may hold blocks that come later: they draw their first tile, too.
template <int kCluster>
struct EveryBlock {
    static constexpr bool kEvery = true;
    // (counter, draws): the number of this block's first tile. Those that are not drawn are negative. Where
    // `draws` is false another block's thread draws for both.
    __device__ __forceinline__ int first(u32*, bool) const {
        return static_cast<int>(blockIdx.x / kCluster) - static_cast<int>(all());
    }
    // (counter, the walk, which stands at the tile before): the number of a single block's next tile.
    template <class Walk>
    __device__ __forceinline__ int next(u32* counter, const Walk&) const {
        return atomicAdd(counter, 1);
    }
    // How many are not drawn.
    __device__ __forceinline__ u32 reserved() const { return all(); }
    // How many take tiles; the last one that is done ends the launch's count.
    __device__ __forceinline__ u32 all() const { return gridDim.x / kCluster; }
};

// With tiles of 64 rows where the product ends sooner in those. All lanes of a warp: nothing is loaded before
// the ends are, and one after the other they took 1.5 us of 16 experts, 4 of 64.
template <class C, typename Any>
__device__ __forceinline__ Any with_height(Any order) {
    constexpr int kWidth = C::kSwiglu ? C::kBlockN / 2 : C::kBlockN;
    if constexpr (C::kTwoHeights)
        if (order.segments == nullptr) {
            RowTiles rows = count_row_tiles(order.ends, order.count, threadIdx.x % 32, 32);
#pragma unroll
            for (int step = 16; step > 0; step /= 2) {
                rows.high += static_cast<int>(__shfl_xor_sync(~0u, static_cast<u32>(rows.high), step));
                rows.low += static_cast<int>(__shfl_xor_sync(~0u, static_cast<u32>(rows.low), step));
            }
            order.height = tile_height(rows, (order.columns + kWidth - 1) / kWidth, gridDim.x);
        }
    return order;
}

// Stands right before the segment of this block's first tile, or near it: a thread that walks there alone
// waits for 64 experts' ends one after the other, 4 us in which nothing is loaded. All lanes of a warp; of
// teams whose first tiles are not drawn.
constexpr int kFewSegments = 16;
template <class C>
__device__ __forceinline__ typename C::Order near_first_tile(typename C::Order order, int number) {
    const int lane = static_cast<int>(threadIdx.x % 32), each = (order.count + 31) / 32;
    const int begin = least(lane * each, order.count), end = least(begin + each, order.count);
    const int columns = (order.columns + C::kColumns - 1) / C::kColumns;
    const int before = begin > 0 ? order.ends[begin - 1] : 0;
    int row = before, tiles = 0;
#pragma unroll 1
    for (int expert = begin; expert < end; ++expert) {
        const int next = order.ends[expert];
        tiles += order.row_tiles_of(next - row) * columns;
        row = next;
    }
    int sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int left = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += left;
    }
    const u32 past = __ballot_sync(~0u, number - order.first >= sum);  // lanes whose tiles are all before it
    const int found = least(__popc(past), 31);
    order.segment = __shfl_sync(~0u, begin, found) - 1;
    order.row_end = __shfl_sync(~0u, before, found);
    order.first += __shfl_sync(~0u, sum - tiles, found);
    return order;
}

// What consumers know of a tile; `position` counts the load steps before it. steps < 0: no more tiles. rows
// 0: none for this block; `together`: the cluster's two tiles share their columns, or, of single blocks, the
// number of the product that the tile is of.
struct __align__(16) Slot {
    int expert, row, rows, column, columns, steps;
    u32 position;
    int together;
};

template <class C>
struct Shared {
    u32 a, b, staging, full, empty, slot_full, slot_empty, order;
    Slot* slots;
    u32* from;  // rows of A to gather, kTurns * kBlockM of them
    float* row_scales = nullptr;  // of A's rows, kBlockM a stage (kQuantises)
    __device__ __forceinline__ u32 a_of(u32 stage) const { return a + stage * C::kBytesA; }
    __device__ __forceinline__ u32 b_of(u32 stage) const { return b + stage * C::kBytesB; }
};

template <class C>
struct Ring {
    u32 stage, phase;
    __device__ __forceinline__ explicit Ring(u32 position)
        : stage(position % C::kStages), phase(position / C::kStages & 1) {}
    __device__ __forceinline__ void next() {
        if (++stage == C::kStages) stage = 0, phase ^= 1;
    }
};

// Lanes of a warp that tell of a slot that all have read, or of rows that all have quantised.
// compute-sanitizer's racecheck takes an arrival for that of one thread, and the others' reads for races: for
// it (RACECHECK) all of them arrive.
#ifdef RACECHECK
constexpr u32 kReleasing = 32;
#else
constexpr u32 kReleasing = 1;
#endif
// The same of a stage, of which lanes read scales where rows are quantised; else only the tensor cores do.
template <class C>
constexpr u32 kFreeing = C::kQuantises ? kReleasing : 1;

// A warp has read a stage: whoever fills it may do so, which are all blocks of the cluster.
template <class C>
__device__ __forceinline__ void release_stage(u32 barrier) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (C::kCluster > 1) {
        if (lane < C::kCluster) ptx::mbarrier_arrive_cluster(barrier, lane);
    } else if (lane < kFreeing<C>) {
        ptx::mbarrier_arrive(barrier);
    }
}

// A thread (of a warp) has read a slot: the block that writes it may do so, which is the first of the
// cluster.
template <class C>
__device__ __forceinline__ void release_slot(u32 barrier) {
    if constexpr (C::kCluster > 1)
        ptx::mbarrier_arrive_cluster(barrier, 0);
    else
        ptx::mbarrier_arrive(barrier);
}

// The value of lane 0, where all have the same, and the compiler has to know.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// Tile number `index` of the block, and its slot free again.
template <class C>
__device__ __forceinline__ Slot take_slot(const Shared<C>& shared, u32 index, u32& patience) {
    const u32 slot = index % kSlots;
    ptx::mbarrier_wait(shared.slot_full + 8 * slot, index / kSlots & 1, patience);
    const Slot tile = shared.slots[slot];
    __syncwarp();
    if (threadIdx.x % 32 < kReleasing) release_slot<C>(shared.slot_empty + 8 * slot);
    return tile;
}

// a: [R, stride]; b: [experts, blocks of n, blocks of k]; d: [R, stride of d] (SwiGLU), one for every 1 x
// 128.
struct Scales {
    const float* a;
    const float* b;
    float* d;
    int stride_a, stride_d;
};

// gate_up: bf16 [R, 2F], sixteen bytes each; act is stored where `keep` is not 0; d_weight [tiles of columns,
// rows] float32 gets, of every tile, sum_f act d_act, where `weights` is given (in a fixed order: another
// kernel adds up the tiles).
struct Slopes {
    const uint4* gate_up;
    float* d_weight;
    int rows, keep;
};

// What is multiplied. Tensor maps of A and B, of every product one (gemm/scheduler.cuh); `rows`: of the
// output, where their number is fixed (wgrad); `columns`: of the output; `k`: the contracted length (not
// wgrad); `weights` [R] (Epilogue::kWeighted); `counter`: two zeros; `index`: where rows of A lie (gather).
// `status`: set to 1 where a wait ran out of patience, which makes the result wrong; the host looks at it (a
// bug, or a GPU that stood still for ten seconds: both sides of every barrier live in one block).
struct Problem {
    const TensorMap *map_a, *map_b;
    const int *ends, *segments;  // gemm/scheduler.cuh
    int count, rows, columns, k;
    const float* weights;
    u32 *counter, *status;
    const Scales& scales;  // fp8
    const Slopes& slopes;  // Epilogue::kSwigluGradient
    const i64* index;
};

// `memory`: dynamic, with room to align it. `barriers`: 2 kStages + 2 kSlots + 2.
template <class C>
__device__ __forceinline__ Shared<C> lay_out(u8* memory, Slot* slots, u64* barriers, u32* from) {
    Shared<C> shared;
    shared.a = (ptx::smem_u32(memory) + 1023) & ~1023u;
    shared.b = shared.a + C::kStages * C::kBytesA;
    shared.staging = shared.b + C::kStages * C::kBytesB;
    shared.full = ptx::smem_u32(barriers);
    shared.empty = shared.full + C::kStages * 8;
    shared.slot_full = shared.empty + C::kStages * 8;
    shared.slot_empty = shared.slot_full + kSlots * 8;
    shared.order = shared.slot_empty + kSlots * 8;
    shared.slots = slots, shared.from = from;
    return shared;
}

// One thread, before the block (the cluster) meets.
template <class C>
__device__ __forceinline__ void make_barriers(const Shared<C>& shared) {
    for (int i = 0; i < C::kStages; ++i) {
        ptx::mbarrier_init(shared.full + 8 * i, C::kCrew + (C::kQuantises ? kReleasing : 0));
        ptx::mbarrier_init(shared.empty + 8 * i, C::kCluster * C::kReaders * kFreeing<C>);
    }
    for (int i = 0; i < kSlots; ++i) {
        ptx::mbarrier_init(shared.slot_full + 8 * i, 1);
        ptx::mbarrier_init(
            shared.slot_empty + 8 * i,
            C::kCluster * C::kReaders * kReleasing + (C::kQuantises ? kQuantisers * kReleasing : 0) +
                (C::kGather ? C::kCluster * C::kGather : C::kCluster - 1));
    }
    for (int i = 0; i < 2; ++i) ptx::mbarrier_init(shared.order + 8 * i, 4);
    ptx::fence_barrier_init();
}

// The shared memory of a kernel of one product, its barriers and maps made ready before the block meets.
// `memory`, `barriers`: as of `lay_out`.
template <class C>
__device__ __forceinline__ Shared<C> set_up(u8* memory, Slot* slots, u64* barriers, u32* from,
                                            const TensorMap& map_a, const TensorMap& map_b,
                                            const TensorMap& map_d) {
    const Shared<C> shared = lay_out<C>(memory, slots, barriers, from);
    if (threadIdx.x == 0) {  // the others wait in `meet`
        make_barriers(shared);
        ptx::prefetch_map(&map_a);
        ptx::prefetch_map(&map_b);
        ptx::prefetch_map(&map_d);
    }
    return shared;
}

// All threads of the block, or of the cluster.
template <class C>
__device__ __forceinline__ void meet() {
    if constexpr (C::kCluster > 1) {
        __syncwarp();
        ptx::cluster_arrive();
        ptx::cluster_wait();
    } else {
        __syncthreads();
    }
}

}  // namespace gemm
