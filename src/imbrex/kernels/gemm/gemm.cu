// Grouped GEMM for Hopper, in bf16 or (forward) fp8, specialised by defines:
//   LAYOUT    0 forward   D[r, n] = sum_k A[r, k] B[e, n, k]    rows of expert e, any number
//             1 dgrad     D[r, n] = sum_k A[r, k] B[e, k, n]
//             2 wgrad     D[e, m, n] = sum_r A[r, m] B[r, n]    over the rows of expert e
//   EPILOGUE  0 plain
//             1 SwiGLU (B holds gate rows, then up rows; D gets silu(gate) * up), 2 that stores both as well
//             3 rows multiplied by their weight
//             4 SwiGLU's gradient: gemm/backward.cuh; 5, 6 added to a bf16 or float32 D in L2 (wgrad)
//   FP8       1: e4m3 with block scales, SwiGLU leaves as fp8; WAVE columns of a product: gemm/fp8.cuh
//   GROUPS    consumer warpgroups, of BLOCKS_M 64-row blocks each
//   PINGPONG  0: the groups share a tile of 64 * GROUPS rows
//             1: each group has tiles of its own (64 * BLOCKS_M rows) in turn
//   WIDE      1: operands that are contiguous along m or n are multiples of 64 wide, and one instruction
//             loads all their panels of 64
//   CLUSTER   2: two blocks work on two row tiles of the same columns, and each loads half of B for both
//             (forward, dgrad; tiles shared by the groups; the same bits): gemm/pairs.cuh
//   GATHER    warps that ask for the rows of A one by one, through an index (forward); 0: rows are in order:
//             gemm/gather.cuh
//   BLOCK_N   columns of a tile; STAGES of the load ring; PANELS of store staging a group
//   GROUP_M   row tiles side by side: gemm/scheduler.cuh
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
#include "gemm/backward.cuh"
#include "gemm/fp8.cuh"
#include "gemm/gather.cuh"
#include "gemm/halves.cuh"
#include "gemm/load.cuh"
#include "gemm/load_pairs.cuh"
#include "gemm/store.cuh"

namespace gemm {

template <int kBlocks>
__device__ __forceinline__ void multiply_step(float (&d)[BLOCKS_M][kBlockN / 2], u32 a, u32 b, bool first) {
    constexpr u32 kStepA = kWgrad ? 16 * 128 : 32, kStepB = kForward ? 32 : 16 * 128;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockK / 16; ++i)
#pragma unroll
        for (int m = 0; m < kBlocks; ++m)
            ptx::wgmma_bf16<kBlockN, kWgrad, !kForward>(
                d[m], ptx::wgmma_operand(a + m * kPanel + i * kStepA, kPanel),
                ptx::wgmma_operand(b + i * kStepB, kPanel), !(first && i == 0));
    ptx::wgmma_commit();
}

// All steps of one tile for one group: the first kBlocks of its 64-row blocks (0: only keep the ring going).
template <int kBlocks>
__device__ __forceinline__ void multiply_tile(float (&d)[BLOCKS_M][kBlockN / 2], const Shared& shared,
                                              u32 rows_a, const Slot& tile, u32& patience) {
    Ring ring(tile.position);
    u32 last = 0;
#pragma unroll 1
    for (int step = 0; step < tile.steps; ++step, ring.next()) {
        ptx::mbarrier_wait(shared.full + 8 * ring.stage, ring.phase, patience);
        if constexpr (kBlocks > 0) {
            multiply_step<kBlocks>(d, shared.a_of(ring.stage) + rows_a, shared.b_of(ring.stage), step == 0);
            ptx::wgmma_wait<1>();
            if (step > 0) release_stage(shared.empty + 8 * last);
            last = ring.stage;
        } else {
            release_stage(shared.empty + 8 * ring.stage);
        }
    }
    if (PINGPONG && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared.order + 8 * (1 - threadIdx.x / 128));
    if constexpr (kBlocks > 0) {
        ptx::wgmma_wait<0>();
        if (tile.steps > 0) release_stage(shared.empty + 8 * last);
    }
}

