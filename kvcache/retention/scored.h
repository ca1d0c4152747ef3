#pragma once

#include <array>
#include <functional>
#include <span>

#include "kvcache/retention/common.h"

namespace kvlm::retention {

/// Base of rules that score() tokens by their contents; derived rules define the score.
///
/// Keeps floor(r N) tokens, at least sinks + 1 [S], per kv_head (head_shared=on: one set for all):
/// the first `sinks`, the last `last` (at most half) and those of the best scores, ties to the
/// earlier. If heads or tied layers choose together, their scores are averaged in units of their
/// mean magnitude [S]. Decode evicts only with evict=.
class ScoredRule : public PlacedRule {
 public:
  ScoredRule(const OptionValues& options, const PolicyContext& context)
      : PlacedRule(options.real("keep"), PlaceEviction::from(options, context)),
        head_shared_(options.text("head_shared") == "on") {}

  ImportanceNeeds needs() const noexcept override { return {.row_scores = !identity()}; }
  bool per_head() const noexcept override { return !head_shared_ && !identity(); }
  void score(const LayerRows& layer, std::span<double> scores, Stream& stream) const override = 0;
  std::vector<LayerSelection> select(const PromptView& prompt,
                                     std::span<const int> pairs) const override;
  int64_t peak_rows_total(int layers, int prompt_rows, int max_rows) const noexcept override;

 private:
  int kept(int n) const noexcept;

  bool head_shared_;
};

/// The options that ScoredRule reads, for rules without others.
inline constexpr std::array kScoredOptions = {kKeep, kHeadShared,   kOurSinks,
                                              kLast, kEvictIfAsked, kDistance};

/// Computes the scores of a layer's tokens, as Retention::score() does.
using ScoreFunction = std::function<void(const LayerRows&, std::span<double> scores, Stream&)>;

/// Makes ScoredRules with `score` as score(), for register_retention(). Options: kScoredOptions.
RetentionMaker scored_by(ScoreFunction score);

}  // namespace kvlm::retention
