#pragma once

#include <cstddef>

namespace kvlm {

/// How often this test program has called operator new so far, from any thread: the difference
/// around a warmed-up call is what the call allocates.
size_t allocations() noexcept;

}  // namespace kvlm
