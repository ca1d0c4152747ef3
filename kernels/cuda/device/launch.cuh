#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string_view>

#include "kernels/base/dtype.h"
#include "kernels/cuda/device/status.h"

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

/// kWidth elements side by side as floats; 4 of them lie at a multiple of their size.
template <int kWidth, class T>
__device__ inline void load_group(const T* from, float (&to)[kWidth]) {
  if constexpr (kWidth == 1) {
    to[0] = load_float(*from);
  } else if constexpr (sizeof(T) == sizeof(float)) {
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
  } else {
    alignas(8) T group[4];
    *reinterpret_cast<uint2*>(group) = *reinterpret_cast<const uint2*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = load_float(group[i]);
  }
}
template <int kWidth, class T>
__device__ inline void store_group(T* to, const float (&from)[kWidth]) {
  if constexpr (kWidth == 1) {
    *to = store_float<T>(from[0]);
  } else if constexpr (sizeof(T) == sizeof(float)) {
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
  } else {
    alignas(8) T group[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) group[i] = store_float<T>(from[i]);
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(group);
  }
}

VLM_HD inline bool is_aligned(const void* p, size_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

/// Calls `body`, [&]<class T>(T*), with a null pointer of the device's own type for `dtype`.
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

/// Lets kernels that launch_early() queues behind this one start as soon as there is room.
__device__ inline void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/// Waits until all work queued earlier is complete and visible. In a kernel of launch_early(), call
/// it in every thread before reading what earlier kernels write, and before writing. Every block
/// must call it, even without work: once this kernel ends, the next one assumes that all before it
/// is complete.
__device__ inline void wait_for_earlier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

/// Lets blocks of a kernel share so many bytes, beyond 48 KB.
template <class... Params>
void allow_shared(std::string_view op, void (*kernel)(Params...), size_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        op);
}

/// Queues a kernel that may start while the one before it ends, where the GPU can do that; captured
/// into a graph as well. Its blocks may share more than 48 KB. Throws like check_launch().
template <class... Params, class... Args>
void launch_early(std::string_view op, void (*kernel)(Params...), dim3 grid, int threads,
                  size_t shared_bytes, Stream& stream, Args... args) {
  if (shared_bytes > 0) allow_shared(op, kernel, shared_bytes);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = native(stream);
  config.attrs = &early;
  config.numAttrs = stream.queue().overlaps_kernels() ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), op);
}

/// The same without memory that the blocks share beyond what the kernel names.
template <class... Params, class... Args>
void launch_early(std::string_view op, void (*kernel)(Params...), dim3 grid, int threads,
                  Stream& stream, Args... args) {
  launch_early(op, kernel, grid, threads, size_t{0}, stream, args...);
}

}  // namespace kvlm::cuda
