#include "kvcache/retention/window.h"

#include <algorithm>

namespace kvlm::retention {

namespace {

std::vector<int32_t> chosen(std::span<const double> scores, int kept,
                            const WindowRule::Settings& settings) {
  const auto n = static_cast<int>(scores.size());
  const int before = std::max(0, n - settings.window);
  // Pooling stops where the window begins: its own scores are not looked at.
  std::vector<double> pool = pooled(scores.first(static_cast<size_t>(before)), settings.kernel);
  pool.resize(static_cast<size_t>(n));
  return keep_best(pool, kept, /*sinks=*/0, settings.window);
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
  const std::vector<Unit> units = units_of(prompt, pairs);
  std::vector<LayerSelection> selections;
  for (const Unit& unit : units) {
    const LayerBudget of_unit = budget(unit.layers, prompt.shape->layers, prompt.rows);
    LayerSelection selection{{}, of_unit.forget};
    if (settings_.head_shared) {
      selection.slots.push_back(chosen(unit_scores(prompt, unit), of_unit.kept, settings_));
    } else {
      for (int h = 0; h < prompt.shape->kv_heads; ++h) {
        selection.slots.push_back(chosen(unit_scores(prompt, unit, h), of_unit.kept, settings_));
      }
    }
    selections.push_back(std::move(selection));
  }
  return by_layer(prompt, units, std::move(selections));
}

}  // namespace kvlm::retention
