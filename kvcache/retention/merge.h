#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvcache/retention.h"

namespace kvlm {

/// Folds the dropped rows of one kv_head into kept ones: every dropped row joins the kept row that
/// is nearest by position (ties: the earlier), or whose key has the largest cosine with its own; a
/// kept row becomes the mean of itself and those that joined it, in keys and values alike.
///
///   kept    ascending rows that stay; rows the number of all
///   keys, values  (rows, head_dim) in, (kept, head_dim) out
///
/// Source: PrefixKV 4.3 (specs 8.6); the paper leaves open whether values match anew: they do not.
void merge_rows(MergeRule rule, std::span<const int32_t> kept, int rows, size_t head_dim,
                std::vector<float>& keys, std::vector<float>& values);

}  // namespace kvlm
