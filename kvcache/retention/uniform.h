#pragma once

#include "kvcache/retention/common.h"

namespace kvlm::retention {

/// PrefixKV's importance with the same number of tokens in every layer: the "baseline" row of its
/// Table 4, and the baseline of every adaptive budget.
///
/// Keeps round(r N) tokens of each layer, ties to even, but at least sinks + 2 [S]: the first
/// `sinks`, the last `last` (at most half) and those with most attention, over all heads, divided
/// by the number of queries that see them (score=sums: not divided, as published). Decode evicts to
/// the budget (docs/formulas.md, "Eviction") with the forget ratio 1 - r.
///
/// Source: Wang et al., "PrefixKV", Table 4 [P]; docs/formulas.md, "Uniform".
class Uniform : public PlacedRule {
 public:
  Uniform(double keep, Score score, const PlaceEviction& eviction)
      : PlacedRule(keep, eviction), score_(score) {}

  ImportanceNeeds needs() const noexcept override;
  std::vector<LayerSelection> select(const PromptView& prompt,
                                     std::span<const int> pairs) const override;
  int64_t peak_rows_total(int layers, int prompt_rows, int max_rows) const noexcept override;

 private:
  int kept(int n) const noexcept;

  Score score_;
};

}  // namespace kvlm::retention
