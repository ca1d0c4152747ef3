#pragma once

#include <fmt/format.h>

#include <string_view>

#include "kernels/base/error.h"

namespace kvlm::cuda {

/// What every CUDA entry point of a build without CUDA does.
[[noreturn]] inline void refuse(std::string_view op) {
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: this build has no CUDA backend; use --device cpu, or build with "
                          "-DKVLM_CUDA=ON",
                          op));
}

}  // namespace kvlm::cuda
