#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/base/device.h"
#include "kernels/base/thread_pool.h"

namespace kvlm {

/// KV heads of a step from which on the stream's threads share the bookkeeping: below, waking them
/// takes longer. What they do does not depend on who does it.
inline constexpr size_t kSharedHeads = 1024;

/// Calls body(begin, end) for ranges that make up [0, count), where a sequence is some work for
/// each of its KV heads.
template <class Body>
void for_sequences(size_t count, size_t kv_heads, Stream& stream, const Body& body) {
  const auto threads = static_cast<size_t>(stream.pool().threads());
  if (threads == 1 || count * kv_heads < kSharedHeads) return body(size_t{0}, count);
  const size_t ranges = std::min(count, 2 * threads);  // some threads come late
  stream.pool().parallel_for(
      ranges, [&](size_t i, int) { body(count * i / ranges, count * (i + 1) / ranges); });
}

}  // namespace kvlm
