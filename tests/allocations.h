#pragma once

#include <cstddef>

namespace kvlm {

/// How often this test program has asked for memory so far, from any thread and by whatever way
/// (malloc, aligned_alloc, operator new; under a sanitizer operator new alone): the difference
/// around a warmed-up call is what the call allocates.
size_t allocations() noexcept;

}  // namespace kvlm
