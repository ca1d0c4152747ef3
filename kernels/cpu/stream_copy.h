#pragma once

#include <cstddef>

namespace kvlm::cpu {

/// Copies `bytes` bytes past the caches, for a device that reads them next: what lies changed in
/// the caches of many cores, a GPU is given at little more than half the rate of its bus. `to` is a
/// multiple of 64. The ranges may not overlap.
void stream_copy(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace kvlm::cpu
