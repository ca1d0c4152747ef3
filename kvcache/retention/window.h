#pragma once

#include "kvcache/retention/common.h"

namespace kvlm::retention {

/// The rules that let the last rows of a prompt choose: SnapKV, and PyramidKV with its own budgets.
///
/// Scores of a slot before the window: the attention of the `window` last rows, averaged over a
/// kv_head's query heads and over `kernel` neighbours (pooling and averaging heads commute; the
/// reference pools first). The window itself always stays, as far as the budget goes, newest first.
class WindowRule : public PlacedRule {
 public:
  struct Settings {
    double keep = 1;
    int window = 64;
    int kernel = 5;
    bool head_shared = false;

    static Settings from(const OptionValues& options);
  };

  WindowRule(const Settings& settings, const PlaceEviction& eviction)
      : PlacedRule(settings.keep, sparing(eviction, settings.window)), settings_(settings) {}

  ImportanceNeeds needs() const noexcept override;
  bool per_head() const noexcept override { return !settings_.head_shared && !identity(); }
  std::vector<LayerSelection> select(const PromptView& prompt,
                                     std::span<const int> pairs) const override;

 protected:
  struct LayerBudget {
    int kept;
    double forget;
  };
  /// What layers that share a selection keep of n rows.
  virtual LayerBudget budget(std::span<const int> layers, int of_layers, int n) const = 0;
  const Settings& settings() const noexcept { return settings_; }

 private:
  /// What eviction spares of a prompt's end is the window.
  static PlaceEviction sparing(PlaceEviction eviction, int window) noexcept {
    eviction.ends.last = window;
    return eviction;
  }

  Settings settings_;
};

}  // namespace kvlm::retention
