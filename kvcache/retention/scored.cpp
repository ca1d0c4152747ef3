#include "kvcache/retention/scored.h"

#include <algorithm>

namespace kvlm::retention {

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
