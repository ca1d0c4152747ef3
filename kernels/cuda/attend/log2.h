#pragma once

namespace kvlm::cuda {

constexpr float kLog2e = 1.4426950408889634f;  ///< converts scores to units of log2

}  // namespace kvlm::cuda
