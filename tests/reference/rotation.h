#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

// rotate=hadamard (docs/formulas.md, "Rotation"), by the recursion that defines Sylvester's
// matrices. Not independent in one point: numbers are floats and each level is added after the one
// below it, as in kernels/hadamard.h, because what is stored is rounded and coded.
namespace kvlm::reference {

/// [H a + H b, H a - H b] of the two halves of n numbers, a power of two.
inline std::vector<float> sylvester(const std::vector<float>& x) {
  if (x.size() == 1) return x;
  const auto middle = x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2);
  const std::vector<float> a = sylvester({x.begin(), middle});
  const std::vector<float> b = sylvester({middle, x.end()});
  std::vector<float> y;
  for (size_t i = 0; i < a.size(); ++i) y.push_back(a[i] + b[i]);
  for (size_t i = 0; i < a.size(); ++i) y.push_back(a[i] - b[i]);
  return y;
}

/// A vector turned: its first numbers, as many as the largest power of two, then the others alike.
inline std::vector<float> turned(const std::vector<float>& x) {
  size_t power = 1;
  while (2 * power <= x.size()) power *= 2;
  const auto end = x.begin() + static_cast<std::ptrdiff_t>(power);
  std::vector<float> y = sylvester({x.begin(), end});
  const float scale = 1 / std::sqrt(static_cast<float>(power));
  for (float& number : y) number *= scale;
  if (end == x.end()) return y;
  const std::vector<float> rest = turned({end, x.end()});
  y.insert(y.end(), rest.begin(), rest.end());
  return y;
}

/// (rows, heads * dim) numbers, each head of each row turned.
inline std::vector<float> turned_heads(const float* x, size_t count, size_t dim) {
  std::vector<float> all;
  for (size_t i = 0; i < count; i += dim) {
    const std::vector<float> head = turned({x + i, x + i + dim});
    all.insert(all.end(), head.begin(), head.end());
  }
  return all;
}

/// The same of outputs, which are in double, by the matrix: entry (i, j) is -1 to the number of
/// digits that i and j have in common.
inline void turn_back(std::vector<double>& row, size_t dim) {
  const std::vector<double> from = row;
  for (size_t head = 0; head < row.size(); head += dim) {
    for (size_t first = 0; first < dim;) {
      size_t power = 1;
      while (2 * power <= dim - first) power *= 2;
      for (size_t i = 0; i < power; ++i) {
        double sum = 0;
        for (size_t j = 0; j < power; ++j) {
          size_t common = 0;
          for (size_t digits = i & j; digits > 0; digits /= 2) common += digits % 2;
          sum += (common % 2 == 0 ? 1 : -1) * from[head + first + j];
        }
        row[head + first + i] = sum / std::sqrt(static_cast<double>(power));
      }
      first += power;
    }
  }
}

}  // namespace kvlm::reference
