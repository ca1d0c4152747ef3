#pragma once

#include <cstddef>
#include <string>

namespace kvlm {

/// "12.30 MB" (1e6): bytes as messages and tables show them.
std::string human_bytes(size_t bytes);

}  // namespace kvlm
