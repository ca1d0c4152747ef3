#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "kernels/cuda/status.h"

namespace kvlm::cuda {

/// Whether the current GPU runs the products of warpgroup.cuh: of compute capability 9.x alone.
/// Throws Error naming `op` if the driver does not say.
inline bool has_warpgroups(std::string_view op) {
  int device = 0;
  int major = 0;
  check(cudaGetDevice(&device), op);
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), op);
  return major == 9;
}

}  // namespace kvlm::cuda
