#pragma once

#include <cstdint>
#include <span>
#include <vector>

// PrefixKV's budgets (docs/formulas.md, "PrefixKV" and "Profile"): pure functions of importance
// scores, for rules that divide a budget among layers and for `vlm-kv profile`.
namespace kvlm {

/// P(k) for k = 0..n: the share of all importance that the k best of n tokens have, in f64.
/// Negative and non-finite scores count as 0; if no score is left, all are equal.
std::vector<double> lorenz_curve(std::span<const double> scores);

/// k(p): the smallest k with P(k) >= p - 1e-12.
int rows_for_share(std::span<const double> curve, double p);

/// (2 / n) sum_{k=1..n} P(k) - 1 - 1 / n: 0 for equal scores, towards 1 if few tokens have all
/// importance.
double gini(std::span<const double> curve);

/// Input of a fit for one layer, or for layers that keep the same tokens.
struct LayerDemand {
  std::vector<double> curve;  ///< (n + 1,) of lorenz_curve()
  int weight = 1;             ///< number of layers
};

/// Limits of a fit that divides `total` tokens. All demands have the same n.
struct FitRules {
  int64_t total = 0;
  int least = 1;  ///< minimum per layer, if it has as many
  /// Tokens that a layer keeps besides the k(p) best ones (PrefixKV's code: the protected ones).
  int extra = 0;
};

/// The max-min division: the smallest P(rows - extra) is as large as possible for this total. The
/// sum of weight * rows is exactly `total`, unless clamps or weights above 1 forbid it: then the
/// nearest sum below, or the minimum of all layers. Bisects for a common p, then adds one token at
/// a time to the layer with the smallest share, ties to the earlier layer. Tokens that `least` adds
/// are taken from the layers with the largest share, ties from the later layer.
std::vector<int> fit_greedy(std::span<const LayerDemand> demands, const FitRules& rules);

/// Clamps `rows` to at least rules.least, then removes or adds one token at a time to reach the
/// total, as fit_greedy() does.
void repair(std::span<const LayerDemand> demands, const FitRules& rules, std::vector<int>& rows);

/// The published code's division: bisects until the sum is within 5 tokens (at most 64 steps: the
/// code's loop need not end), then scales all counts of forgotten tokens to the total and rounds
/// down. Exceeds `total` by at most one token per layer, or keeps the minimum of all layers.
std::vector<int> fit_rescale(std::span<const LayerDemand> demands, const FitRules& rules);

/// PrefixKV's offline profile of one prompt: 1 - rows / n of each layer under fit_greedy(), for a
/// budget of round(keep * layers * n) tokens, at least `least` in each layer.
///
///   scores  (layers, n), as retention::unit_scores() returns them
std::vector<double> forget_ratios(std::span<const std::vector<double>> scores, double keep,
                                  int least);

/// The mean over prompts, for a --kv-profile file. All have the same length.
std::vector<double> mean_ratios(std::span<const std::vector<double>> prompts);

/// Spread of the prompts' ratios around `center`, (layers,) each (PrefixKV, table 7).
struct RatioSpread {
  /// Root mean square distance from the prompts' own mean
  std::vector<double> deviation;
  std::vector<double> difference;  ///< mean distance from `center`
};
RatioSpread spread_of_ratios(std::span<const std::vector<double>> prompts,
                             std::span<const double> center);

}  // namespace kvlm
