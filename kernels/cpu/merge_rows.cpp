#include "kernels/cpu/merge_rows.h"

#include <algorithm>
#include <cmath>

namespace kvlm::cpu {

namespace {

double dot(const float* a, const float* b, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

int32_t nearest_position(std::span<const int32_t> kept, int32_t row) {
  const auto after =
      static_cast<size_t>(std::lower_bound(kept.begin(), kept.end(), row) - kept.begin());
  if (after == 0) return 0;
  if (after == kept.size()) return static_cast<int32_t>(after - 1);
  const bool earlier = row - kept[after - 1] <= kept[after] - row;
  return static_cast<int32_t>(earlier ? after - 1 : after);
}

/// `norms` are those of the kept keys; that of the dropped row is the same for every candidate.
int32_t nearest_feature(const RowMerge& merge, size_t row, const std::vector<double>& norms) {
  const auto dim = static_cast<size_t>(merge.dim);
  int32_t best = 0;
  double best_cosine = -2;
  for (size_t i = 0; i < merge.kept.size(); ++i) {
    const float* key = merge.keys + static_cast<size_t>(merge.kept[i]) * dim;
    const double cosine = dot(key, merge.keys + row * dim, dim) / std::max(norms[i], 1e-30);
    if (cosine > best_cosine) {
      best = static_cast<int32_t>(i);
      best_cosine = cosine;
    }
  }
  return best;
}

void mean_of_groups(std::span<const int32_t> groups, size_t kept, size_t dim, const float* x,
                    float* out) {
  std::vector<double> sums(kept * dim);
  std::vector<double> members(kept);
  for (size_t row = 0; row < groups.size(); ++row) {
    if (groups[row] < 0) continue;
    const auto group = static_cast<size_t>(groups[row]);
    members[group] += 1;
    for (size_t i = 0; i < dim; ++i) sums[group * dim + i] += static_cast<double>(x[row * dim + i]);
  }
  for (size_t i = 0; i < kept * dim; ++i) out[i] = static_cast<float>(sums[i] / members[i / dim]);
}

}  // namespace

std::vector<int32_t> groups_by_position(MergeRule rule, const RowMerge& merge) {
  std::vector<int32_t> groups(static_cast<size_t>(merge.rows), -1);
  const auto lone = static_cast<size_t>(merge.lone_first + merge.lone_last);
  const std::span<const int32_t> anchors =
      merge.kept.subspan(static_cast<size_t>(merge.lone_first), merge.kept.size() - lone);
  const bool joins = rule == MergeRule::kPosition && !anchors.empty();
  for (int32_t row = 0; joins && row < merge.rows; ++row) {
    groups[static_cast<size_t>(row)] = merge.lone_first + nearest_position(anchors, row);
  }
  for (size_t i = 0; i < merge.kept.size(); ++i) {
    groups[static_cast<size_t>(merge.kept[i])] = static_cast<int32_t>(i);
  }
  return groups;
}

void merge_rows(MergeRule rule, const RowMerge& merge) {
  const auto dim = static_cast<size_t>(merge.dim);
  std::vector<int32_t> groups = groups_by_position(rule, merge);
  if (rule == MergeRule::kFeature) {
    std::vector<double> norms;
    for (const int32_t row : merge.kept) {
      const float* key = merge.keys + static_cast<size_t>(row) * dim;
      norms.push_back(std::sqrt(dot(key, key, dim)));
    }
    for (size_t row = 0; row < groups.size(); ++row) {
      if (groups[row] < 0) groups[row] = nearest_feature(merge, row, norms);
    }
  }
  mean_of_groups(groups, merge.kept.size(), dim, merge.keys, merge.merged_keys);
  mean_of_groups(groups, merge.kept.size(), dim, merge.values, merge.merged_values);
}

}  // namespace kvlm::cpu
