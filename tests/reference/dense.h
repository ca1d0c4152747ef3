#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

namespace kvlm::reference {

/// One row of activations, in double.
using Row = std::vector<double>;

/// W x + bias of a row-major (out, in) matrix; no bias if it is empty.
inline Row linear(const Row& x, std::span<const float> weight, std::span<const float> bias) {
  Row y(weight.size() / x.size());
  for (size_t o = 0; o < y.size(); ++o) {
    double sum = bias.empty() ? 0 : static_cast<double>(bias[o]);
    for (size_t i = 0; i < x.size(); ++i)
      sum += static_cast<double>(weight[o * x.size() + i]) * x[i];
    y[o] = sum;
  }
  return y;
}

inline Row rms_norm(const Row& x, std::span<const float> weight, double eps) {
  double squares = 0;
  for (const double value : x) squares += value * value;
  const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) + eps);
  Row y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale * static_cast<double>(weight[i]);
  return y;
}

inline Row layer_norm(const Row& x, std::span<const float> weight, std::span<const float> bias,
                      double eps) {
  const auto n = static_cast<double>(x.size());
  double mean = 0;
  for (const double value : x) mean += value / n;
  double variance = 0;
  for (const double value : x) variance += (value - mean) * (value - mean) / n;
  Row y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    y[i] = (x[i] - mean) / std::sqrt(variance + eps) * static_cast<double>(weight[i]) +
           static_cast<double>(bias[i]);
  }
  return y;
}

inline void add(Row& y, const Row& x) {
  for (size_t i = 0; i < y.size(); ++i) y[i] += x[i];
}

inline double silu(double x) { return x / (1 + std::exp(-x)); }
inline double quick_gelu(double x) { return x / (1 + std::exp(-1.702 * x)); }
inline double gelu(double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); }

/// softmax(q . K^T * scale) . V of one head, whose channels start at `q_at` in the query and at
/// `kv_at` in the first `rows` keys and values.
inline Row attend(const Row& q, size_t q_at, const std::vector<Row>& keys,
                  const std::vector<Row>& values, size_t kv_at, size_t rows, size_t head_dim) {
  const double scale = 1 / std::sqrt(static_cast<double>(head_dim));
  std::vector<double> weights(rows);
  double max = -INFINITY;
  for (size_t j = 0; j < rows; ++j) {
    double score = 0;
    for (size_t c = 0; c < head_dim; ++c) score += q[q_at + c] * keys[j][kv_at + c];
    weights[j] = score * scale;
    max = std::max(max, weights[j]);
  }
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - max);
  Row out(head_dim, 0.0);
  for (size_t j = 0; j < rows; ++j) {
    for (size_t c = 0; c < head_dim; ++c) out[c] += weights[j] / sum * values[j][kv_at + c];
  }
  return out;
}

}  // namespace kvlm::reference
