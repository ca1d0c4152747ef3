#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvlm {

/// A tensor of a file in any element type.
struct StoredTensor {
  std::string dtype;  ///< the file's word: "I32", "F8_E4M3", ...
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;  ///< of any alignment
  size_t bytes = 0;
  std::shared_ptr<const void> owner;
};

}  // namespace kvlm
