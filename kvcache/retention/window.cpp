#include "kvcache/retention/window.h"

#include <algorithm>

namespace kvlm::retention {

namespace {

/// Pooled scores of the tokens before the window, and a higher score for those of the window.
std::vector<double> pooled_before(std::span<const double> scores,
                                  const WindowRule::Settings& settings) {
  const auto n = static_cast<int>(scores.size());
  const int before = std::max(0, n - settings.window);
  std::vector<double> pool = pooled(scores.first(static_cast<size_t>(before)), settings.kernel);
  const double most = pool.empty() ? 0 : *std::max_element(pool.begin(), pool.end());
  pool.resize(static_cast<size_t>(n), most + 1);
  return pool;
}

}  // namespace

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
  return for_units(prompt, pairs, [&](const Unit& unit) {
    const LayerBudget of_unit = budget(unit.layers, prompt.shape->layers, prompt.rows);
    LayerSelection selection{{}, of_unit.forget};
    const auto add = [&](std::span<const double> scores) {
      add_best(selection, pooled_before(scores, settings_), of_unit.kept, settings_.window);
    };
    if (settings_.head_shared) {
      add(unit_scores(prompt, unit));
    } else {
      for (int h = 0; h < prompt.shape->kv_heads; ++h) add(unit_scores(prompt, unit, h));
    }
    return selection;
  });
}

}  // namespace kvlm::retention
