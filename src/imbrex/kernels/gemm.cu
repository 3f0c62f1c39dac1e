// Grouped GEMM in bf16 for Hopper, specialised by defines:
//   LAYOUT    0 forward   D[r, n] = sum_k A[r, k] B[e, n, k]    rows of expert e, any number
//             1 dgrad     D[r, n] = sum_k A[r, k] B[e, k, n]
//             2 wgrad     D[e, m, n] = sum_r A[r, m] B[r, n]    over the rows of expert e
//   EPILOGUE  0 plain, 1 SwiGLU (B holds gate rows, then up rows; D gets silu(gate) * up),
//             2 SwiGLU that stores gate and up as well, 3 rows multiplied by their weight
//   CONSUMERS 1 or 2 warpgroups of 64 rows each; BLOCK_N columns a tile; STAGES; GROUP_M (see gemm_scheduler.cuh)
//
// Timeline of one block (one an SM, persistent): one thread of the producer warpgroup fills a ring of STAGES
// buffers by TMA, across tile borders. Each consumer warpgroup owns 64 rows of the tile and never waits for the
// other: while one converts and stores its rows, the other has the tensor cores for itself, and the ring lets it
// run ahead by up to STAGES steps. Stores leave through two 8 KiB buffers a warpgroup by TMA and drain during the
// next tile. A warpgroup whose 64 rows are all past the end skips its products (the tail of an expert then costs a
// half tile).
//
// Ragged ends without touching a row that is not the expert's: the descriptor has three dimensions (column, y < H,
// z <= R), rows and z both one row apart, and its base lies H rows before the tensor. A box of H rows at
// (y, z) = (H - v, row + v) covers rows row .. row + v - 1 and nothing else, since y ends at H: loads give zeros
// for the others and stores skip them. H = 128, row = 258, v = 42: y = 86 .. 127 are z + y - H = 258 .. 299.
#include "ptx.cuh"
#include "gemm_scheduler.cuh"

constexpr int kBlockM = 64 * CONSUMERS;
constexpr int kBlockN = BLOCK_N;
constexpr int kBlockK = 64;
constexpr bool kForward = LAYOUT == 0, kDgrad = LAYOUT == 1, kWgrad = LAYOUT == 2;
constexpr bool kSwiglu = EPILOGUE == 1 || EPILOGUE == 2;
constexpr u32 kBytesA = kBlockM * kBlockK * 2, kBytesB = kBlockN * kBlockK * 2;
constexpr u32 kPanel = 64 * 64 * 2;  // 64 rows of 128 bytes
constexpr int kOutputs = (kSwiglu ? kBlockN / 2 : kBlockN) / 64;
constexpr int kProducerRegisters = 40, kConsumerRegisters = CONSUMERS == 2 ? 232 : 240;

using Order = Schedule<kBlockM, kSwiglu ? kBlockN / 2 : kBlockN, GROUP_M, kWgrad>;

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

struct Shared {
    u32 a, b, staging, full, empty;
    __device__ __forceinline__ u32 a_of(int stage) const { return a + stage * kBytesA; }
    __device__ __forceinline__ u32 b_of(int stage) const { return b + stage * kBytesB; }
    __device__ __forceinline__ u32 full_of(int stage) const { return full + stage * 8; }
    __device__ __forceinline__ u32 empty_of(int stage) const { return empty + stage * 8; }
};

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }

// Steps of kBlockK of a tile, and where its first k lies.
__device__ __forceinline__ int steps_of(const Tile& tile, const int* ends, int k, int& k_begin, int& k_count) {
    k_begin = kWgrad && tile.expert > 0 ? ends[tile.expert - 1] : 0;
    k_count = kWgrad ? ends[tile.expert] - k_begin : k;
    return (k_count + kBlockK - 1) / kBlockK;
}

