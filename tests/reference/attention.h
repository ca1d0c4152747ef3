#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace kvlm::reference {

/// One query against `rows` rows of keys and values, in double and in the order of the formula:
/// softmax(q . K^T * scale) . V. No rows give zeros.
///
///   q        (head_dim,)
///   keys     rows pointers to (head_dim,), as values
inline std::vector<double> attend_one(const float* q, const std::vector<const float*>& keys,
                                      const std::vector<const float*>& values, size_t head_dim,
                                      double scale) {
  std::vector<double> scores(keys.size());
  double max = -std::numeric_limits<double>::infinity();
  for (size_t j = 0; j < keys.size(); ++j) {
    double dot = 0;
    for (size_t c = 0; c < head_dim; ++c) {
      dot += static_cast<double>(q[c]) * static_cast<double>(keys[j][c]);
    }
    scores[j] = dot * scale;
    max = std::max(max, scores[j]);
  }
  std::vector<double> out(head_dim, 0.0);
  double sum = 0;
  for (size_t j = 0; j < keys.size(); ++j) {
    const double weight = std::exp(scores[j] - max);
    sum += weight;
    for (size_t c = 0; c < head_dim; ++c) out[c] += weight * static_cast<double>(values[j][c]);
  }
  if (sum > 0) {
    for (double& x : out) x /= sum;
  }
  return out;
}

}  // namespace kvlm::reference