// False only for a tile that the last of an odd number leaves to a cluster's second block.
__device__ __forceinline__ bool has_rows(const Slot& tile) { return CLUSTER == 1 || tile.rows > 0; }

__device__ __forceinline__ void consume(const TensorMap* map_d, const TensorMap* map_h, const Shared& shared,
                                        const float* weights, const Scales& scales, const Slopes& slopes,
                                        const i64* source, int columns, u32* status) {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
    const int first_block = PINGPONG ? 0 : group;  // of this group's rows in the tile
    u32 patience = ptx::kPatience, index = PINGPONG ? group : 0;
    Stores stores{shared.staging + group * PANELS * kPanel, group, thread};
    Slot tile = take_slot(shared, index, patience);
    StepScales next;
    if (FP8 && tile.steps >= 0 && has_rows(tile)) next.begin(scales, tile, source, 64 * group, columns);
    while (tile.steps >= 0 && patience != 0) {
        float d[BLOCKS_M][kBlockN / 2];
        if (kWgrad && tile.steps == 0)
#pragma unroll
            for (int m = 0; m < BLOCKS_M; ++m)
#pragma unroll
                for (int i = 0; i < kBlockN / 2; ++i) d[m][i] = 0.f;
        // In turn: a wait for a stage tells a fill from the one before by one bit, so nobody may wait for a
        // later fill while an earlier one is under way (tiles of fewer than STAGES steps; loads may land out
        // of order).
        if (PINGPONG && index > 0)
            ptx::mbarrier_wait(shared.order + 8 * group, (index - 1) / 2 & 1, patience);
        const int rows = tile.rows - 64 * first_block;
        Kept kept;
        if (EPILOGUE == 4 && rows > 0) kept.load(slopes, tile, tile.row + 64 * first_block, rows, columns, 0);
        if (rows <= 0)
            multiply_tile<0>(d, shared, 0, tile, patience);
        else if constexpr (FP8)
            multiply_tile_fp8(d[0], shared, group, tile, next, scales, patience);
        else if (BLOCKS_M > 1 && rows <= 64)
            multiply_tile<1>(d, shared, 0, tile, patience);
        else
            multiply_tile<BLOCKS_M>(d, shared, first_block * kPanel, tile, patience);
        // Known, and its scales asked for, before this one is stored. Not in turns: it comes only as the
        // other group's loads end.
        index += PINGPONG ? GROUPS : 1;
        Slot then;
        if constexpr (!PINGPONG) {
            then = take_slot(shared, index, patience);
            if (FP8 && then.steps >= 0 && has_rows(then))
                next.begin(scales, then, source, 64 * group, columns);
        }
        if constexpr (FP8 && kSwiglu) {
            if (rows > 0)
                store_block_fp8(d[0], map_d, stores, tile, tile.row + 64 * group, least(rows, 64), scales);
        } else {
#pragma unroll
            for (int m = 0; m < BLOCKS_M; ++m)
                if (rows > 64 * m) {
                    const int row = tile.row + 64 * (first_block + m), live = least(rows - 64 * m, 64);
                    if constexpr (EPILOGUE == 4)
                        store_slopes(d[m], kept, map_d, map_h, stores, tile, row, live,
                                     m + 1 < BLOCKS_M ? rows - 64 * (m + 1) : 0, columns, weights, slopes);
                    else
                        store_block(d[m], map_d, map_h, stores, tile, row, live, weights);
                }
        }
        tile = PINGPONG ? take_slot(shared, index, patience) : then;
    }
    if (thread == 0) ptx::bulk_wait<0>();
    if (patience == 0) *status = 1;
}

// All threads of the block, or of the cluster.
__device__ __forceinline__ void meet() {
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        ptx::cluster_arrive();
        ptx::cluster_wait();
    } else {
        __syncthreads();
    }
}

