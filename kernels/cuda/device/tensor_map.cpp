#include "kernels/cuda/device/tensor_map.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "kernels/base/error.h"
#include "kernels/cuda/device/status.h"

namespace kvlm::cuda {

namespace {

constexpr const char* kEncode = "cuTensorMapEncodeTiled";

/// Of the driver, which this program does not link.
decltype(&cuTensorMapEncodeTiled) find_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status{};
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion(kEncode, &found, 12000, cudaEnableDefault, &status),
        kEncode);
#else
  check(cudaGetDriverEntryPoint(kEncode, &found, cudaEnableDefault, &status), kEncode);
#endif
  if (found == nullptr || status != cudaDriverEntryPointSuccess) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("the GPU's driver has no {}; update it to CUDA 12 or newer", kEncode));
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
}

}  // namespace

CUtensorMap map_heads(const HeadGrid& grid, int box_channels, int box_rows) {
  static const auto encode = find_encode();
  constexpr cuuint64_t kBytes = 2;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(grid.channels),
                              static_cast<cuuint64_t>(grid.rows),
                              static_cast<cuuint64_t>(grid.heads)};
  const cuuint64_t strides[] = {kBytes * static_cast<cuuint64_t>(grid.row_stride),
                                kBytes * static_cast<cuuint64_t>(grid.channels)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_channels),
                            static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map{};
  const CUresult result =
      encode(&map, grid.type, 3, const_cast<void*>(grid.data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             box_channels == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_32B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(
        ErrorCode::kDevice,
        fmt::format("{} refuses {} rows of {} heads of {} channels, {} elements apart, with "
                    "status {}; please report this",
                    kEncode, grid.rows, grid.heads, grid.channels, grid.row_stride,
                    static_cast<int>(result)));
  }
  return map;
}

}  // namespace kvlm::cuda
