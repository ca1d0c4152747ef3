#pragma once

#include <cstdint>
#include <span>
#include <vector>

// The arithmetic of PrefixKV's budgets (docs/formulas.md, "PrefixKV" and "Profile"): pure
// functions of importance scores, used by the rules that split a budget between layers and by
// `vlm-kv profile`.
namespace kvlm {

/// P(k) for k = 0..n: the share of all importance that the k best of n rows hold, in f64. Scores
/// that are negative or not finite count as 0; if all do, all rows are alike.
std::vector<double> lorenz_curve(std::span<const double> scores);

/// k(p): the smallest k with P(k) >= p - 1e-12.
int rows_for_share(std::span<const double> curve, double p);

/// (2 / n) sum_{k=1..n} P(k) - 1 - 1 / n: 0 for rows that are alike, towards 1 for few that hold
/// everything.
double gini(std::span<const double> curve);

/// What one layer, or layers that keep the same rows, asks of a common budget.
struct LayerDemand {
  std::vector<double> curve;  ///< (n + 1,) of lorenz_curve()
  int weight = 1;             ///< layers that it stands for
};

/// Budgets in rows that share `total` rows. All demands have the same n.
struct FitRules {
  int64_t total = 0;
  int least = 1;  ///< rows that every layer keeps at least, if it has them
  /// Rows that a layer keeps beside the k(p) best ones (PrefixKV's code: the protected ones).
  int extra = 0;
};

/// The max-min split: sum of weight * rows is exactly `total` (unless clamps or weights above 1
/// forbid it: then the nearest below, or the least rows of all), and the smallest P(rows - extra)
/// is as large as any split of that total can make it. Bisection for a common p, then one row at a
/// time to the layer with the smallest share, ties to the earlier layer; rows that `least` adds are
/// taken from the layers with the largest share, ties from the later layer.
std::vector<int> fit_greedy(std::span<const LayerDemand> demands, const FitRules& rules);

/// Clamps `rows` to at least rules.least, then takes rows where the total is exceeded and adds rows
/// where it is not reached, one at a time as fit_greedy() does.
void repair(std::span<const LayerDemand> demands, const FitRules& rules, std::vector<int>& rows);

/// The published code's split: bisection until the sum is less than 5 rows off (at most 64 steps:
/// the code's loop need not end), then all counts of forgotten rows scaled to the total and rounded
/// down. Keeps at most one row a layer above `total`, or the least rows of all.
std::vector<int> fit_rescale(std::span<const LayerDemand> demands, const FitRules& rules);

/// PrefixKV's offline profile of one prompt: 1 - rows / n of each layer under fit_greedy(), for a
/// budget of round(keep * layers * n) rows, at least `least` in each layer.
///
///   scores  (layers, n) of each layer, as retention::unit_scores() has them
std::vector<double> forget_ratios(std::span<const std::vector<double>> scores, double keep,
                                  int least);

/// The mean over prompts: what --kv-profile keeps. All of one length.
std::vector<double> mean_ratios(std::span<const std::vector<double>> prompts);

/// How far ratios of prompts lie from `center`, (layers,) each (PrefixKV, table 7).
struct RatioSpread {
  std::vector<double> deviation;   ///< root of the mean square distance from the prompts' own mean
  std::vector<double> difference;  ///< mean distance from the center
};
RatioSpread spread_of_ratios(std::span<const std::vector<double>> prompts,
                             std::span<const double> center);

}  // namespace kvlm
