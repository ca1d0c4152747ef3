#pragma once

#include <cstdint>

// Instructions of the tensor cores, and what brings their operands from shared memory.
namespace kvlm::cuda {

/// d (16 x 8) += a (16 x 16) b (16 x 8), halves in, floats out. With row = warp_lane / 4 and
/// quarter = warp_lane % 4, a thread holds a[0], a[2]: columns (2 quarter, + 1) and 8 further of
/// `row`, a[1], a[3]: the same of row + 8; b0, b1: the same, of column `row`; d[0], d[1]: columns
/// (2 quarter, + 1) of `row`, d[2], d[3]: of row + 8.
__device__ inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                           uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// Four matrices of 8 rows of 16 bytes, whose addresses the threads of the warp have: each thread
/// gets the 16-bit elements 2 quarter and 2 quarter + 1 of its row of each.
__device__ inline void load_matrices(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}

/// The same by columns: each thread gets 16-bit column `row` of rows 2 quarter and 2 quarter + 1.
__device__ inline void load_columns(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}

}  // namespace kvlm::cuda