__device__ __forceinline__ void load_step(const TensorMap* map_a, const TensorMap* map_b, const Shared& shared, int stage,
                                          const Tile& tile, int k, int k_left) {
    const u32 full = shared.full_of(stage), a = shared.a_of(stage), b = shared.b_of(stage);
    ptx::mbarrier_expect(full, kBytesA + kBytesB);
    if constexpr (kWgrad) {
        const int v = least(k_left, kBlockK);
#pragma unroll
        for (int i = 0; i < CONSUMERS; ++i) ptx::tma_load_3d(a + i * kPanel, map_a, full, tile.row + 64 * i, kBlockK - v, k + v);
#pragma unroll
        for (int i = 0; i < kBlockN / 64; ++i)
            ptx::tma_load_3d(b + i * kPanel, map_b, full, tile.column + 64 * i, kBlockK - v, k + v);
        return;
    }
    const int v = least(tile.rows, kBlockM);
    ptx::tma_load_3d(a, map_a, full, k, kBlockM - v, tile.row + v);
    if constexpr (kDgrad) {
#pragma unroll
        for (int i = 0; i < kBlockN / 64; ++i) ptx::tma_load_3d(b + i * kPanel, map_b, full, tile.column + 64 * i, k, tile.expert);
    } else if constexpr (kSwiglu) {
        ptx::tma_load_3d(b, map_b, full, k, tile.column, 2 * tile.expert);
        ptx::tma_load_3d(b + kBytesB / 2, map_b, full, k, tile.column, 2 * tile.expert + 1);
    } else {
        ptx::tma_load_3d(b, map_b, full, k, tile.column, tile.expert);
    }
}

__device__ __forceinline__ void multiply_step(float (&d)[kBlockN / 2], u32 a, u32 b, u32 first) {
    constexpr u32 kStepA = kWgrad ? 16 * 128 : 32, kStepB = kForward ? 32 : 16 * 128;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockK / 16; ++i)
        ptx::wgmma_bf16<kBlockN, kWgrad, !kForward>(d, ptx::wgmma_operand(a + i * kStepA, kPanel),
                                                    ptx::wgmma_operand(b + i * kStepB, kPanel), !(first && i == 0));
    ptx::wgmma_commit();
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// One 64 x 64 panel from registers to swizzled shared memory; `value(i)` gives the accumulator i of the panel (0..31).
template <typename Value>
__device__ __forceinline__ void write_panel(u32 panel, int warp, int lane, Value value) {
    const int row = 16 * warp + (lane & 7) + 8 * ((lane >> 3) & 1);
    const u32 line = panel + row * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 unit = (2 * i + (lane >> 4)) ^ (row & 7);
        ptx::store_matrix_x4(line + unit * 16, ptx::pack_bf16(value(8 * i), value(8 * i + 1)),
                             ptx::pack_bf16(value(8 * i + 2), value(8 * i + 3)), ptx::pack_bf16(value(8 * i + 4), value(8 * i + 5)),
                             ptx::pack_bf16(value(8 * i + 6), value(8 * i + 7)));
    }
}

// Panels leave through two buffers in turn: before a buffer is written again its last store must have been read.
struct Stores {
    u32 staging;
    int group, thread, turn = 0;
    __device__ __forceinline__ u32 begin() {
        if (thread == 0) ptx::bulk_wait_read<1>();
        ptx::named_barrier(1 + group, 128);
        return staging + (turn++ & 1) * kPanel;
    }
    template <typename Store>
    __device__ __forceinline__ void finish(Store store) {
        ptx::fence_async_shared();
        ptx::named_barrier(1 + group, 128);
        if (thread == 0) {
            store();
            ptx::bulk_commit();
        }
    }
};

__device__ __forceinline__ void store_tile(const float (&d)[kBlockN / 2], const TensorMap* map_d, const TensorMap* map_h,
                                           Stores& stores, const Tile& tile, const float* weights) {
    const int warp = stores.thread / 32, lane = stores.thread % 32;
    const int row = tile.row + 64 * stores.group, rows = least(tile.rows - 64 * stores.group, 64);
    float scale[2] = {1.f, 1.f};
    if constexpr (EPILOGUE == 3) {
        const int mine = 16 * warp + lane / 4;
        scale[0] = mine < rows ? weights[row + mine] : 0.f;
        scale[1] = mine + 8 < rows ? weights[row + mine + 8] : 0.f;
    }
#pragma unroll
    for (int c = 0; c < kOutputs; ++c) {
        const int column = tile.column + 64 * c;
        if (64 * c >= tile.columns) break;
        u32 panel = stores.begin();
        write_panel(panel, warp, lane, [&](int i) {
            if constexpr (kSwiglu) return silu(d[32 * c + i]) * d[kBlockN / 4 + 32 * c + i];
            if constexpr (EPILOGUE == 3) return d[32 * c + i] * scale[(i >> 1) & 1];
            return d[32 * c + i];
        });
        stores.finish([&] {
            if constexpr (kWgrad)
                ptx::tma_store_3d(map_d, panel, column, row, tile.expert);
            else
                ptx::tma_store_3d(map_d, panel, column, 64 - rows, row + rows);
        });
        if constexpr (EPILOGUE == 2) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                panel = stores.begin();
                write_panel(panel, warp, lane, [&](int i) { return d[half * (kBlockN / 4) + 32 * c + i]; });
                stores.finish([&] { ptx::tma_store_4d(map_h, panel, column, half, 64 - rows, row + rows); });
            }
        }
    }
}

