#include "kvcache/retention/prefix_fit.h"

#include <hwy/contrib/sort/vqsort.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <numeric>

#include "kvcache/retention/common.h"

namespace kvlm {

namespace {

constexpr int kBisectionSteps = 64;

int rows_of(const LayerDemand& demand) { return static_cast<int>(demand.curve.size()) - 1; }

/// The share of importance of `rows` tokens without the extra ones.
double share(const LayerDemand& demand, int rows, int extra) {
  return demand.curve[static_cast<size_t>(std::clamp(rows - extra, 0, rows_of(demand)))];
}

int64_t sum_of(std::span<const LayerDemand> demands, const std::vector<int>& rows) {
  int64_t sum = 0;
  for (size_t l = 0; l < rows.size(); ++l) sum += int64_t{demands[l].weight} * rows[l];
  return sum;
}

std::vector<int> rows_at(std::span<const LayerDemand> demands, double p, int extra) {
  std::vector<int> rows;
  for (const LayerDemand& demand : demands) {
    rows.push_back(std::min(rows_for_share(demand.curve, p) + extra, rows_of(demand)));
  }
  return rows;
}

/// Removes tokens from the layers with the largest share until the total is not exceeded.
void trim(std::span<const LayerDemand> demands, const FitRules& rules, std::vector<int>& rows) {
  const int least = std::min(rules.least, rows_of(demands.front()));
  int64_t sum = sum_of(demands, rows);
  while (sum > rules.total) {
    size_t from = rows.size();
    for (size_t l = 0; l < rows.size(); ++l) {
      if (rows[l] > least &&
          (from == rows.size() || share(demands[l], rows[l], rules.extra) >=
                                      share(demands[from], rows[from], rules.extra))) {
        from = l;
      }
    }
    if (from == rows.size()) return;
    --rows[from];
    sum -= demands[from].weight;
  }
}

/// Adds tokens to the layers with the smallest share while the total allows it.
void fill(std::span<const LayerDemand> demands, const FitRules& rules, std::vector<int>& rows) {
  const int n = rows_of(demands.front());
  int64_t sum = sum_of(demands, rows);
  while (sum < rules.total) {
    size_t to = rows.size();
    for (size_t l = 0; l < rows.size(); ++l) {
      if (rows[l] < n && sum + demands[l].weight <= rules.total &&
          (to == rows.size() ||
           share(demands[l], rows[l], rules.extra) < share(demands[to], rows[to], rules.extra))) {
        to = l;
      }
    }
    if (to == rows.size()) return;
    ++rows[to];
    sum += demands[to].weight;
  }
}

}  // namespace

std::vector<double> lorenz_curve(std::span<const double> scores) {
  std::vector<double> sorted = retention::normalised(scores);
  // The GPU waits for this selection, one curve per layer; this sort takes a seventh of std::sort's
  // time.
  static thread_local const hwy::Sorter sort;
  sort(sorted.data(), sorted.size(), hwy::SortDescending());
  std::vector<double> curve(sorted.size() + 1, 0.0);
  std::partial_sum(sorted.begin(), sorted.end(), curve.begin() + 1);
  for (double& p : curve) p = std::min(p, 1.0);  // rounding must not exceed 1 ...
  curve.back() = 1;                              // ... or miss it
  return curve;
}

int rows_for_share(std::span<const double> curve, double p) {
  const auto reached = std::lower_bound(curve.begin(), curve.end() - 1, p - 1e-12);
  return static_cast<int>(reached - curve.begin());
}

double gini(std::span<const double> curve) {
  const auto n = static_cast<double>(curve.size() - 1);
  return 2 / n * std::accumulate(curve.begin() + 1, curve.end(), 0.0) - 1 - 1 / n;
}

std::vector<int> fit_greedy(std::span<const LayerDemand> demands, const FitRules& rules) {
  assert(!demands.empty());
  double low = 0;
  double high = 1;
  std::vector<int> rows = rows_at(demands, high, rules.extra);
  if (sum_of(demands, rows) > rules.total) {
    for (int step = 0; step < kBisectionSteps && low < high; ++step) {
      const double p = (low + high) / 2;
      (sum_of(demands, rows_at(demands, p, rules.extra)) <= rules.total ? low : high) = p;
    }
    rows = rows_at(demands, low, rules.extra);
  }
  // First the exact division without clamps, then the clamps.
  repair(demands, {.total = rules.total, .least = 0, .extra = rules.extra}, rows);
  repair(demands, rules, rows);
  return rows;
}

void repair(std::span<const LayerDemand> demands, const FitRules& rules, std::vector<int>& rows) {
  const int n = rows_of(demands.front());
  for (int& m : rows) m = std::clamp(m, std::min(rules.least, n), n);
  trim(demands, rules, rows);
  fill(demands, rules, rows);
}

std::vector<int> fit_rescale(std::span<const LayerDemand> demands, const FitRules& rules) {
  assert(!demands.empty());
  constexpr int64_t kClose = 5;
  const int64_t n = rows_of(demands.front());
  int64_t layers = 0;
  for (const LayerDemand& demand : demands) layers += demand.weight;
  double low = 0;
  double high = 1;
  std::vector<int> rows;
  for (int step = 0; step < kBisectionSteps; ++step) {
    const double p = (low + high) / 2;
    rows = rows_at(demands, p, rules.extra);
    const int64_t off = sum_of(demands, rows) - rules.total;
    if (std::abs(off) < kClose) break;
    (off < 0 ? low : high) = p;
  }
  const int64_t forgotten = layers * n - sum_of(demands, rows);
  const int64_t wanted = layers * n - rules.total;
  const int64_t least = std::min<int64_t>(rules.least, n);
  for (int& m : rows) {
    const int64_t forget = forgotten == 0 ? 0 : (n - m) * wanted / forgotten;
    m = static_cast<int>(std::max(least, n - forget));
  }
  // Only if the minimums are large: rounding alone adds less than a token per layer.
  trim(demands, {rules.total + layers, rules.least, rules.extra}, rows);
  return rows;
}

std::vector<double> forget_ratios(std::span<const std::vector<double>> scores, double keep,
                                  int least) {
  std::vector<LayerDemand> demands;
  for (const std::vector<double>& layer : scores) demands.push_back({lorenz_curve(layer)});
  const int n = rows_of(demands.front());
  const FitRules rules{.total = retention::total_rows(keep, static_cast<int>(scores.size()), n),
                       .least = least};
  std::vector<double> ratios;
  for (const int rows : fit_greedy(demands, rules)) {
    ratios.push_back(1 - static_cast<double>(rows) / n);
  }
  return ratios;
}

std::vector<double> mean_ratios(std::span<const std::vector<double>> prompts) {
  if (prompts.empty()) return {};
  std::vector<double> mean(prompts.front().size(), 0.0);
  for (const std::vector<double>& ratios : prompts) {
    for (size_t l = 0; l < mean.size(); ++l) mean[l] += ratios.at(l);
  }
  for (double& ratio : mean) ratio /= static_cast<double>(prompts.size());
  return mean;
}

RatioSpread spread_of_ratios(std::span<const std::vector<double>> prompts,
                             std::span<const double> center) {
  const std::vector<double> mean = mean_ratios(prompts);
  RatioSpread spread{std::vector<double>(mean.size()), std::vector<double>(mean.size())};
  const auto count = static_cast<double>(prompts.size());
  for (const std::vector<double>& ratios : prompts) {
    for (size_t l = 0; l < mean.size(); ++l) {
      spread.deviation[l] += (ratios[l] - mean[l]) * (ratios[l] - mean[l]) / count;
      spread.difference[l] += std::abs(ratios[l] - center[l]) / count;
    }
  }
  for (double& deviation : spread.deviation) deviation = std::sqrt(deviation);
  return spread;
}

}  // namespace kvlm
