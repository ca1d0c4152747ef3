#pragma once

#include <algorithm>
#include <vector>

namespace kvlm {

/// Median and range of repeated runs.
struct Spread {
  double median = 0;
  double min = 0;
  double max = 0;
};

inline Spread spread_of(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  const double median =
      values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
  return {median, values.front(), values.back()};
}

}  // namespace kvlm
