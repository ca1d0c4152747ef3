#pragma once

#include <string>

namespace kvlm {

/// The instruction set that the CPU kernels use on this machine: "AVX3_DL", "AVX2", ...
std::string cpu_target();

}  // namespace kvlm
