#pragma once

#include <cstdint>
#include <span>

#include "kernels/base/device.h"

namespace kvlm {

/// How dropped rows are folded into kept ones (docs/formulas.md, "Merging").
enum class MergeRule : uint8_t { kNone, kPosition, kFeature };

/// The keys and values of one kv_head, of which some rows stay.
struct RowMerge {
  const float* keys = nullptr;    ///< (rows, dim)
  const float* values = nullptr;  ///< (rows, dim)
  int rows = 0;
  int dim = 0;
  std::span<const int32_t> kept;   ///< on the host: ascending rows that stay, at least one
  float* merged_keys = nullptr;    ///< (kept, dim), may not overlap `keys`
  float* merged_values = nullptr;  ///< (kept, dim)
  /// kPosition: the first and the last of `kept` that no row joins; if that is all of them, dropped
  /// rows join none.
  int lone_first = 0;
  int lone_last = 0;
};

/// Folds the dropped rows into kept ones: every dropped row joins the kept row that is nearest by
/// position (ties: the earlier), or whose key has the largest cosine with its own (ties: the
/// earlier); a kept row becomes the mean of itself and those that joined it, in keys and values
/// alike, summed in double in the order of the rows. kNone: kept rows stay as they are.
/// Asynchronous on CUDA. Throws Error{kInvalidArgument} if `kept` is empty or no ascending rows, or
/// if more of them are alone than there are, or any under kFeature.
/// Source: PrefixKV 4.3 (docs/formulas.md, "Merging"); the paper leaves open whether values match
/// anew: they do not.
void merge_rows(MergeRule rule, const RowMerge& merge, Stream& stream);

}  // namespace kvlm