__device__ __forceinline__ void produce(const TensorMap* map_a, const TensorMap* map_b, const Shared& shared, Order order,
                                        const int* ends, int k) {
    Ring ring;
    Tile tile;
    u32 patience = ptx::kPatience;
    for (int number = blockIdx.x; order.seek(number, tile); number += gridDim.x) {
        int k_begin, k_count;
        const int steps = steps_of(tile, ends, k, k_begin, k_count);
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ring.next()) {
            ptx::mbarrier_wait(shared.empty_of(ring.stage), ring.phase ^ 1, patience);
            load_step(map_a, map_b, shared, ring.stage, tile, k_begin + step * kBlockK, k_count - step * kBlockK);
        }
    }
}

__device__ __forceinline__ void consume(const TensorMap* map_d, const TensorMap* map_h, const Shared& shared, Order order,
                                        const int* ends, int k, const float* weights) {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const u32 rows_a = group * kPanel;  // 64 rows of 128 bytes in either layout of A
    Stores stores{shared.staging + group * 2 * kPanel, group, thread};
    Ring ring;
    Tile tile;
    u32 patience = ptx::kPatience;
    for (int number = blockIdx.x; order.seek(number, tile); number += gridDim.x) {
        int k_begin, k_count;
        const int steps = steps_of(tile, ends, k, k_begin, k_count);
        if (tile.rows <= 64 * group) {
#pragma unroll 1
            for (int step = 0; step < steps; ++step, ring.next()) {
                ptx::mbarrier_wait(shared.full_of(ring.stage), ring.phase, patience);
                if (lane == 0) ptx::mbarrier_arrive(shared.empty_of(ring.stage));
            }
            continue;
        }
        float d[kBlockN / 2];
        if (kWgrad && steps == 0)
#pragma unroll
            for (int i = 0; i < kBlockN / 2; ++i) d[i] = 0.f;
        int last = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ring.next()) {
            ptx::mbarrier_wait(shared.full_of(ring.stage), ring.phase, patience);
            multiply_step(d, shared.a_of(ring.stage) + rows_a, shared.b_of(ring.stage), step == 0);
            ptx::wgmma_wait<1>();
            if (step > 0 && lane == 0) ptx::mbarrier_arrive(shared.empty_of(last));
            last = ring.stage;
        }
        ptx::wgmma_wait<0>();
        if (steps > 0 && lane == 0) ptx::mbarrier_arrive(shared.empty_of(last));
        store_tile(d, map_d, map_h, stores, tile, weights);
    }
    if (thread == 0) ptx::bulk_wait<0>();
}

// map_h: gate and up (EPILOGUE 2), else unused. `rows` is the fixed number of output rows (wgrad), `columns` the
// number of output columns, `k` the contracted length (not wgrad), `weights` [R] (EPILOGUE 3).
extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    grouped_gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                 const __grid_constant__ TensorMap map_d, const __grid_constant__ TensorMap map_h, const int* ends,
                 const int* segments, int count, int rows, int columns, int k, const float* weights) {
    extern __shared__ u8 memory[];
    const u32 base = (ptx::smem_u32(memory) + 1023) & ~1023u;
    Shared shared;
    shared.a = base;
    shared.b = shared.a + STAGES * kBytesA;
    shared.staging = shared.b + STAGES * kBytesB;
    shared.full = shared.staging + CONSUMERS * 2 * kPanel;
    shared.empty = shared.full + STAGES * 8;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            ptx::mbarrier_init(shared.full_of(stage), 1);
            ptx::mbarrier_init(shared.empty_of(stage), 4 * CONSUMERS);
        }
        ptx::fence_barrier_init();
        ptx::prefetch_map(&map_a);
        ptx::prefetch_map(&map_b);
        ptx::prefetch_map(&map_d);
    }
    __syncthreads();
    const Order order{ends, segments, count, rows, columns};
    if (threadIdx.x >= CONSUMERS * 128) {
        ptx::fewer_registers<kProducerRegisters>();
        if (threadIdx.x == CONSUMERS * 128) produce(&map_a, &map_b, shared, order, ends, k);
    } else {
        ptx::more_registers<kConsumerRegisters>();
        consume(&map_d, &map_h, shared, order, ends, k, weights);
    }
}
