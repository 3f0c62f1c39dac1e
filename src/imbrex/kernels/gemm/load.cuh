// The producer of the grouped GEMM: which tile comes next, and its operands into shared memory.
#pragma once
#include "gemm/shape.cuh"

namespace gemm {

// Forward: one step of B. kOnce: nobody reads these columns again soon.
template <class C, bool kOnce = false>
__device__ __forceinline__ void load_columns(const TensorMap* map_b, u32 full, u32 b, int expert, int column,
                                             int k) {
    constexpr auto load_3d = kOnce ? ptx::tma_load_3d_once : ptx::tma_load_3d;
    constexpr auto load_4d = kOnce ? ptx::tma_load_4d_once : ptx::tma_load_4d;
    if constexpr (C::kSwiglu && C::kHalved) {
        load_4d(b, map_b, full, k, column, 0, expert);
        load_4d(b + C::kBytesB / 2, map_b, full, k, column + 64, 0, expert);
    } else if constexpr (C::kSwiglu) {
        load_3d(b, map_b, full, k, column, 2 * expert);
        load_3d(b + C::kBytesB / 2, map_b, full, k, column, 2 * expert + 1);
    } else {
        load_3d(b, map_b, full, k, column, expert);
    }
}

// A step of A, of which `rows` rows are live. Boxes without any are left out: rows that are not there cost
// the copy engine more than rows that are.
template <class C>
__device__ __forceinline__ void load_rows(const TensorMap* map_a, u32 full, u32 a, int row, int rows, int k) {
    if constexpr (C::kBlockM > 2 * C::kBoxM) {
#pragma unroll 1
        for (int box = 0; box < rows; box += C::kBoxM) {
            const int live = least(rows - box, C::kBoxM);
            ptx::tma_load_3d(a + box * 128, map_a, full, k, C::kBoxM - live, row + box + live);
        }
    } else {
#pragma unroll
        for (int box = 0; box < C::kBlockM; box += C::kBoxM) {
            const int live = least(rows - box, C::kBoxM);
            if (box == 0 || live > 0)
                ptx::tma_load_3d(a + box * 128, map_a, full, k, C::kBoxM - live, row + box + live);
        }
    }
}

template <class C>
__device__ __forceinline__ u32 bytes_of_rows(int rows) {
    return (rows + C::kBoxM - 1) / C::kBoxM * C::kBoxM * 128;
}

// A step of a tile; or, in two calls, all that does not wait for rows (kColumns), then the rows (kRows).
// `product`: whose maps; kOnce: as in `load_columns`.
template <class C, bool kColumns = true, bool kRows = true, bool kOnce = false>
__device__ __forceinline__ void load_step(const Problem& problem, const Shared<C>& shared, u32 stage,
                                          const Tile& tile, int k, int k_left, int product = 0) {
    const TensorMap *map_a = problem.map_a + product, *map_b = problem.map_b + product;
    const u32 full = shared.full + 8 * stage, a = shared.a_of(stage), b = shared.b_of(stage);
    const int v = least(C::kWgrad ? k_left : tile.rows, C::kWgrad ? C::kBlockK : C::kBlockM);
    if constexpr (!C::kWgrad) {
        if (kColumns) ptx::mbarrier_expect(full, bytes_of_rows<C>(v) + C::kBytesB);
        if (kRows) load_rows<C>(map_a, full, a, tile.row, v, k);
    }
    if constexpr (!kColumns) return;
    if constexpr (C::kForward) {
        load_columns<C, kOnce>(map_b, full, b, tile.expert, tile.column, k);
    } else if constexpr (C::kWide && C::kDgrad) {
        ptx::tma_load_4d(b, map_b, full, 0, k, tile.column / 64, tile.expert);
    } else if constexpr (C::kWide) {
        ptx::mbarrier_expect(full, C::kBytesA + C::kBytesB);
        ptx::tma_load_4d(a, map_a, full, 0, C::kBlockK - v, k + v, tile.row / 64);
        ptx::tma_load_4d(b, map_b, full, 0, C::kBlockK - v, k + v, tile.column / 64);
    } else if constexpr (C::kDgrad) {
#pragma unroll
        for (int i = 0; i < C::kBlockN / 64; ++i)
            ptx::tma_load_3d(b + i * kPanel, map_b, full, tile.column + 64 * i, k, tile.expert);
    } else {
        const int panels_a = least((tile.rows + 63) / 64, C::kTileBlocks),
                  panels_b = least((tile.columns + 63) / 64, C::kBlockN / 64);
        ptx::mbarrier_expect(full, (panels_a + panels_b) * kPanel);
#pragma unroll 1
        for (int i = 0; i < panels_a; ++i)
            ptx::tma_load_3d(a + i * kPanel, map_a, full, tile.row + 64 * i, C::kBlockK - v, k + v);
#pragma unroll 1
        for (int i = 0; i < panels_b; ++i)
            ptx::tma_load_3d(b + i * kPanel, map_b, full, tile.column + 64 * i, C::kBlockK - v, k + v);
    }
}

// The next tile is sought after kPeek steps of one: its number has come by then, and there is time before the
// next step. Between two tiles that would delay the loads by 500 to 1000 cycles. Not in weight gradients and
// turns, where it gains nothing, and 3 % are lost if the outputs are what takes the time.
constexpr int kPeek = 2;

// Steps whose columns a producer asks for before it waits for rows. Of three stages one: rows of the second
// would keep those of the first waiting until another stage is free.
template <class C>
constexpr int kBefore = C::kStages > kPeek + 1 ? kPeek : 1;

// Rows are there before the launch: what `run` is told where nobody brings them (gemm/run.cuh).
struct Always {
    static constexpr bool kWaits = false;
    static constexpr int kAhead = kPeek;  // steps of a block's first tile whose columns are asked for before
    static constexpr u32 kPatience = ptx::kPatience;  // of everybody who waits in the block
    __device__ __forceinline__ void operator()(const Tile&) const {}
};

// The producer thread. counter[0]: tiles drawn beyond the first of each block, whose numbers are negative;
// counter[1]: blocks that are done, the last of which sets both back to 0 for the next launch.
template <class C, class Walk, class Team, class Ready>
__device__ __forceinline__ void produce(const Problem& problem, const Shared<C>& shared, Walk order,
                                        const Team& team, Ready& ready) {
    static_assert(!Ready::kWaits || !C::kWgrad, "rows are waited for tile by tile");
    static_assert(!Ready::kWaits || kPeek < C::kStages,
                  "consumers keep a tile's last stage until the next one's first step is there");
    constexpr bool kFew = Ready::kAhead > kPeek;  // few rows: weights are read once
    const int* ends = problem.ends;
    u32 patience = Ready::kPatience, position = 0, index = 0;
    int number = team.first(problem.counter, true);
    Tile tile;
    bool found = C::kEarly && order.seek(number, tile);
    Ring<C> ring(0);
    for (int stops = 0; stops < (C::kPingpong ? C::kGroups : 1); ++index) {
        const u32 slot = index % kSlots;
        ptx::mbarrier_wait(shared.slot_empty + 8 * slot, (index / kSlots & 1) ^ 1, patience);
        if (stops > 0 || !(C::kEarly ? found : order.seek(number, tile))) {
            shared.slots[slot].steps = -1;
            ptx::mbarrier_arrive(shared.slot_full + 8 * slot);
            ++stops;
            continue;
        }
        const int next = team.next(problem.counter, order);  // nothing may wait for it, not even an addition
        const int k_begin = C::kWgrad && tile.expert > 0 ? ends[tile.expert - 1] : 0;
        const int k_count = C::kWgrad ? ends[tile.expert] - k_begin : problem.k;
        const int steps = (k_count + C::kBlockK - 1) / C::kBlockK;
        const int product = order.product;
        const Slot told{tile.expert, tile.row, tile.rows, tile.column, tile.columns, steps, position,
                        product};
        if constexpr (!Ready::kWaits) {
            shared.slots[slot] = told;
            ptx::mbarrier_arrive(shared.slot_full + 8 * slot);
        }
        const auto load = [&](int begin, int end) {
#pragma unroll 1
            for (int step = begin; step < end; ++step, ring.next()) {
                ptx::mbarrier_wait(shared.empty + 8 * ring.stage, ring.phase ^ 1, patience);
                load_step<C, true, true, kFew>(problem, shared, ring.stage, tile,
                                               k_begin + step * C::kBlockK, k_count - step * C::kBlockK,
                                               product);
            }
        };
        const int few =
            least(steps, kFew && index == 0 ? Ready::kAhead : (Ready::kWaits ? kBefore<C> : kPeek));
        if constexpr (Ready::kWaits) {
            Ring<C> rows = ring;
#pragma unroll 1
            for (int step = 0; step < few; ++step, ring.next()) {
                ptx::mbarrier_wait(shared.empty + 8 * ring.stage, ring.phase ^ 1, patience);
                load_step<C, true, false, kFew>(problem, shared, ring.stage, tile, step * C::kBlockK, 0);
            }
            ready(tile);
            shared.slots[slot] = told;  // so that consumers may ask for the rows' scales
            ptx::mbarrier_arrive(shared.slot_full + 8 * slot);
#pragma unroll 1
            for (int step = 0; step < few; ++step, rows.next())
                load_step<C, false, true>(problem, shared, rows.stage, tile, step * C::kBlockK, 0);
        }
        if constexpr (C::kEarly) {
            Tile then;
            if constexpr (!Ready::kWaits)
                load(0, few);
            else if constexpr (kBefore<C> < kPeek)
                load(few, least(steps, kPeek));
            found = order.seek(next, then);
            load(kFew ? few : kPeek, steps);
            tile = then;
        } else {
            load(Ready::kWaits ? few : 0, steps);
        }
        position += steps;
        number = next;
    }
    u32* counter = problem.counter;
    if (patience == 0) *problem.status = 1;
    if (atomicAdd(counter + 1, 1) == team.all() - 1) counter[0] = counter[1] = 0;
}

}  // namespace gemm
