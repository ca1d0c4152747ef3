#pragma once

#include <cstddef>
#include <span>

#include "kvcache/engine/inspector.h"

namespace kvlm {

/// Removes the arrival number of the newest token: a step that has not ended assigned it.
///   came  (places,) WeighedRows.came of a KV head
void forget_newest(std::span<int> came);

/// Sorts tokens from memory order into arrival order.
///   rows    tokens of all places; `tags` already by arrival number, later tokens are text
///   came    as above, without the newest token
///   newest  the newest token is included, in the place without a number
void put_in_order(HeadRows& rows, std::span<const int> came, bool newest, size_t head_dim);

}  // namespace kvlm
