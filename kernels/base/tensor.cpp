#include "kernels/base/tensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace kvlm {

std::string Shape::str() const {
  return fmt::format("({})", fmt::join(dims_.begin(), dims_.begin() + rank_, ", "));
}

}  // namespace kvlm
