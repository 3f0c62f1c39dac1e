// Instructions of tensor cores from compute capability 8.0 on: tiles that threads ask for in pieces of 16
// bytes, matrices in a warp's registers. PTX ISA, sections cp.async, ldmatrix and mma (m16n8k16).
#pragma once
#include "ptx/exchange.cuh"

namespace ptx {

// 16 bytes from memory to shared memory, of this thread; zeros where not `wanted`, and then `from` is not
// looked at. It is there after copy_commit and copy_wait.
__device__ __forceinline__ void copy_async_or_zero(u32 to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16u : 0u)
                 : "memory");
}

// load_matrix_x4 of four matrices transposed: lane l's word of one holds rows 2 (l % 4) and the next of
// column l / 4.
__device__ __forceinline__ void load_matrix_x4_transposed(u32 address, u32 (&m)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

// D[16 x 8] += A[16 x 16] B[16 x 8] of a warp, A and B bf16. With g = lane / 4 and t = lane % 4: d holds
// columns 2t and 2t + 1 of row g, then of row g + 8; a[i] holds k = 2t and 2t + 1, plus 8 for i > 1, of row
// g, plus 8 for odd i; b0 and b1 hold the same k, and those plus 8, of column g.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace ptx
