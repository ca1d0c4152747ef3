#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kvcache/plan/cache_plan.h"

// From spec to cache. Each file needs only earlier ones: words, cache_spec, policy, registry,
// cache_plan, conflicts, planner, spec; and of the plan: layouts, sequence_bounds, [formula],
// make_cache.

namespace kvlm {

/// Numbers of tokens of one layer of one sequence, for the byte formulas.
struct LayerCounts {
  int rows = 0;          ///< kept at the end of the prompt, in every kv_head
  int visual = 0;        ///< visual ones among them
  int images = 1;        ///< images of the visual tokens
  int steps = 0;         ///< tokens appended since; none was evicted
  bool dropped = false;  ///< prompt tokens were evicted at its end
  /// Text tokens after the last visual one; -1: all text tokens.
  int text_behind = -1;
};

/// Bytes of a layer, over all kv_heads.
struct PartBytes {
  size_t key_codes = 0;
  size_t key_scales = 0;  ///< with zero points
  size_t value_codes = 0;
  size_t value_scales = 0;  ///< with zero points
  size_t full_rows = 0;     ///< unpacked keys and values; original keys of sinks
  size_t masks = 0;         ///< channel masks, bitmaps of protected slots
  size_t weights = 0;       ///< sums of attention (H2O)

  size_t total() const noexcept {
    return key_codes + key_scales + value_codes + value_scales + full_rows + masks + weights;
  }
  PartBytes& operator+=(const PartBytes& other) noexcept;
};

/// Bytes of each layer in closed form (docs/formulas.md, "Stored bits"), from the plan and numbers
/// of tokens. Exact until decode evicts, if the window then holds as many protected tokens as
/// assumed: the earliest visual tokens are taken as the protected ones.
///   counts (layers,)
std::vector<PartBytes> formula(const CachePlan& plan, std::span<const LayerCounts> counts);

/// Bits as the papers count them (kvcache/plan/nominal.h).
///   counts (layers,)
double nominal_bits(const CachePlan& plan, std::span<const LayerCounts> counts);

}  // namespace kvlm
