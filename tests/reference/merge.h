#pragma once

#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <vector>

#include "tests/reference/quantize.h"

// Independent: folding dropped rows into kept ones (docs/formulas.md, "Merging"), in double.
namespace kvlm::reference {

enum class Merge { kNone, kPosition, kFeature };

inline double cosine(const std::vector<float>& a, const std::vector<float>& b) {
  double dot = 0;
  double aa = 0;
  double bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const auto x = static_cast<double>(a[i]);
    const auto y = static_cast<double>(b[i]);
    dot += x * y;
    aa += x * x;
    bb += y * y;
  }
  return dot / std::sqrt(aa * bb);
}

/// For each row the kept row that it joins: itself, or the nearest by position or by its key; ties
/// go to the earlier. No other joins the first and the last of `kept` that are alone.
inline std::vector<size_t> merge_targets(Merge rule, const Rows& keys, const std::vector<int>& kept,
                                         int lone_first, int lone_last) {
  std::vector<size_t> targets(keys.size());
  for (size_t row = 0; row < keys.size(); ++row) {
    double best = -1e300;
    targets[row] = row;
    for (size_t i = 0; i < kept.size(); ++i) {
      const auto at = static_cast<size_t>(kept[i]);
      const bool alone = static_cast<int>(i) < lone_first ||
                         static_cast<int>(i) >= static_cast<int>(kept.size()) - lone_last;
      if (alone && at != row) continue;
      const double likeness = at == row ? 1e300
                              : rule == Merge::kPosition
                                  ? -std::abs(static_cast<double>(at) - static_cast<double>(row))
                                  : cosine(keys[row], keys[at]);
      if (likeness > best) {
        best = likeness;
        targets[row] = at;
      }
    }
  }
  return targets;
}

/// Every kept row becomes the mean of the rows that joined it; the others are left as they are.
inline void merge_into(const std::vector<size_t>& targets, Rows& x) {
  const size_t dim = x.front().size();
  std::vector<std::vector<double>> sums(x.size(), std::vector<double>(dim));
  std::vector<double> members(x.size());
  for (size_t row = 0; row < x.size(); ++row) {
    members[targets[row]] += 1;
    for (size_t d = 0; d < dim; ++d) sums[targets[row]][d] += static_cast<double>(x[row][d]);
  }
  for (size_t row = 0; row < x.size(); ++row) {
    for (size_t d = 0; d < dim && members[row] > 0; ++d) {
      x[row][d] = static_cast<float>(sums[row][d] / members[row]);
    }
  }
}

}  // namespace kvlm::reference
