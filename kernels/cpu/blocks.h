#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/base/device.h"

namespace kvlm::cpu {

/// Runs body(begin, end) over [0, count) in blocks of about 16 Ki elements, where one index costs
/// `elements_each`: a few microseconds a block, so that small work never wakes a thread. The blocks
/// depend on the sizes alone, not on the number of threads.
template <class Body>
void for_blocks(Stream& stream, size_t count, size_t elements_each, Body&& body) {
  constexpr size_t kBlockElements = size_t{1} << 14;
  const size_t block = std::max<size_t>(1, kBlockElements / std::max<size_t>(1, elements_each));
  stream.pool().parallel_for((count + block - 1) / block, [&](size_t task, int) {
    body(task * block, std::min(count, (task + 1) * block));
  });
}

}  // namespace kvlm::cpu
