// The grouped GEMM as a device function, `run`: what a block, or a cluster of two, does from its first tile
// to its last; gemm/gemm.cu is a kernel of nothing else. `Config` (gemm/shape.cuh) says how a product is cut.
//
// A kernel that does more beside it gives hooks:
//   ready  is asked by the thread that loads, before a tile's rows; columns of its first steps are asked for
//          before it. It may wait for whatever brings the rows (a counter that movers add to), fences for the
//          copy engine, must return in bounded time, and reports itself what did not come: the tile is
//          computed all the same, so that nobody waits for it. kAhead: see gemm/follow.cu.
//   sink   gets a tile's results as panels of staging, and is told when a group has sent all of its own of a
//          tile, and when all of them are written.
//   team   says which blocks take tiles, where those are not all of the launch, and which draw no other one.
//   beside is what the three other warps of the producer's group do meanwhile (`kBeside` of the cut: with
//          more registers), or, where rows are gathered, all four when they have asked for them. It joins no
//          barrier of the block; the block ends when it does.
// `Always`, `StoreTiles`, `EveryBlock` and `Nothing` are those of a product alone. All is inlined here: the
// machine code of gemm/gemm.cu does not know of hooks that do nothing.
//
// Timeline of one block (one an SM, persistent): one thread of the producer warpgroup draws tile numbers from
// a counter, describes each tile in a ring of slots, and fills a ring of STAGES buffers by TMA, across tile
// borders. Consumers multiply, and store through PANELS panels of 8 KiB by TMA, which drain during the next
// tile.
//
//   shared tile   group 0 |== tile 0 ==|store|== tile 1 ==|store|    in bf16 a half is stored beside the
//                 group 1 |== tile 0 ==|store|== tile 1 ==|store|    other's products: gemm/halves.cuh
//   ping-pong     group 0 |== tile 0 ==|store|== tile 2 ==|store|
//                 group 1 |............|== tile 1 ==|store|== tile 3 ==|
//
// A launch need not wait for the kernel before it: blocks begin as those of that one end, and wait inside
// (`wait_for_launches`) before they touch memory. 1.0 of the time at 16384 rows, 0.97 at 1024.
// A 64-row block past the end of its expert is not multiplied (the tail of an expert then costs half a tile).
//
// Ragged ends without touching a row that is not the expert's: the descriptor has three dimensions (column,
// y < H, z <= R), rows and z both one row apart, and its base lies H rows before the tensor. A box of H rows
// at (y, z) = (H - v, row + v) covers rows row .. row + v - 1 and nothing else, since y ends at H: loads give
// zeros for the others and stores skip them. H = 128, row = 258, v = 42: y = 86 .. 127 are z + y - H =
// 258 .. 299. A box that is outside altogether must not be asked for: the copy engine then touches the base,
// an illegal address where nothing is mapped before the tensor.
//
// Design record, measured on an H200. Figures are TFLOP/s with the dense 8192^3 of the same minute in
// brackets (it falls from 800 to 640 as the card heats). fp8, pairs, gathered rows, heights and the
// backward's ends have theirs in their own files.
//
//   Tile, all forwards and dgrads   Qwen2 down   DeepSeek-V3 down
//     128 x 256 shared              689 (789)    729 (776)
//     128 x 128 ping-pong           653          687
//     128 x 192 shared              662          705
//     128 x 256, 3 stages and 64 KiB of staging
//                                   663          692
//     torch                         626          693
//   Tiles drawn from a counter instead of block + n * grid: nothing where experts are equal (660); 466 -> 594
//     where rows are drawn at random (DeepSeek-V3 gate and up). Blocks on a fixed walk drift apart, and the
//     row tiles that share a panel of B then read it from HBM at different times.
//   One TMA a 64-wide panel, six a step, keeps the producer thread behind the tensor cores: wgrad 582 (Qwen2
//     down); one for all panels 630; torch 564 (805).
//   Ping-pong wins wgrad of large outputs by 3 %, where stores weigh most. GROUP_M 4, 8, 16: within 1 %.
//   A box of 128 rows of A of which 64 lie past the end of the expert costs more than 128 that are there. Two
//     boxes of 64, the second left out where it has no rows, over 500 products in bf16: uneven counts 0.95 of
//     the time (at best 0.74), equal ones 0.99. Boxes of 32: the same; of 16: 1 to 4 % slower; two boxes with
//     128 columns: 3 to 7 % slower; in fp8: 1 to 2 % slower.
//
// Rejected:
//   Returning from a consumer when a wait runs out of patience: the divergent exit makes ptxas serialise
//     every wgmma (C7518), hence `patience`.
//   One arrival a group instead of one a warp to free a stage: another warp may still read.
//   A product in flight over the loop's end (C7514), or behind a branch (C7518), while others are added up:
//     both serialise.
//   The second group started 600 to 4500 cycles after the first, so that one might store while the other
//     multiplies: 1.00 of the time, bf16 and fp8; it is 400 behind after a tile (gemm/halves.cuh).
//   Tiles written from registers past the staging, 16 bytes a lane turned by shuffles (1.00 to 1.05 of the
//     time, most in small experts), or by every warp through its own part of it (1.00 to 1.03).
//   Gathering A's rows with cp.async: first product of Qwen3, 16384 rows, 222 us; contiguous 170 and a copy
//     of 25; by boxes of one row 176.
#pragma once
#include "gemm/backward.cuh"
#include "gemm/fp8.cuh"
#include "gemm/gather.cuh"
#include "gemm/halves.cuh"
#include "gemm/load.cuh"
#include "gemm/load_pairs.cuh"
#include "gemm/store.cuh"
#include "gemm/tall.cuh"

