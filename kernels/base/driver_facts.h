#pragma once

#include <string>

namespace kvlm::cuda {

/// What is found where a driver should show its GPUs. Versions as CUDA writes them: 13020 is 13.2.
struct DriverFacts {
  int driver = 0;        ///< newest CUDA that the driver serves; 0 without a driver
  int needed = 0;        ///< CUDA that this program was built with
  bool too_old = false;  ///< the driver says so; how far it reaches back is its own business
  std::string failure;   ///< the driver's words for any other failure, or empty
};

/// Why there is no GPU, as a clause: "no CUDA driver is installed".
std::string why_none(const DriverFacts& facts);

}  // namespace kvlm::cuda
