#pragma once

#include <string>
#include <string_view>

#include "kernels/base/error.h"

namespace kvlm::cuda {

/// What an operation does that the CUDA backend does not have yet.
[[noreturn]] inline void not_yet(std::string_view op) {
  throw Error(ErrorCode::kUnsupported,
              std::string(op) + " is not built for CUDA yet; use --device cpu");
}

}  // namespace kvlm::cuda
