#pragma once

#include <string_view>

#include "kernels/cuda/device/status.h"

namespace kvlm::cuda {

/// Whether the current GPU runs the products of warpgroup.cuh: of compute capability 9.x alone.
/// Throws Error naming `op` if the driver does not say.
inline bool has_warpgroups(std::string_view op) {
  return device_attribute(cudaDevAttrComputeCapabilityMajor, op) == 9;
}

}  // namespace kvlm::cuda