namespace gemm {

template <class C, int kBlocks>
__device__ __forceinline__ void multiply_step(float (&d)[C::kBlocksM][C::kBlockN / 2], u32 a, u32 b,
                                              bool first) {
    constexpr u32 kStepA = C::kWgrad ? 16 * 128 : 32, kStepB = C::kForward ? 32 : 16 * 128;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kBlockK / 16; ++i)
#pragma unroll
        for (int m = 0; m < kBlocks; ++m)
            ptx::wgmma_bf16<C::kBlockN, C::kWgrad, !C::kForward>(
                d[m], ptx::wgmma_operand(a + m * kPanel + i * kStepA, kPanel),
                ptx::wgmma_operand(b + i * kStepB, kPanel), !(first && i == 0));
    ptx::wgmma_commit();
}

// All steps of one tile for one group: the first kBlocks of its 64-row blocks (0: only keep the ring going).
template <class C, int kBlocks>
__device__ __forceinline__ void multiply_tile(float (&d)[C::kBlocksM][C::kBlockN / 2],
                                              const Shared<C>& shared, u32 rows_a, const Slot& tile,
                                              u32& patience) {
    Ring<C> ring(tile.position);
    u32 last = 0;
#pragma unroll 1
    for (int step = 0; step < tile.steps; ++step, ring.next()) {
        ptx::mbarrier_wait(shared.full + 8 * ring.stage, ring.phase, patience);
        if constexpr (kBlocks > 0) {
            multiply_step<C, kBlocks>(d, shared.a_of(ring.stage) + rows_a, shared.b_of(ring.stage),
                                      step == 0);
            ptx::wgmma_wait<1>();
            if (step > 0) release_stage<C>(shared.empty + 8 * last);
            last = ring.stage;
        } else {
            release_stage<C>(shared.empty + 8 * ring.stage);
        }
    }
    if (C::kPingpong && threadIdx.x % 32 == 0)
        ptx::mbarrier_arrive(shared.order + 8 * (1 - threadIdx.x / 128));
    if constexpr (kBlocks > 0) {
        ptx::wgmma_wait<0>();
        if (tile.steps > 0) release_stage<C>(shared.empty + 8 * last);
    }
}

// False only for a tile that the last of an odd number leaves to a cluster's second block.
template <class C>
__device__ __forceinline__ bool has_rows(const Slot& tile) { return C::kCluster == 1 || tile.rows > 0; }

