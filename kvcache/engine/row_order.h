#pragma once

#include <cstddef>
#include <span>

#include "kvcache/engine/inspector.h"

namespace kvlm {

/// Takes the number of the newest row away, if every place has a row: a step that has not ended has
/// put it there.
///   came  (places,) WeighedRows.came of a KV head
void forget_newest(std::span<int> came);

/// Puts rows that were read place by place into the order in which they came.
///   rows    of all places, but for tags: of the rows with numbers from 0 on, text behind
///   came    as above, without the newest row
///   newest  it is there, in the place that has no number
void put_in_order(HeadRows& rows, std::span<const int> came, bool newest, size_t head_dim);

}  // namespace kvlm
