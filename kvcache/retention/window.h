#pragma once

#include "kvcache/retention/common.h"

namespace kvlm::retention {

/// Base of rules whose scores come from the last tokens of a prompt: SnapKV, PyramidKV with its own
/// budgets, and MixKV, which adds scores of the tokens themselves.
///
/// Score of a slot before the window: the attention of the `window` last tokens, averaged over a
/// kv_head's query heads and over `kernel` neighbours (pooling and averaging heads commute; the
/// reference pools first). The window itself is kept first, newest tokens first if the budget is
/// smaller.
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
  /// Budget of layers that share a selection, of n tokens.
  virtual LayerBudget budget(std::span<const int> layers, int of_layers, int n) const = 0;
  /// Changes the pooled scores of the tokens before the window, of one kv_head or, with -1, the
  /// mean over all.
  virtual void mix(const PromptView& /*prompt*/, const Unit& /*unit*/, int /*kv_head*/,
                   std::span<double> /*before*/) const {}
  const Settings& settings() const noexcept { return settings_; }

 private:
  /// Eviction spares the window as the end of the prompt.
  static PlaceEviction sparing(PlaceEviction eviction, int window) noexcept {
    eviction.ends.last = window;
    return eviction;
  }

  Settings settings_;
};

}  // namespace kvlm::retention
