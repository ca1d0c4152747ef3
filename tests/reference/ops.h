#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/activation.h"

// What the kernels must compute, in scalar double precision and without a thought for speed.
namespace kvlm::reference {

using Values = std::vector<double>;

/// y (rows, out) = x (rows, in) * w (out, in)^T + bias (out,), which may be empty.
inline Values linear(const Values& x, const Values& w, const Values& bias, size_t rows, size_t in,
                     size_t out) {
  Values y(rows * out);
  for (size_t r = 0; r < rows; ++r) {
    for (size_t o = 0; o < out; ++o) {
      double sum = bias.empty() ? 0.0 : bias[o];
      for (size_t i = 0; i < in; ++i) sum += x[r * in + i] * w[o * in + i];
      y[r * out + o] = sum;
    }
  }
  return y;
}

inline Values rms_norm(const Values& x, const Values& weight, double eps) {
  const size_t dim = weight.size();
  Values y(x.size());
  for (size_t row = 0; row < x.size(); row += dim) {
    double squares = 0;
    for (size_t i = 0; i < dim; ++i) squares += x[row + i] * x[row + i];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(dim) + eps);
    for (size_t i = 0; i < dim; ++i) y[row + i] = x[row + i] * scale * weight[i];
  }
  return y;
}

inline Values layer_norm(const Values& x, const Values& weight, const Values& bias, double eps) {
  const size_t dim = weight.size();
  Values y(x.size());
  for (size_t row = 0; row < x.size(); row += dim) {
    double mean = 0;
    for (size_t i = 0; i < dim; ++i) mean += x[row + i] / static_cast<double>(dim);
    double variance = 0;
    for (size_t i = 0; i < dim; ++i) {
      variance += (x[row + i] - mean) * (x[row + i] - mean) / static_cast<double>(dim);
    }
    const double scale = 1 / std::sqrt(variance + eps);
    for (size_t i = 0; i < dim; ++i) y[row + i] = (x[row + i] - mean) * scale * weight[i] + bias[i];
  }
  return y;
}

/// x (rows, heads, head_dim); cos and sin (rows, half).
inline Values rotate(Values x, const Values& cos, const Values& sin, size_t rows, size_t heads,
                     size_t head_dim, size_t half) {
  for (size_t row = 0; row < rows; ++row) {
    for (size_t head = 0; head < heads; ++head) {
      double* low = x.data() + (row * heads + head) * head_dim;
      double* high = low + half;
      for (size_t i = 0; i < half; ++i) {
        const double a = low[i];
        const double b = high[i];
        low[i] = a * cos[row * half + i] - b * sin[row * half + i];
        high[i] = b * cos[row * half + i] + a * sin[row * half + i];
      }
    }
  }
  return x;
}

/// The formulas of kernels/activation.h in forms that do not cancel.
inline double activation(double x, Activation activation) {
  const auto sigmoid = [](double z) { return 1 / (1 + std::exp(-z)); };
  switch (activation) {
    case Activation::kQuickGelu:
      return x * sigmoid(static_cast<double>(1.702f) * x);
    case Activation::kGelu:
      return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh:
      return x * sigmoid(2 * std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x));
    case Activation::kSilu:
      return x * sigmoid(x);
  }
  return 0;
}

}  // namespace kvlm::reference
