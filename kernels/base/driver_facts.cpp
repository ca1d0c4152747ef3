#include "kernels/base/driver_facts.h"

#include <fmt/format.h>

namespace kvlm::cuda {

std::string why_none(const DriverFacts& facts) {
  if (facts.driver == 0) return "no CUDA driver is installed";
  if (facts.too_old) {
    return fmt::format("the driver serves CUDA {}.{} and this program needs {}.{}; update it",
                       facts.driver / 1000, facts.driver % 1000 / 10, facts.needed / 1000,
                       facts.needed % 1000 / 10);
  }
  if (!facts.failure.empty()) return fmt::format("the driver says \"{}\"", facts.failure);
  return "the driver reports no GPU";
}

}  // namespace kvlm::cuda