// map_h: gate and up (EPILOGUE 2), else unused. `rows` is the fixed number of output rows (wgrad), `columns`
// the number of output columns, `k` the contracted length (not wgrad), `weights` [R] (EPILOGUE 3), `counter`
// two zeros.
// `status`: set to 1 where a wait ran out of patience, which makes the result wrong; the host looks at it (a
// bug, or a GPU that stood still for ten seconds: both sides of every barrier live in one block).
extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    grouped_gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                 const __grid_constant__ TensorMap map_d, const __grid_constant__ TensorMap map_h,
                 const int* ends, const int* segments, int count, int rows, int columns, int k,
                 const float* weights, u32* counter, u32* status, Scales scales, Slopes slopes,
                 const i64* index) {
    extern __shared__ u8 memory[];
    __shared__ Slot slots[kSlots];
    __shared__ u64 barriers[2 * STAGES + 2 * kSlots + 2];
#if GATHER
    __shared__ __align__(16) u32 from[kTurns * kBlockM];
#endif
    Shared shared;
    shared.a = (ptx::smem_u32(memory) + 1023) & ~1023u;
    shared.b = shared.a + STAGES * kBytesA;
    shared.staging = shared.b + STAGES * kBytesB;
    shared.full = ptx::smem_u32(barriers);
    shared.empty = shared.full + STAGES * 8;
    shared.slot_full = shared.empty + STAGES * 8;
    shared.slot_empty = shared.slot_full + kSlots * 8;
    shared.order = shared.slot_empty + kSlots * 8;
    shared.slots = slots;
    if (threadIdx.x == 0) {
        constexpr int kReaders = PINGPONG ? 4 : 4 * GROUPS;  // warps that read a stage or a slot
        for (int i = 0; i < STAGES; ++i) {
            ptx::mbarrier_init(shared.full + 8 * i, kCrew);
            ptx::mbarrier_init(shared.empty + 8 * i, CLUSTER * kReaders);
        }
        for (int i = 0; i < kSlots; ++i) {
            ptx::mbarrier_init(shared.slot_full + 8 * i, 1);
            ptx::mbarrier_init(shared.slot_empty + 8 * i,
                               CLUSTER * kReaders + (GATHER ? CLUSTER * GATHER : CLUSTER - 1));
        }
        for (int i = 0; i < 2; ++i) ptx::mbarrier_init(shared.order + 8 * i, 4);
        ptx::fence_barrier_init();
        ptx::prefetch_map(&map_a);
        ptx::prefetch_map(&map_b);
        ptx::prefetch_map(&map_d);
    }
    ptx::wait_for_launches();
    ptx::launch_dependents();
    meet();
    if (threadIdx.x >= GROUPS * 128) {
        ptx::fewer_registers<kProducerRegisters>();
#if CLUSTER > 1
        Pairs order{{ends, segments, count, rows, columns}};
#else
        Order order{ends, segments, count, rows, columns};
#endif
        if (threadIdx.x < GROUPS * 128 + 32 * (GATHER ? GATHER : 1)) {
            order = with_height(order);
            order.count_from(-static_cast<int>(gridDim.x / CLUSTER));
#if GATHER
            produce_gathered(&map_a, &map_b, shared, order, index, from, k, counter, status);
#elif CLUSTER > 1
            if (threadIdx.x == GROUPS * 128) produce_pairs(&map_a, &map_b, shared, order, k, counter, status);
#else
            if (threadIdx.x == GROUPS * 128) produce(&map_a, &map_b, shared, order, ends, k, counter, status);
#endif
        }
    } else {
        ptx::more_registers<kConsumerRegisters>();
        if constexpr (kHalved)
            consume_halves(&map_d, &map_h, shared, weights, status);
        else
            consume(&map_d, &map_h, shared, weights, scales, slopes, index, columns, status);
    }
    if constexpr (CLUSTER > 1) meet();  // arrivals and panels of the other block have come
}

}  // namespace gemm
