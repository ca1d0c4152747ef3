#include "kvcache/retention/scored.h"

#include <algorithm>
#include <utility>

namespace kvlm::retention {

namespace {

class FunctionRule final : public ScoredRule {
 public:
  FunctionRule(const OptionValues& options, const PolicyContext& context, ScoreFunction score)
      : ScoredRule(options, context), score_(std::move(score)) {}

  void score(const LayerRows& layer, std::span<double> scores, Stream& stream) const override {
    score_(layer, scores, stream);
  }

 private:
  ScoreFunction score_;
};

}  // namespace

RetentionMaker scored_by(ScoreFunction score) {
  return [score = std::move(score)](const OptionValues& options, const PolicyContext& context) {
    return std::make_unique<FunctionRule>(options, context, score);
  };
}

std::vector<LayerSelection> ScoredRule::select(const PromptView& prompt,
                                               std::span<const int> pairs) const {
  if (identity()) return keep_everything(prompt);
  return for_units(prompt, pairs, [&](const Unit& unit) {
    LayerSelection selection{{}, 1 - keep()};
    for (int h = 0; h < (head_shared_ ? 1 : prompt.shape->kv_heads); ++h) {
      add_best(selection, unit_row_scores(prompt, unit, head_shared_ ? -1 : h), kept(prompt.rows));
    }
    return selection;
  });
}

int64_t ScoredRule::peak_rows_total(int layers, int prompt_rows, int max_rows) const noexcept {
  return int64_t{layers} * peak_rows(kept(prompt_rows), 1 - keep(), prompt_rows, max_rows);
}

int ScoredRule::kept(int n) const noexcept {
  return std::min(n, std::max(floored_rows(keep(), n), eviction().ends.alone()));
}

}  // namespace kvlm::retention