// kMade: rows' scales are made while the launch runs.
template <class C, bool kMade = false, class Sink>
__device__ __forceinline__ void consume(const Problem& problem, const Shared<C>& shared, const Sink& sink,
                                        u32 patience) {
    const Scales& scales = problem.scales;
    const Slopes& slopes = problem.slopes;
    const i64* source = problem.index;
    const int columns = problem.columns;
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
    const int first_block = C::kPingpong ? 0 : group;  // of this group's rows in the tile
    u32 index = C::kPingpong ? group : 0;
    Stores<C> stores{shared.staging + group * C::kPanels * kPanel, group, thread};
    Slot tile = take_slot<C>(shared, index, patience);
    StepScales<C, kMade> next;
    const auto ask_for_scales = [&](const Slot& of) {
        if (C::kFp8 && of.steps >= 0 && has_rows<C>(of))
            next.begin(scales, of, source, 64 * group, columns);
    };
    ask_for_scales(tile);
    while (tile.steps >= 0 && patience != 0) {
        float d[C::kBlocksM][C::kBlockN / 2];
        if (C::kWgrad && tile.steps == 0)
#pragma unroll
            for (int m = 0; m < C::kBlocksM; ++m)
#pragma unroll
                for (int i = 0; i < C::kBlockN / 2; ++i) d[m][i] = 0.f;
        // In turn: a wait for a stage tells a fill from the one before by one bit, so nobody may wait for a
        // later fill while an earlier one is under way (tiles of fewer than STAGES steps; loads may land out
        // of order).
        if (C::kPingpong && index > 0)
            ptx::mbarrier_wait(shared.order + 8 * group, (index - 1) / 2 & 1, patience);
        const int rows = tile.rows - 64 * first_block;
        Kept kept;
        if constexpr (C::kSlopes) {
            const int row = tile.row + 64 * first_block;
            if (!C::kKeptAhead)
                ask_for_kept<C>(slopes, tile, row, rows, columns, thread);
            else if (rows > 0)
                kept.load(slopes, tile, row, rows, columns, 0);
        }
        if (rows <= 0)
            multiply_tile<C, 0>(d, shared, 0, tile, patience);
        else if constexpr (C::kFp8)
            multiply_tile_fp8<C>(d[0], shared, group, tile, next, scales, patience);
        else if (C::kBlocksM > 1 && rows <= 64)
            multiply_tile<C, 1>(d, shared, 0, tile, patience);
        else
            multiply_tile<C, C::kBlocksM>(d, shared, first_block * kPanel, tile, patience);
        // Known, and its scales asked for, before this one is stored. Not in turns: it comes only as the
        // other group's loads end.
        index += C::kPingpong ? C::kGroups : 1;
        Slot then;
        if constexpr (!C::kPingpong) {
            then = take_slot<C>(shared, index, patience);
            ask_for_scales(then);
        }
        if constexpr (C::kFp8 && C::kSwiglu) {
            if (rows > 0)
                store_block_fp8<C>(d[0], sink, stores, tile, tile.row + 64 * group, least(rows, 64), scales);
        } else {
#pragma unroll
            for (int m = 0; m < C::kBlocksM; ++m)
                if (rows > 64 * m) {
                    const int row = tile.row + 64 * (first_block + m), live = least(rows - 64 * m, 64);
                    if constexpr (C::kSlopes)
                        store_slopes<C>(d[m], kept, sink, stores, tile, row, live,
                                        m + 1 < C::kBlocksM ? rows - 64 * (m + 1) : 0, columns,
                                        problem.weights, slopes);
                    else
                        store_block<C>(d[m], sink, stores, tile, row, live, problem.weights);
                }
        }
        if (rows > 0)
            sink.sent(tile, tile.row + 64 * first_block, least(rows, 64 * C::kBlocksM), thread);
        else
            sink.passed(thread);
        if constexpr (C::kPingpong)
            tile = take_slot<C>(shared, index, patience);
        else
            tile = then;
    }
    if (thread == 0) ptx::bulk_wait<0>();
    sink.ended(thread);
    if (patience == 0) *problem.status = 1;
}

struct Nothing {
    __device__ __forceinline__ void operator()() const {}
};

// All threads of the block, or of the cluster, after `make_barriers` and `meet`. `counter` as in `produce`.
template <class C, class Ready, class Sink, class Team = EveryBlock<C::kCluster>, class Beside = Nothing>
__device__ __forceinline__ void run(const Problem& problem, const Shared<C>& shared, Ready ready,
                                    const Sink& sink, const Team& team = {}, const Beside& beside = {}) {
    static_assert(!C::kGather || (!Ready::kWaits && Team::kEvery), "gathered rows: a kernel of their own");
    if (threadIdx.x >= C::kGroups * 128) {
        ptx::fewer_registers<C::kProducerRegisters>();
        typename C::Walk order{problem.ends, problem.segments, problem.count, problem.rows, problem.columns};
        if (threadIdx.x < C::kGroups * 128 + 32 * (C::kGather ? C::kGather : 1)) {
            order = with_height<C>(order);
            if constexpr (C::kGather) {
                order.count_from(-static_cast<int>(gridDim.x / C::kCluster));
                produce_gathered<C>(problem, shared, order);
                beside();
            } else {
                order.count_from(-static_cast<int>(team.reserved()));
                if constexpr (kSame<typename C::Walk, typename C::Order> && Team::kEvery && C::kEarly)
                    if (order.segments == nullptr && order.count > kFewSegments)
                        order = near_first_tile<C>(order, team.first(problem.counter, false));
                if (threadIdx.x == C::kGroups * 128) {
                    if constexpr (C::kCluster > 1)
                        produce_pairs<C>(problem, shared, order, team, ready);
                    else
                        produce<C>(problem, shared, order, team, ready);
                }
            }
        } else if constexpr (!kSame<Beside, Nothing>) {
            beside();
        }
    } else {
        ptx::more_registers<C::kConsumerRegisters>();
        if constexpr (C::kTall)
            consume_tall<C>(problem, shared, sink, Ready::kPatience);
        else if constexpr (C::kHalved)
            consume_halves<C>(problem, shared, sink, Ready::kPatience);
        else
            consume<C, Ready::kWaits>(problem, shared, sink, Ready::kPatience);
    }
    if constexpr (C::kCluster > 1) meet<C>();  // arrivals and panels of the other block have come
}

}  // namespace gemm
