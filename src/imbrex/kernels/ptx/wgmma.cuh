// The tensor cores' instructions: 64 x N x 16 of bf16 or 64 x N x 32 of e4m3, accumulated in fp32.
#pragma once
#include "ptx/base.cuh"

namespace ptx {

// Shared-memory operand with 128-byte swizzle. `address` is 1024-byte aligned plus a multiple of 32 bytes.
// K-major (64 elements of k = 128 bytes a row): groups of 8 rows are 1024 bytes apart; `leading` is not used.
// MN-major (64 elements of m or n = 128 bytes a row, one row per k): groups of 8 k are 1024 bytes apart and
// blocks of 64 m or n are `leading` bytes apart.
constexpr u64 kOperandHigh = (1ull << 62) | (u64(1024 >> 4) << 32);
__device__ __forceinline__ u64 wgmma_operand(u32 address, u32 leading) {
    return kOperandHigh | (u64(leading >> 4) << 16) | ((address & 0x3ffffu) >> 4);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// d[N / 2] += (or =, where `add` is 0) A[64 x 16] B[16 x N]. d[4 i + j] holds row 16 warp + lane / 4 + 8 (j /
// 2), column 8 i + 2 (lane % 4) + j % 2.
#define IMBREX_WGMMA(N, REGISTERS, OPERANDS, A, B, ADD, TRANS_A, TRANS_B)                              \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " ADD                                             \
                 ", 0;\n"                                                                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS "}, " A ", " B \
                 ", p, 1, 1, " TRANS_A ", " TRANS_B ";\n}"                                             \
                 : OPERANDS                                                                            \
                 : "l"(a), "l"(b), "r"(add), "n"(kTransA), "n"(kTransB))

// clang-format off
#define IMBREX_R0 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define IMBREX_R1 \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define IMBREX_R2 \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define IMBREX_R3 \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// clang-format on
#define IMBREX_F8(i)                                                                            \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define IMBREX_D0 IMBREX_F8(0), IMBREX_F8(8), IMBREX_F8(16), IMBREX_F8(24)
#define IMBREX_D1 , IMBREX_F8(32), IMBREX_F8(40), IMBREX_F8(48), IMBREX_F8(56)
#define IMBREX_D2 , IMBREX_F8(64), IMBREX_F8(72), IMBREX_F8(80), IMBREX_F8(88)
#define IMBREX_D3 , IMBREX_F8(96), IMBREX_F8(104), IMBREX_F8(112), IMBREX_F8(120)

template <int kN, int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_bf16(float (&d)[kN / 2], u64 a, u64 b, u32 add) {
    if constexpr (kN == 64)
        IMBREX_WGMMA(64, IMBREX_R0, IMBREX_D0, "%32", "%33", "%34", "%35", "%36");
    else if constexpr (kN == 128)
        IMBREX_WGMMA(128, IMBREX_R0 IMBREX_R1, IMBREX_D0 IMBREX_D1, "%64", "%65", "%66", "%67", "%68");
    else if constexpr (kN == 192)
        IMBREX_WGMMA(192, IMBREX_R0 IMBREX_R1 IMBREX_R2, IMBREX_D0 IMBREX_D1 IMBREX_D2, "%96", "%97", "%98",
                     "%99", "%100");
    else
        IMBREX_WGMMA(256, IMBREX_R0 IMBREX_R1 IMBREX_R2 IMBREX_R3, IMBREX_D0 IMBREX_D1 IMBREX_D2 IMBREX_D3,
                     "%128", "%129", "%130", "%131", "%132");
}

// The same with e4m3 operands, 64 x N x 32, K-major both.
template <int kN>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[kN / 2], u64 a, u64 b, u32 add) {
    if constexpr (kN == 64)
        asm volatile(
            "{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" IMBREX_R0 "}, %32, %33, p, 1, 1;\n}"
            : IMBREX_D0
            : "l"(a), "l"(b), "r"(add));
    else
        asm volatile(
            "{\n .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" IMBREX_R0 IMBREX_R1
            "}, %64, %65, p, 1, 1;\n}"
            : IMBREX_D0 IMBREX_D1
            : "l"(a), "l"(b), "r"(add));
}

// Keeps reads of d behind the wait before it.
template <int kCount>
__device__ __forceinline__ void wgmma_results(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

}  // namespace ptx
