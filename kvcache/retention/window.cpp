#include "kvcache/retention/window.h"

#include <algorithm>

namespace kvlm::retention {

WindowRule::Settings WindowRule::Settings::from(const OptionValues& options) {
  return {.keep = options.real("keep"),
          .window = options.integer("window"),
          .kernel = kernel_from(options),
          .head_shared = options.text("head_shared") == "on"};
}

ImportanceNeeds WindowRule::needs() const noexcept {
  if (identity()) return {};
  return {.rows = ImportanceNeeds::Rows::kLast, .last_rows = settings_.window};
}

std::vector<LayerSelection> WindowRule::select(const PromptView& prompt,
                                               std::span<const int> pairs) const {
  if (identity()) return keep_everything(prompt);
  const auto of_window = static_cast<size_t>(settings_.window);
  return for_units(prompt, pairs, [&](const Unit& unit) {
    const LayerBudget of_unit = budget(unit.layers, prompt.shape->layers, prompt.rows);
    LayerSelection selection{{}, of_unit.forget};
    const auto add = [&](std::span<const double> scores, int kv_head) {
      const size_t before = scores.size() - std::min<size_t>(scores.size(), of_window);
      std::vector<double> all = pooled(scores.first(before), settings_.kernel);
      mix(prompt, unit, kv_head, all);
      const double most = all.empty() ? 0 : *std::max_element(all.begin(), all.end());
      all.resize(scores.size(), most + 1);  // the window's
      add_best(selection, all, of_unit.kept, settings_.window);
    };
    if (settings_.head_shared) {
      add(unit_scores(prompt, unit), -1);
    } else {
      for (int h = 0; h < prompt.shape->kv_heads; ++h) add(unit_scores(prompt, unit, h), h);
    }
    return selection;
  });
}

}  // namespace kvlm::retention
