#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kvcache/plan/cache_plan.h"

// From a sentence to a cache, each file needs only those before it: words, cache_spec, policy,
// registry, cache_plan, conflicts, planner, spec; and of the plan: layouts, sequence_bounds,
// [formula], make_cache.

namespace kvlm {

/// Rows of one layer of one sequence, for the byte formulas.
struct LayerCounts {
  int rows = 0;          ///< kept when the prompt ended, in every kv_head
  int visual = 0;        ///< those among them that are visual
  int images = 1;        ///< pictures that the visual rows come from
  int steps = 0;         ///< rows appended since; none was dropped
  bool dropped = false;  ///< the layer has dropped rows of its prompt
  /// Text rows behind the last visual row; -1: all text rows are.
  int text_behind = -1;
};

/// What a layer stores, over all kv_heads, in bytes.
struct PartBytes {
  size_t key_codes = 0;
  size_t key_scales = 0;  ///< with zero points
  size_t value_codes = 0;
  size_t value_scales = 0;  ///< with zero points
  size_t full_rows = 0;     ///< keys and values that are not packed; unrotated keys of sinks
  size_t masks = 0;         ///< channel masks, bitmaps of protected rows
  size_t weights = 0;       ///< sums of attention (H2O)

  size_t total() const noexcept {
    return key_codes + key_scales + value_codes + value_scales + full_rows + masks + weights;
  }
  PartBytes& operator+=(const PartBytes& other) noexcept;
};

/// The bytes of each layer (docs/formulas.md, "Stored bits"): from what the quantizers plan and
/// how many rows there are, without any cache. Exact where no row was dropped since the prompt
/// ended, if as many of the protected rows as assumed are still in the window then: the earliest
/// visual rows are taken for them.
///   counts (layers,)
std::vector<PartBytes> formula(const CachePlan& plan, std::span<const LayerCounts> counts);

/// The papers' own width of what is held (kvcache/plan/nominal.h).
///   counts (layers,)
double nominal_bits(const CachePlan& plan, std::span<const LayerCounts> counts);

}  // namespace kvlm
