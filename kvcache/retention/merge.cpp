#include "kvcache/retention/merge.h"

#include <algorithm>
#include <cmath>

namespace kvlm {

namespace {

double dot(const float* a, const float* b, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

/// Which of `kept` a row joins.
size_t nearest_position(std::span<const int32_t> kept, int32_t row) {
  const auto after =
      static_cast<size_t>(std::lower_bound(kept.begin(), kept.end(), row) - kept.begin());
  if (after == 0) return 0;
  if (after == kept.size()) return after - 1;
  return row - kept[after - 1] <= kept[after] - row ? after - 1 : after;
}

size_t nearest_feature(std::span<const int32_t> kept, int32_t row, const float* keys,
                       const std::vector<double>& norms, size_t dim) {
  size_t best = 0;
  double best_cosine = -2;
  for (size_t i = 0; i < kept.size(); ++i) {
    const auto at = static_cast<size_t>(kept[i]);
    const double cosine = dot(keys + at * dim, keys + static_cast<size_t>(row) * dim, dim) /
                          std::max(norms[at], 1e-30);
    if (cosine > best_cosine) {
      best = i;
      best_cosine = cosine;
    }
  }
  return best;
}

}  // namespace

void merge_rows(MergeRule rule, std::span<const int32_t> kept, int rows, size_t head_dim,
                std::vector<float>& keys, std::vector<float>& values) {
  const auto n = static_cast<size_t>(rows);
  std::vector<double> norms;
  if (rule == MergeRule::kFeature) {
    for (size_t row = 0; row < n; ++row) {
      // The norm of the dropped row is the same for every candidate and left out.
      const float* key = keys.data() + row * head_dim;
      norms.push_back(std::sqrt(dot(key, key, head_dim)));
    }
  }
  std::vector<double> key_sums(kept.size() * head_dim);
  std::vector<double> value_sums(kept.size() * head_dim);
  std::vector<double> members(kept.size());
  for (size_t row = 0; row < n; ++row) {
    const auto token = static_cast<int32_t>(row);
    const auto own = std::lower_bound(kept.begin(), kept.end(), token);
    size_t group = static_cast<size_t>(own - kept.begin());
    if (own == kept.end() || *own != token) {
      if (rule == MergeRule::kNone) continue;
      group = rule == MergeRule::kPosition
                  ? nearest_position(kept, token)
                  : nearest_feature(kept, token, keys.data(), norms, head_dim);
    }
    members[group] += 1;
    for (size_t i = 0; i < head_dim; ++i) {
      key_sums[group * head_dim + i] += static_cast<double>(keys[row * head_dim + i]);
      value_sums[group * head_dim + i] += static_cast<double>(values[row * head_dim + i]);
    }
  }
  keys.resize(kept.size() * head_dim);
  values.resize(kept.size() * head_dim);
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = static_cast<float>(key_sums[i] / members[i / head_dim]);
    values[i] = static_cast<float>(value_sums[i] / members[i / head_dim]);
  }
}

}  // namespace kvlm
