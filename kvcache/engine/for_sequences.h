#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/base/device.h"
#include "kernels/base/thread_pool.h"

namespace kvlm {

/// From this many KV heads in a step, the pool's threads share the bookkeeping. With fewer, waking
/// them takes longer. Results do not depend on the number of threads.
inline constexpr size_t kSharedHeads = 1024;

/// Calls body(begin, end) for ranges that cover [0, count). Work is proportional to the KV heads
/// per sequence.
template <class Body>
void for_sequences(size_t count, size_t kv_heads, Stream& stream, const Body& body) {
  const auto threads = static_cast<size_t>(stream.pool().threads());
  if (threads == 1 || count * kv_heads < kSharedHeads) return body(size_t{0}, count);
  const size_t ranges = std::min(count, 2 * threads);  // some threads start late
  stream.pool().parallel_for(
      ranges, [&](size_t i, int) { body(count * i / ranges, count * (i + 1) / ranges); });
}

}  // namespace kvlm
