// Grouped GEMM for Hopper, in bf16 or (forward) fp8, specialised by defines:
//   LAYOUT    a number of `Layout`:
//             forward   D[r, n] = sum_k A[r, k] B[e, n, k]    rows of expert e, any number
//             dgrad     D[r, n] = sum_k A[r, k] B[e, k, n]
//             wgrad     D[e, m, n] = sum_r A[r, m] B[r, n]    over the rows of expert e
//   EPILOGUE  a number of `Epilogue`:
//             plain
//             SwiGLU (B holds gate rows, then up rows; D gets silu(gate) * up), or that stores both as well
//             rows multiplied by their weight
//             SwiGLU's gradient: gemm/backward.cuh
//             added to a bf16 or a float32 D in L2 (wgrad)
//   FP8       1: e4m3 with block scales, SwiGLU leaves as fp8; WAVE columns of a product: gemm/fp8.cuh
//   GROUPS    consumer warpgroups, of BLOCKS_M 64-row blocks each
//   PINGPONG  0: the groups share a tile of 64 * GROUPS rows
//             1: each group has tiles of its own (64 * BLOCKS_M rows) in turn
//   WIDE      1: operands that are contiguous along m or n are multiples of 64 wide, and one instruction
//             loads all their panels of 64
//   CLUSTER   2: two blocks work on two row tiles of the same columns, and each loads half of B for both
//             (forward, dgrad; tiles shared by the groups; the same bits): gemm/pairs.cuh
//   BOX       rows of A that an instruction loads at most (bf16, forward and dgrad)
//   GATHER    warps that ask for the rows of A one by one, through an index (forward); 0: rows are in order:
//             gemm/gather.cuh
//   QUANTISES 1: rows of A come from warps that quantise them (fp8, one group; not in this kernel):
//             ffn/quantised.cuh
//   BLOCK_N   columns of a tile; STAGES of the load ring; PANELS of store staging a group
//   GROUP_M   row tiles side by side: gemm/scheduler.cuh
// Both enums are gemm.py's (gemm/kinds.cuh is made from them). What the kernel does is `run`: gemm/run.cuh.
#include "gemm/cut.cuh"
#include "gemm/parts.cuh"
#include "gemm/run.cuh"

namespace gemm {

// Gate and up tell of their tiles where `progress` is given (gemm/parts.cuh). Pairs in fp8 do not: it costs
// them more of both products, which are long, than the half a tile that it gains (benchmarks/tiles.py).
constexpr bool kTells = C::kForward && C::kSwiglu && !(C::kFp8 && C::kCluster > 1);

// map_h: gate and up, kept or their gradients, else unused. The others: see Problem.
extern "C" __global__ void __launch_bounds__(C::kThreads, 1)
    grouped_gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                 const __grid_constant__ TensorMap map_d, const __grid_constant__ TensorMap map_h,
                 const int* ends, const int* segments, int count, int rows, int columns, int k,
                 const float* weights, u32* counter, u32* status, Scales scales, Slopes slopes,
                 const i64* index, u32* progress) {
    extern __shared__ u8 memory[];
    __shared__ Slot slots[kSlots];
    __shared__ u64 barriers[2 * C::kStages + 2 * kSlots + 2];
#if GATHER
    __shared__ __align__(16) u32 from[C::kTurns * C::kBlockM];
#else
    u32* from = nullptr;
#endif
    const Shared<C> shared = set_up<C>(memory, slots, barriers, from, map_a, map_b, map_d);
    __shared__ Done done;
    if constexpr (kTells) clear(done);
    ptx::wait_for_launches();
    ptx::launch_dependents();
    meet<C>();
    const Problem problem{&map_a, &map_b, ends, segments, count, rows, columns, k, weights, counter, status,
                          scales, slopes, index};
    if constexpr (kTells)
        run<C>(problem, shared, Always{}, NoteTiles<C>{&map_d, &map_h, done, count},
               EveryBlock<C::kCluster>{}, TellParts<C>{done, progress});
    else
        run<C>(problem, shared, Always{}, StoreTiles{&map_d, &map_h});
}

}  // namespace gemm
