#pragma once

#include "kernels/cuda/dense/prompt_rows.cuh"
#include "kernels/cuda/device/matrix_units.cuh"

// What the kernels that multiply queries and keys of a prompt on the tensor cores have in common.
namespace kvlm::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;

/// How f32 becomes T, and what multiplies pairs of T.
template <class T>
struct Multiplier;

template <>
struct Multiplier<__half> {
  static __device__ uint32_t pair(float x, float y) {
    const __half2 both = __floats2half2_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
  /// NaN stays NaN.
  static __device__ float clamp(float x) {
    constexpr float kLargest = 65504.0f;
    return x > kLargest ? kLargest : x < -kLargest ? -kLargest : x;
  }
  static __device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    cuda::mma(d, a[0], a[1], a[2], a[3], b0, b1);
  }
};

template <>
struct Multiplier<__nv_bfloat16> {
  static __device__ uint32_t pair(float x, float y) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
  static __device__ float clamp(float x) { return x; }
  static __device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

/// Elements [channel, channel + 8) of a row as floats; zeros from head_dim on. 16 bytes at a time
/// where the row's place in memory allows it.
__device__ inline void load_eight(const LocatedRow& row, int channel, int head_dim,
                                  float (&to)[8]) {
  const int bytes = size_of(row.dtype);
  const std::byte* from = row.data + channel * bytes;
  if (channel + 8 > head_dim || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      to[i] = channel + i < head_dim ? element(row.data, row.dtype, channel + i) : 0.0f;
    }
    return;
  }
  uint4 words[2] = {*reinterpret_cast<const uint4*>(from), {}};
  if (bytes == 4) words[1] = *reinterpret_cast<const uint4*>(from + 16);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    to[i] = element(reinterpret_cast<const std::byte*>(words), row.dtype, i);
  }
}

template <class T>
__device__ uint4 round_eight(const float (&x)[8]) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] =
        Multiplier<T>::pair(Multiplier<T>::clamp(x[2 * i]), Multiplier<T>::clamp(x[2 * i + 1]));
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

__device__ inline void copy_16_bytes(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/// The length of rows in tiles: the smallest that the tensor cores' kernels have.
inline int padded(int head_dim) {
  for (const int dim : {32, 64, 96, 128}) {
    if (head_dim <= dim) return dim;
  }
  return 256;
}

/// Columns that attention multiplies at a time: the rows of its tiles.
constexpr int columns_at_a_time(int padded_dim) { return padded_dim > 128 ? 32 : 64; }

/// Rows as tiles (kv_heads, tiles, parts, tile_columns, padded_dim) of T, of each tile first its
/// keys and, where gridDim.z is 2, then its values; what is padding is zero.
template <class T>
__global__ void round_rows(PromptRows rows, int64_t columns, int64_t tiles, int tile_columns,
                           int padded_dim, T* to) {
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int chunks = padded_dim / 8;  // of a row
  const int64_t column = chunk / chunks;
  const int64_t tile = column / tile_columns;
  if (tile >= tiles) return;
  const int channel = static_cast<int>(chunk % chunks) * 8;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int part = static_cast<int>(blockIdx.z);  // 0: keys, 1: values
  float x[8] = {};
  if (column < columns) {
    load_eight(locate(rows, kv_head, column, part == 1), channel, rows.head_dim, x);
  }
  const int64_t row =
      ((kv_head * tiles + tile) * gridDim.z + part) * tile_columns + column % tile_columns;
  *reinterpret_cast<uint4*>(to + row * padded_dim + channel) = round_eight<T>(x);
}

}  // namespace kvlm::cuda
