#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/cuda/status.h"

// What every .cu file needs to start a kernel.
namespace kvlm::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

__device__ inline float load_float(float x) { return x; }
__device__ inline float load_float(__half x) { return __half2float(x); }
__device__ inline float load_float(__nv_bfloat16 x) { return __bfloat162float(x); }

/// Element `i` of a row.
__device__ inline float element(const std::byte* row, DType dtype, int i) {
  switch (dtype) {
    case DType::kF16:
      return __half2float(reinterpret_cast<const __half*>(row)[i]);
    case DType::kBF16:
      return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[i]);
    default:
      return reinterpret_cast<const float*>(row)[i];
  }
}

template <class T>
__device__ inline T store_float(float x);
template <>
__device__ inline float store_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half store_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 store_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

/// Calls `body` with a null pointer of the device's own type for `dtype`.
template <class Body>
void with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kF16:
      return body(static_cast<__half*>(nullptr));
    case DType::kBF16:
      return body(static_cast<__nv_bfloat16*>(nullptr));
    default:
      return body(static_cast<float*>(nullptr));
  }
}

template <class T>
struct TypeOf;
template <class T>
struct TypeOf<T*> {
  using Type = T;
};

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

}  // namespace kvlm::cuda
